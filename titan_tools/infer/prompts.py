"""Prompts: read from an argument, a file or stdin, and turned into tokens that fit the model."""

import sys
from dataclasses import dataclass
from pathlib import Path

from converters.errors import ConfigError
from titan_tools.infer.task import Work
from titan_tools.launch import inside_launch

DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its tokens, begin-of-text included. `id` names it in the output and in the noise."""

    id: str | int
    text: str
    tokens: list[int]


def read_prompt(*, text: str | None, file: Path | None, source: str | None) -> str | None:
    """The prompt from the one place that was named, exactly as it is, or None where none was.

    Raises ConfigError where it is not text, and for more than one place.
    """
    if source not in (None, "-"):
        raise ConfigError(
            f"the second argument is {source!r}, and only - (standard input) can stand there",
            tries=[f'--prompt "{source}"', f"--prompt-file {source}"],
        )
    given = [place for place in (text, file, source) if place is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError("give one prompt: --prompt TEXT, --prompt-file FILE, or - for standard input")
    if text is not None:
        # The shell's bytes that are no UTF-8 arrive as lone surrogates; give them back to find the offset.
        return _decode(text.encode("utf-8", "surrogateescape"), "--prompt")
    if file is not None:
        try:
            return _decode(file.read_bytes(), str(file))
        except OSError as error:
            raise ConfigError(f"cannot read the prompt file {file}: {error.strerror}") from None
    if inside_launch():
        raise ConfigError(
            "ranks under torchrun have no standard input of their own",
            tries=["--prompt-file FILE", "titan infer … --tp N -, which starts the ranks itself"],
        )
    return _decode(sys.stdin.buffer.read(), "standard input")


def _decode(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt in {where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            hint="a prompt is plain text; convert it first, for example with iconv",
        ) from None
    if "\0" in text:
        raise ConfigError(
            f"the prompt in {where} holds a NUL byte at offset {data.index(0)}", hint="a binary file, or UTF-16 text?"
        )
    if not text.strip():
        what = "is empty" if not text else "holds nothing but white space"
        raise ConfigError(f"the prompt in {where} {what}", tries=['--prompt "Once upon a time"'])
    return text


def read_one(work: Work) -> Prompt:
    """The one prompt of a request, as the model shall see it: behind the begin-of-text token, or in its template."""
    text = work.request.text
    return Prompt("0", text, work.vocabulary.tokenizer.encode(text, bos=True, eos=False))


def new_tokens_that_fit(prompt: Prompt, *, max_new_tokens: int | None, context: int) -> int:
    """How many tokens to generate: as asked, else 128 or what the context leaves. Raises ConfigError if too many."""
    num_prompt = len(prompt.tokens)
    room = context - num_prompt
    if room < 1 or (max_new_tokens or 1) > room:
        asked = f" and {max_new_tokens} new ones" if max_new_tokens else ""
        raise ConfigError(
            f"{num_prompt} prompt tokens{asked} do not fit the model's context of {context} tokens",
            hint=f"at most {room} new tokens fit behind this prompt" if room > 0 else "the prompt itself is too long",
            tries=[f"--max-new-tokens {room}"] if room > 0 else [],
        )
    return max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
