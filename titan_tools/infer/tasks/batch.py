"""Completions for the prompts of a JSON-lines file: a JSON line for each, or all in one object.

Prompts are processed in the file's order, not the longest first: then results can be printed soon after they finish,
and as prompts are packed behind each other, equal lengths would save nothing.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from converters.common.errors import ConfigError
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import GenerationSettings, Timings, generate
from titan_tools.infer.ranks import TPRanks
from titan_tools.infer.report import describe, progress_bar, result_of, stats_of
from titan_tools.infer.task import Work, generation_settings, num_rows
from titan_tools.infer.tasks.batch_lines import BatchLine, read_lines, shown
from titan_tools.infer.tasks.one_prompt import DEFAULT_NEW_TOKENS, make_conversation, make_prompt, new_tokens_that_fit
from titan_tools.infer.tasks.results import ExpectedResults, is_complete, note_on_stored, open_sink
from titan_tools.infer.tasks.results_settings import results_settings
from titan_tools.infer.text.prompts import Prompt
from titan_tools.terminal.console import count, note

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class _CompactPrompt:
    """A prompt that waits. Its tokens take 4 bytes each; in a list they would take 36."""

    id: str | int
    text: str
    tokens: "array[int]"
    lost: str

    def unpack(self) -> Prompt:
        return Prompt(self.id, self.text, self.tokens.tolist())


@dataclass(frozen=True, slots=True)
class BatchTask:
    """Completes every prompt of a batch; see task.py."""

    work: Work
    prompts: list[_CompactPrompt]
    expected: ExpectedResults
    settings: GenerationSettings
    rows: int
    room: int

    @property
    def least_tokens(self) -> int:
        return min((len(one.tokens) for one in self.prompts), default=0)

    def run(self, engine: Engine | None, ranks: TPRanks) -> None:
        request, samples = self.work.request, self.settings.samples
        with open_sink(request, self.expected, ranks) as (sink, missing):
            if sink is not None:
                self._note_on_truncated()
                note_on_stored(request.out, num_missing=len(missing), num=len(self.prompts), what="prompt")
            timings, started = Timings(), perf_counter()
            with progress_bar(request, ranks, len(missing) * samples, "generating") as advance:
                if missing:
                    assert engine is not None
                    waiting = (self.prompts[i].unpack() for i in missing)
                    for completion in generate(engine, waiting, self.settings, self.work.vocabulary, timings=timings):
                        if sink is not None:
                            key = (completion.prompt.id, completion.sample)
                            sink.append(key, result_of(completion, samples=samples))
                        advance()
            stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
            if sink is not None:
                sink.finish(stats)
                if missing and not request.as_json:
                    note(describe(stats, num=len(missing) * samples))

    def _note_on_truncated(self) -> None:
        if lost := [one for one in self.prompts if one.lost]:
            first = f"(id {lost[0].id!r}: {lost[0].lost})"
            note(f"--truncate left: the beginning of {count(len(lost), 'prompt')} is left out {first}")


def prepare_batch(work: Work) -> BatchTask:
    """The prompts of `work.request.batch`, each of which must fit the context; no result is written.

    Raises DataError with all invalid lines, and ConfigError if the results file cannot be continued.
    """
    request = work.request
    longest = 0

    def parse(line: BatchLine) -> _CompactPrompt:
        nonlocal longest
        prompt = _prompt_of(line, work)
        longest = max(longest, len(prompt.tokens) + new_tokens_that_fit(prompt, work))
        return _CompactPrompt(line.id, prompt.text, array("i", prompt.tokens), prompt.lost)

    prompts = read_lines(work, parse, keys=("prompt", "messages"))
    # The engine's room, `longest`, also limits each prompt: to the tokens that fit, or to max_length
    settings = generation_settings(
        work, max_new_tokens=request.max_new_tokens or request.max_length or DEFAULT_NEW_TOKENS
    )

    def inputs(position: int) -> dict[str, Any]:
        return {"prompt": prompts[position].text, "prompt_tokens": prompts[position].tokens.tolist()}

    ids = [one.id for one in prompts]
    expected = ExpectedResults(ids, inputs, settings.samples, results_settings(work) if request.out else None)
    rows = 0 if is_complete(request.out, expected) else num_rows(request, len(prompts) * settings.samples)
    return BatchTask(work, prompts, expected, settings, rows, longest)


def _prompt_of(line: BatchLine, work: Work) -> Prompt:
    if "messages" not in line.values:
        return make_prompt(work, line.id, line.text("prompt"))
    if "prompt" in line.values:
        raise ConfigError("has both 'prompt' and 'messages'")
    if work.template is None:
        raise ConfigError("'messages' need --chat", tries=["--chat"])
    return make_conversation(work, line.id, _messages(line.values["messages"]))


def _messages(value: Any) -> Sequence[Mapping[str, str]]:
    """Raises ConfigError if a line's messages are not a conversation that ends before an answer."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"'messages' must be a list of messages, not {shown(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ConfigError(f"message {number} must have 'role' and 'content', not {shown(message)}")
        if message["role"] not in _ROLES:
            raise ConfigError(f"the role of message {number} is {shown(message['role'])}, not one of {_ROLES}")
        if not isinstance(message["content"], str):
            raise ConfigError(f"the content of message {number} must be a string, not {shown(message['content'])}")
    if value[-1]["role"] in ("system", "assistant"):
        raise ConfigError(f"the last message is the {value[-1]['role']}'s: there is nothing to answer")
    return value
