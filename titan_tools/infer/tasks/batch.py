"""What follows each prompt of a JSON-lines file: one JSON line each, or all in one object.

Prompts are taken up in the file's order, not the longest first: results then leave in it soon after they are made, and
as prompts go through the model packed behind each other, lengths that are alike would save nothing.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from converters.errors import ConfigError
from titan_tools.console import count, note
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Settings, Timings, generate
from titan_tools.infer.ranks.group import Ranks
from titan_tools.infer.report import describe, result_of, stats_of
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.batch_lines import Line, read_lines, shown
from titan_tools.infer.tasks.made_with import made_with
from titan_tools.infer.tasks.make_prompt import DEFAULT_NEW_TOKENS, make_conversation, make_prompt, new_tokens_that_fit
from titan_tools.infer.tasks.progress_bar import progress_bar
from titan_tools.infer.tasks.results_file import all_there, is_complete
from titan_tools.infer.tasks.results_lines import OF_MORE_SAMPLES, Expected, Key
from titan_tools.infer.tasks.settings import rows_of, settings_of
from titan_tools.infer.tasks.sinks import Sink, open_sink, opened_by_first
from titan_tools.infer.text.prompts import Prompt

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class _CompactPrompt:
    """A prompt until its turn comes. Its tokens take 4 bytes each; in a list they would take 36."""

    id: str | int
    text: str
    tokens: array
    lost: str

    def unpack(self) -> Prompt:
        return Prompt(self.id, self.text, self.tokens.tolist())


@dataclass(frozen=True, slots=True)
class Batch:
    """A task; see task.py."""

    work: Work
    prompts: list[_CompactPrompt]
    expected: Expected
    settings: Settings
    rows: int
    room: int

    def run(self, engine: Engine | None, ranks: Ranks) -> None:
        request, samples = self.work.request, self.settings.samples
        with opened_by_first(ranks, open_sink(request, self.expected), self._missing) as (sink, missing):
            if sink is not None:
                self._tell_beforehand(missing)
            timings, started = Timings(), perf_counter()
            waiting = (self.prompts[i].unpack() for i in missing)
            completions = generate(engine, waiting, self.settings, self.work.vocabulary, timings=timings)
            with progress_bar(request, ranks, len(missing) * samples, "generating") as advance:
                for completion in completions if missing else ():
                    key = (completion.prompt.id, completion.sample)
                    if sink is not None and key not in sink:
                        sink.append(key, result_of(completion, samples=samples))
                    advance()
            stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
            if sink is not None:
                sink.finish(stats)
                if missing and not request.as_json:
                    note(describe(stats, num=len(missing) * samples))

    def _missing(self, sink: Sink) -> list[int]:
        samples = range(self.settings.samples)
        return [i for i, one in enumerate(self.prompts) if not all((one.id, sample) in sink for sample in samples)]

    def _tell_beforehand(self, missing: list[int]) -> None:
        out = self.work.request.out
        if lost := [one for one in self.prompts if one.lost]:
            first = f"(id {lost[0].id!r}: {lost[0].lost})"
            note(f"--truncate left: the beginning of {count(len(lost), 'prompt')} is left out {first}")
        if not missing:
            note(all_there(out))
        elif num_done := len(self.prompts) - len(missing):
            note(f"{num_done:,} of {count(len(self.prompts), 'prompt')} are in {out} already: skipped")


def prepare_batch(work: Work) -> Batch:
    """The prompts of `work.request.batch`, each of which must fit, and a file that can take their results.

    Raises DataError with all lines that are wrong, and ConfigError where that file is; nothing is written.
    """
    request = work.request
    longest = 0

    def take(line: Line) -> _CompactPrompt:
        nonlocal longest
        prompt = _prompt_of(line, work)
        new = new_tokens_that_fit(prompt, work)
        longest = max(longest, len(prompt.tokens) + new)
        return _CompactPrompt(line.id, prompt.text, array("i", prompt.tokens), prompt.lost)

    prompts = read_lines(work, take, keys=("prompt", "messages"))
    # `longest` leaves each prompt just the new tokens that fit it: 128 at most, or what was asked for
    # and one with a max_length what is left of that, which is then as long as the longest
    new = request.max_new_tokens or request.max_length or DEFAULT_NEW_TOKENS
    settings = settings_of(work, max_new_tokens=new)
    keys = [(one.id, sample) for one in prompts for sample in range(settings.samples)]
    differs = partial(_difference, {one.id: one for one in prompts}, settings.samples)
    expected = Expected(keys, differs, made_with(work) if request.out else None)
    is_done = is_complete(request.out, expected)
    return Batch(work, prompts, expected, settings, 0 if is_done else rows_of(request, len(keys)), longest)


def _prompt_of(line: Line, work: Work) -> Prompt:
    if "messages" not in line.values:
        return make_prompt(work, line.id, line.text("prompt"))
    if "prompt" in line.values:
        raise ConfigError("has both 'prompt' and 'messages'")
    if work.template is None:
        raise ConfigError("'messages' are of a chat", tries=["--chat"])
    return make_conversation(work, line.id, _messages(line.values["messages"]))


def _messages(value: Any) -> Sequence[Mapping[str, str]]:
    """Raises ConfigError where a line's messages are not a conversation that waits for an answer."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"'messages' must be a list of messages, not {shown(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ConfigError(f"message {number} must have 'role' and 'content', and is {shown(message)}")
        if message["role"] not in _ROLES:
            raise ConfigError(f"the role of message {number} is {shown(message['role'])}, not one of {_ROLES}")
        if not isinstance(message["content"], str):
            raise ConfigError(f"the content of message {number} must be a string, not {shown(message['content'])}")
    if value[-1]["role"] in ("system", "assistant"):
        raise ConfigError(f"the last message is the {value[-1]['role']}'s: there is nothing to answer")
    return value


def _difference(by_id: Mapping[str | int, _CompactPrompt], samples: int, key: Key, result: dict[str, Any]) -> str:
    """What makes a result of an earlier run with the same settings another's than this run's; "" for nothing."""
    one, prompt_tokens = by_id[key[0]], result.get("prompt_tokens")
    if not isinstance(result.get("tokens"), list) or "text" not in result:
        return "no result"
    if result.get("prompt") != one.text:
        return "another prompt"
    if prompt_tokens != one.tokens.tolist():
        return "other tokens of the same prompt"
    return OF_MORE_SAMPLES if "sample" in result and samples == 1 else ""
