"""Tokenize conversations so that special tokens are read as tokens in the template only, and as text in messages.

A template renders its special tokens and the messages into one text. No message may end its own turn, so special tokens
written in messages are distinguished from the template's before that text is tokenized.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from converters.common.errors import ConfigError, TitanError
from converters.tokenizers.special_text import special_tokens_in
from converters.tokenizers.tokenizer import Tokenizer
from titan_tools.infer.text.channels import TURN_ENDS, uses_channels
from titan_tools.infer.text.chat_template import ChatTemplate, Message

_Encode = Callable[[str], list[int]]
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters that Unicode never assigns


def encode_chat(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens of a conversation, up to the model's answer.

    Where no message contains a special token these are the tokens of the rendered text. Where one does, the template
    gets the message with a placeholder (a private-use character) instead, so that the text between two special tokens
    of the template can be tokenized as text. Words that a tokenizer added as ordinary tokens (Qwen's <think>) stay
    tokens. Raises ConfigError for a tokenizer that cannot read such a message as text, DataError for a token that the
    model has no row for.
    """
    return tokenizer.checked(_encode_chat(template, tokenizer, messages))


def _encode_chat(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    if (text := _render_harmless(template, tokenizer.special_names, messages)) is not None:
        return tokenizer.encode(text, special=True)
    covered, placeholders = _with_placeholders(tokenizer, messages, template.source)
    text = template.render(covered)
    whole, id_of = tokenizer.encode(text, special=True), _special_ids(tokenizer, text)
    _check_none_is_joined(template, tokenizer, covered, whole, id_of)
    if not placeholders:
        return whole
    parts = _split(text, id_of)
    encode_middle = _middle_encoder(tokenizer, parts, id_of, whole)
    if encode_middle is None:
        raise _not_readable_as_text(placeholders.values())
    for placeholder, name in placeholders.items():
        parts = [part.replace(placeholder, name) for part in parts]
    ids = _joined(parts, id_of, tokenizer.encode, encode_middle)
    special = {*id_of.values(), *(id for name in placeholders.values() for id in tokenizer.encode(name, special=True))}
    if sum(id in special for id in ids) != len(parts) // 2:
        raise _not_readable_as_text(placeholders.values())
    return ids


def turn_end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The special token that the template puts after the model's message, which ends its turn.

    Empty where the template puts something else there, or rejects such a conversation. Of answers in channels, the
    tokens that end the last one.
    """
    if uses_channels(template.source):
        found = _special_ids(tokenizer, "".join(TURN_ENDS))
        return frozenset(found[name] for name in TURN_ENDS if name in found)
    word = next(word for n in count() if (word := f"answer{n}") not in template.source)
    messages = [("user", "a question"), ("assistant", word), ("user", "a question")]
    try:
        text = template.render([{"role": role, "content": content} for role, content in messages])
    except TitanError:
        return frozenset()
    behind = text.rpartition(word)[2].lstrip()
    return frozenset(id for name, id in _special_ids(tokenizer, behind).items() if behind.startswith(name))


def _render_harmless(template: ChatTemplate, names: frozenset[str] | None, messages: Sequence[Message]) -> str | None:
    """The rendered text if all of its special tokens are the template's; None if that is not certain.

    Most conversations are of this kind, and are tokenized once. With a tokenizer whose special tokens are exactly
    `names`, a message without any of them writes no special token; and the template makes none of its words if the same
    ones remain without their first characters.
    """
    contents = [text for message in messages for text in message.values()]
    if names is None or any(special_tokens_in(text, names) for text in contents):
        return None
    text = template.render(messages)
    found = special_tokens_in(text, names)
    letters = {name[0] for name in found}
    if not any(letter in content for content in contents for letter in letters):
        return text
    try:
        without = template.render(_without_letters(template, messages, letters))
    except TitanError:  # a template that inspects the beginning of a message
        return None
    return text if special_tokens_in(without, names) == found else None


def _with_placeholders(
    tokenizer: Tokenizer, messages: Sequence[Message], source: str
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The messages with a placeholder for each special token in them; and placeholder → special token.

    A placeholder is not white space and not part of a word, so templates that strip or split do not change it.
    """
    covered = [dict(message) for message in messages]
    fields = [(message, key) for message in covered for key in message]
    free = _unused_characters(source, messages)
    placeholders: dict[str, str] = {}
    # Repeated, because the text around a replaced token may form another one
    while names := {name for message, key in fields for name in _special_ids(tokenizer, message[key])}:
        before = len(placeholders)
        for name in sorted(names, key=len, reverse=True):
            if any(name in message[key] for message, key in fields):
                placeholders[next(free)] = name
        if len(placeholders) == before:  # a tokenizer that reads other spellings as this token too
            raise _not_readable_as_text(names)
        for message, key in fields:
            for placeholder, name in placeholders.items():
                message[key] = message[key].replace(name, placeholder)
    return covered, placeholders


def _check_none_is_joined(
    template: ChatTemplate, tokenizer: Tokenizer, covered: Sequence[Message], ids: list[int], id_of: Mapping[str, int]
) -> None:
    """Raise if the template makes a special token of a message that contains none.

    A template that removes a word from a message (Nemotron's /no_think) joins the text around it. With placeholders for
    the first character of every special token no message can become one, so then there must be as many.
    """
    blunt = _without_letters(template, covered, {name[0] for name in id_of})
    if blunt == covered:
        return
    of_template = tokenizer.encode(template.render(blunt), special=True)
    if joined := [name for name, id in id_of.items() if ids.count(id) > of_template.count(id)]:
        raise ConfigError(f"the chat template makes a special token of a message's text: {', '.join(joined)}")


def _without_letters(template: ChatTemplate, messages: Sequence[Message], letters: set[str]) -> list[dict[str, str]]:
    """The messages with a placeholder for each of the characters `letters`."""
    free = _unused_characters(template.source, messages)
    covers = str.maketrans({letter: next(free) for letter in sorted(letters)})
    return [{key: text.translate(covers) for key, text in message.items()} for message in messages]


def _unused_characters(source: str, messages: Sequence[Message]) -> Iterator[str]:
    """Private-use characters that are neither in the template nor in a message."""
    used = {*source, *(letter for message in messages for text in message.values() for letter in text)}
    return (letter for letter in map(chr, _PRIVATE_USE) if letter not in used)


def _special_ids(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """The special tokens written in a text: those that are tokenized differently as text."""
    candidates = {*tokenizer.encode(text, special=True)} - {*tokenizer.encode(text)}
    named = ((tokenizer.decode([id]), id) for id in candidates)
    return {name: id for name, id in named if tokenizer.encode(name, special=True) == [id] != tokenizer.encode(name)}


def _split(text: str, names: Iterable[str]) -> list[str]:
    """Text, special token, text, …, text; texts may be empty."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]


def _joined(parts: Sequence[str], id_of: Mapping[str, int], first: _Encode, middle: _Encode) -> list[int]:
    ids: list[int] = []
    for place, part in enumerate(parts):
        if place % 2:
            ids.append(id_of[part])
        elif part:
            ids += middle(part) if place else first(part)
    return ids


def _middle_encoder(
    tokenizer: Tokenizer, parts: Sequence[str], id_of: Mapping[str, int], whole: list[int]
) -> _Encode | None:
    """The function that tokenizes text after a special token: the one with which the parts give the whole's tokens."""
    ways = (tokenizer.encode, _encoder_without_space(tokenizer))
    return next((way for way in ways if _joined(parts, id_of, tokenizer.encode, way) == whole), None)


def _encoder_without_space(tokenizer: Tokenizer) -> _Encode:
    """For tokenizers that add a space before a text, but not before text after a special token."""
    lead = chr(_PRIVATE_USE[-1])  # never merged with other characters
    ids_of_lead = tokenizer.encode(lead)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(lead + text)
        return ids[len(ids_of_lead) :] if ids[: len(ids_of_lead)] == ids_of_lead else tokenizer.encode(text)

    return encode


def _not_readable_as_text(names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"a message contains {', '.join(sorted(set(names)))}, which this tokenizer cannot read as text",
        hint="a special token in a message would end it, or begin another",
    )
