"""Prompts: read from an argument, a file or stdin, and turned into tokens that fit the model."""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from converters.errors import CheckpointError, ConfigError
from trainer.data.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its tokens, begin-of-text included. `id` names it in the output and in the noise."""

    id: str
    text: str
    tokens: list[int]


def read_prompt(*, text: str | None, file: Path | None, stdin: bool) -> str:
    """The prompt from the one place that was named, exactly as it is. Raises ConfigError for anything but UTF-8 text."""
    if (text is not None) + (file is not None) + stdin != 1:
        raise ConfigError(
            "give one prompt: --prompt TEXT, --prompt-file FILE, or - for standard input",
            tries=['titan infer CHECKPOINT --prompt "Once upon a time"'],
        )
    if text is not None:
        # The shell's bytes that are no UTF-8 arrive as lone surrogates; give them back to find the offset.
        return _decode(text.encode("utf-8", "surrogateescape"), "--prompt")
    if file is not None:
        try:
            return _decode(file.read_bytes(), str(file))
        except OSError as error:
            raise ConfigError(f"cannot read the prompt file {file}: {error.strerror}") from None
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


def encode_prompt(text: str, tokenizer: Tokenizer) -> Prompt:
    """Tokens of `text` behind the begin-of-text token, as the model saw documents in training."""
    return Prompt("0", text, tokenizer.encode(text, bos=True, eos=False))


def new_tokens_that_fit(prompt: Prompt, *, max_new_tokens: int | None, context: int) -> int:
    """How many tokens to generate: what was asked for, else 128 or what the context leaves. Raises ConfigError if too many."""
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


def check_vocabulary(tokenizer: Tokenizer, stop_ids: Collection[int], *, vocab_size: int) -> None:
    """Raise CheckpointError where the tokenizer, or a special token, names rows that the embedding does not have."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding {vocab_size} rows",
            hint="this tokenizer belongs to another model",
        )
    special = {tokenizer.bos_id, *stop_ids} - {None}
    if wrong := sorted(i for i in special if not 0 <= i < vocab_size):
        raise CheckpointError(
            f"special token ids {wrong} lie beyond the model's {vocab_size} embedding rows",
            hint="the tokenizer or the generation config belongs to another model",
        )


def decode_tokens(tokens: list[int], tokenizer: Tokenizer) -> str:
    """Text of `tokens`. Embedding rows may outnumber the tokenizer's tokens: an id it does not know shows as U+FFFD."""
    known, parts = [], []
    for token in tokens:
        if token < tokenizer.vocab_size:
            known.append(token)
        else:
            parts += [tokenizer.decode(known), "\ufffd"]
            known = []
    return "".join([*parts, tokenizer.decode(known)])
