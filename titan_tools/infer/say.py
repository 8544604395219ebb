"""What follows one prompt: text as it comes, or one JSON object."""

import sys
from dataclasses import dataclass
from time import perf_counter

from titan_tools.console import note, print_json
from titan_tools.infer.engine import Engine
from titan_tools.infer.generate import Settings, Timings, generate
from titan_tools.infer.prompts import Prompt, new_tokens_that_fit, read_one
from titan_tools.infer.ranks import Ranks
from titan_tools.infer.report import describe, result_of, stats_of
from titan_tools.infer.task import Work


@dataclass(frozen=True, slots=True)
class OnePrompt:
    """A task; see task.py."""

    work: Work
    prompt: Prompt
    settings: Settings
    rows: int
    room: int

    def run(self, engine: Engine, ranks: Ranks) -> None:
        request, timings, started = self.work.request, Timings(), perf_counter()
        streams = ranks.is_first and not request.as_json and request.samples == 1
        completions = list(
            generate(
                engine,
                [self.prompt],
                self.settings,
                self.work.vocabulary,
                timings=timings,
                on_text=_print if streams else None,
            )
        )
        stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
        if not ranks.is_first:
            return
        completions.sort(key=lambda completion: completion.sample)
        if request.as_json:
            results = [result_of(completion, samples=request.samples) for completion in completions]
            print_json({"results": results, "stats": stats})
            return
        if streams:
            _print("\n")
        else:
            for completion in completions:
                print(f"--- {completion.sample}\n{completion.text}", flush=True)
        note(describe(stats))


def prepare_one(work: Work) -> OnePrompt:
    """The prompt of `work.request.text`, which must fit the model's context."""
    request = work.request
    prompt = read_one(work)
    num_new = new_tokens_that_fit(prompt, max_new_tokens=request.max_new_tokens, context=work.args.max_seq_len)
    rows = min(request.samples, request.batch_size or request.samples)
    return OnePrompt(work, prompt, settings_of(work, max_new_tokens=num_new), rows, len(prompt.tokens) + num_new)


def settings_of(work: Work, *, max_new_tokens: int) -> Settings:
    """How `generate` shall continue, from what was asked and from what the checkpoint says of its ends."""
    request, vocabulary = work.request, work.vocabulary
    return Settings(
        max_new_tokens=max_new_tokens,
        sampling=request.sampling,
        stop_ids=frozenset() if request.ignore_eos else vocabulary.stop_ids,
        stop_strings=(*request.stop, *vocabulary.stop_strings),
        logprobs=request.logprobs,
        samples=request.samples,
    )


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
