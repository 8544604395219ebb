"""What follows one prompt: text as it comes, or one JSON object."""

from dataclasses import dataclass
from time import perf_counter

from titan_tools.console import note, print_json, stream
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, Settings, Timings, generate
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.report import describe, result_of, stats_of
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.in_order import InOrder
from titan_tools.infer.tasks.make_prompt import make_prompt, new_tokens_that_fit, notes_on
from titan_tools.infer.tasks.settings import rows_of, settings_of
from titan_tools.infer.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class OnePrompt:
    """A task; see task.py."""

    work: Work
    prompt: Prompt
    settings: Settings
    rows: int
    room: int

    def run(self, engine: Engine, ranks: Ranks) -> None:
        as_json, samples = self.work.request.as_json, self.settings.samples
        talks = ranks.is_first and not as_json
        if ranks.is_first:
            for line in notes_on(self.work, self.prompt):
                note(line)
        timings, started = Timings(), perf_counter()
        ordered, completions = InOrder([(self.prompt.id, sample) for sample in range(samples)]), []
        for completion in generate(
            engine,
            [self.prompt],
            self.settings,
            self.work.vocabulary,
            timings=timings,
            on_text=stream if talks and samples == 1 else None,
        ):
            for due in ordered.put((self.prompt.id, completion.sample), completion):
                completions.append(due)
                if talks:
                    stream("\n" if samples == 1 else _with_header(due))
        stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
        if talks:
            note(describe(stats, num=samples))
        elif ranks.is_first:
            print_json({"results": [result_of(one, samples=samples) for one in completions], "stats": stats})


def prepare_one(work: Work) -> OnePrompt:
    """The prompt of `work.request.text`, which must fit the model's context."""
    request = work.request
    prompt = make_prompt(work, "0", request.text)
    num_new = new_tokens_that_fit(prompt, work)
    settings, rows = settings_of(work, max_new_tokens=num_new), rows_of(request, request.samples)
    return OnePrompt(work, prompt, settings, rows, len(prompt.tokens) + num_new)


def _with_header(completion: Completion) -> str:
    return f"--- {completion.sample}\n{completion.text}\n"
