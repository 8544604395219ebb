"""What follows one prompt: text as it comes, or one JSON object."""

from dataclasses import dataclass
from time import perf_counter

import torch

from titan_tools.console import note, print_json, stream
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, Settings, Timings, generate
from titan_tools.infer.ranks import Ranks
from titan_tools.infer.report import describe, result_of, stats_of
from titan_tools.infer.request import Request
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.make_prompt import make_prompt, new_tokens_that_fit, notes_on
from titan_tools.infer.tasks.sinks import InOrder
from titan_tools.infer.text.chat_tokens import turn_end_ids
from titan_tools.infer.text.prompts import Prompt

_ROWS_ON_CPU, _ROWS_ON_GPU = 8, 32


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
    num_new = new_tokens_that_fit(prompt, max_new_tokens=request.max_new_tokens, context=work.args.max_seq_len)
    settings, rows = settings_of(work, max_new_tokens=num_new), rows_of(request, request.samples)
    return OnePrompt(work, prompt, settings, rows, len(prompt.tokens) + num_new)


def settings_of(work: Work, *, max_new_tokens: int) -> Settings:
    """How `generate` shall continue, from what was asked and from what the checkpoint says of its ends."""
    request, vocabulary = work.request, work.vocabulary
    stop_ids = vocabulary.stop_ids
    if work.template is not None:
        stop_ids |= turn_end_ids(work.template, vocabulary.tokenizer)
    return Settings(
        max_new_tokens=max_new_tokens,
        sampling=request.sampling,
        stop_ids=frozenset() if request.ignore_eos else stop_ids,
        stop_strings=(*request.stop, *vocabulary.stop_strings),
        logprobs=request.logprobs,
        samples=request.samples,
    )


def rows_of(request: Request, num_sequences: int) -> int:
    """Sequences at a time: --batch-size, else as many as a machine's memory does not mind."""
    return min(num_sequences, request.batch_size or (_ROWS_ON_GPU if torch.cuda.is_available() else _ROWS_ON_CPU))


def _with_header(completion: Completion) -> str:
    return f"--- {completion.sample}\n{completion.text}\n"
