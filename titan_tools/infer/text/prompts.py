"""Prompts: read from an argument, a file or standard input, exactly as they are; and their tokens."""

import sys
from dataclasses import dataclass
from pathlib import Path

from converters.common.errors import ConfigError
from titan_tools.launch.rank import inside_launch
from titan_tools.terminal.console import note

FROM_BOS = "--from-bos, to begin with the begin-of-text token alone"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its tokens, begin-of-text included. `id` names it in the output and in the noise."""

    id: str | int
    text: str
    tokens: list[int]
    lost: str = ""  # the part that --truncate left removed, for messages


def read_prompt(*, text: str | None, file: Path | None, source: str | None) -> str | None:
    """The prompt from the option that was given, exactly as it is, or None without one.

    Raises ConfigError if it is not text, and for more than one option.
    """
    if source not in (None, "-"):
        raise ConfigError(
            f"the second argument is {source!r}, and only - (standard input) is allowed there",
            tries=[f'--prompt "{source}"', f"--prompt-file {source}"],
        )
    given = [option for option in (text, file, source) if option is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError("give one prompt: --prompt TEXT, --prompt-file FILE, or - for standard input")
    if text is not None:
        # Bytes of the shell that are not UTF-8 arrive as lone surrogates; convert them back to find the offset
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
    return _decode(_read_standard_input(), "standard input")


def _read_standard_input() -> bytes:
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError("there is no standard input to read a prompt from", tries=["--prompt TEXT"])
    if sys.stdin.isatty():
        note("reading the prompt from the terminal; Ctrl-D on a line of its own ends it")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:  # a folder, for example
        raise ConfigError(f"cannot read the prompt from standard input: {error.strerror}") from None


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
    return text


def why_empty(text: str, *, from_bos: bool) -> str:
    """The problem of a prompt without text; "" for any other."""
    if from_bos or text.strip():
        return ""
    return "is empty" if not text else "holds nothing but white space"
