"""What follows each prompt of a JSON-lines file: one JSON line each, or all in one object.

Prompts are taken up in the file's order, not the longest first: results then leave in it soon after they are made, and
as each prompt goes through the model by itself, lengths that are alike would save nothing.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from converters.errors import ConfigError
from titan_tools.console import count, note
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Settings, Timings, generate
from titan_tools.infer.ranks import Ranks
from titan_tools.infer.report import describe, result_of, stats_of
from titan_tools.infer.task import Work
from titan_tools.infer.tasks.batch_lines import Line, read_lines, shown
from titan_tools.infer.tasks.make_prompt import DEFAULT_NEW_TOKENS, make_conversation, make_prompt, new_tokens_that_fit
from titan_tools.infer.tasks.results_file import Key, all_there, is_complete
from titan_tools.infer.tasks.say import rows_of, settings_of
from titan_tools.infer.tasks.sinks import Sink, bar, open_sink
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
    keys: list[Key]  # of all results, in their order
    settings: Settings
    rows: int
    room: int

    def run(self, engine: Engine | None, ranks: Ranks) -> None:
        samples = self.settings.samples
        with self._open_sink() if ranks.is_first else nullcontext() as sink:
            # Told by one rank to all: the file changes while they run, and each must make the same calls.
            missing = ranks.told_by_first(self._missing(sink) if ranks.is_first else None)
            if ranks.is_first:
                self._tell_beforehand(missing)
            timings, started = Timings(), perf_counter()
            waiting = (self.prompts[i].unpack() for i in missing)
            completions = generate(engine, waiting, self.settings, self.work.vocabulary, timings=timings)
            with bar(self.work.request, ranks, len(missing) * samples, "generating") as advance:
                for completion in completions if missing else ():
                    key = (completion.prompt.id, completion.sample)
                    if ranks.is_first and key not in sink:
                        sink.append(key, result_of(completion, samples=samples))
                    advance()
            stats = stats_of(timings, engine, ranks, self.work, secs=perf_counter() - started)
            if ranks.is_first:
                sink.finish(stats)
                if missing and not self.work.request.as_json:
                    note(describe(stats, num=len(missing) * samples))

    def _open_sink(self) -> AbstractContextManager[Sink]:
        request = self.work.request
        differs = _comparison(self.prompts, self.settings, self.work)
        return open_sink(request.out, self.keys, differs, as_json=request.as_json)

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
    """The prompts of `work.request.batch`, each of which must fit, and an OUT that can take their results.

    Raises DataError with all lines that are wrong, and ConfigError for what is wrong with OUT; nothing is written.
    """
    request, context = work.request, work.args.max_seq_len
    longest = 0

    def take(line: Line) -> _CompactPrompt:
        nonlocal longest
        prompt = _prompt_of(line, work)
        new = new_tokens_that_fit(prompt, max_new_tokens=request.max_new_tokens, context=context)
        longest = max(longest, len(prompt.tokens) + new)
        return _CompactPrompt(line.id, prompt.text, array("i", prompt.tokens), prompt.lost)

    prompts = read_lines(work, take, keys=("prompt", "messages"))
    # `longest` leaves each prompt just the new tokens that fit it: 128 at most, or what was asked for
    settings = settings_of(work, max_new_tokens=request.max_new_tokens or DEFAULT_NEW_TOKENS)
    keys = [(one.id, sample) for one in prompts for sample in range(settings.samples)]
    is_done = is_complete(request.out, keys, _comparison(prompts, settings, work))
    return Batch(work, prompts, keys, settings, 0 if is_done else rows_of(request, len(keys)), longest)


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


def _comparison(
    prompts: Sequence[_CompactPrompt], settings: Settings, work: Work
) -> Callable[[Key, dict[str, Any]], str]:
    tells_time = work.template is not None and work.template.tells_time
    return partial(_difference, {one.id: one for one in prompts}, settings, tells_time)


def _difference(
    by_id: Mapping[str | int, _CompactPrompt], settings: Settings, tells_time: bool, key: Key, result: dict[str, Any]
) -> str:
    """What makes a result of an earlier run another than one that this run would make; "" for nothing.

    A result does not tell all options that made it, so that another --temperature, say, goes unnoticed. Nor does
    another --system where the template `tells_time`: a rerun on the next day goes on, though its tokens are others.
    """
    one, tokens, prompt_tokens = by_id[key[0]], result.get("tokens"), result.get("prompt_tokens")
    if not isinstance(tokens, list) or not isinstance(prompt_tokens, list) or "text" not in result:
        return "no result"
    if result.get("prompt") != one.text:
        return "another prompt" + (", or one that tells another day" if tells_time else "")
    if not tells_time and prompt_tokens != one.tokens.tolist():
        return "other tokens of the same prompt: another tokenizer, template, --system or --truncate"
    if ("sample" in result) != (settings.samples > 1):
        return "another number of --samples"
    if (result.get("logprobs") is None) != (settings.logprobs is None):
        return "made with --logprobs" if settings.logprobs is None else "made without --logprobs"
    return "more tokens than --max-new-tokens" if len(tokens) > settings.max_new_tokens else ""
