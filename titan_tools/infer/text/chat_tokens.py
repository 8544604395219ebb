"""The tokens of a conversation: what a message says is text, and only the template's own special tokens are tokens.

A template writes one text of its special tokens and the messages. So that no user can end a turn that is not theirs,
special tokens that a message writes are told from the template's before that text is read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from converters.errors import ConfigError, TitanError
from titan_tools.infer.text.chat_template import ChatTemplate, Message
from titan_tools.infer.text.special_tokens import written
from trainer.data.tokenizer import Tokenizer

_Encode = Callable[[str], list[int]]
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # Unicode promises never to give these a meaning


def encode_chat(template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens of a conversation up to where the model answers. The template says where its special tokens stand.

    Where no message writes a special token these are the tokens of the rendered text. Where one does, the template
    gets the message with a private character in its place, so that what stands between two special tokens of the
    template can be read as text alone. Words that a tokenizer added as ordinary ones (Qwen's <think>) stay words.
    Raises ConfigError for a tokenizer that has no text for such a message.
    """
    if (text := _render_harmless(template, tokenizer.special_names, messages)) is not None:
        return tokenizer.encode(text, special=True)
    covered, hidden = _cover(tokenizer, messages, template.source)
    text = template.render(covered)
    whole, id_of = tokenizer.encode(text, special=True), _special_ids(tokenizer, text)
    _check_none_is_joined(template, tokenizer, covered, whole, id_of)
    if not hidden:
        return whole
    parts = _split(text, id_of)
    encode_middle = _way_to_read_middles(tokenizer, parts, id_of, whole)
    if encode_middle is None:
        raise _no_text_for(hidden.values())
    for cover, name in hidden.items():
        parts = [part.replace(cover, name) for part in parts]
    ids = _joined(parts, id_of, tokenizer.encode, encode_middle)
    special = {*id_of.values(), *(id for name in hidden.values() for id in tokenizer.encode(name, special=True))}
    if sum(id in special for id in ids) != len(parts) // 2:
        raise _no_text_for(hidden.values())
    return ids


def turn_end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The special token that the template puts behind what the model said: its turn ends there.

    Empty where the template puts something else there, or takes no such conversation.
    """
    word = next(word for n in count() if (word := f"answer{n}") not in template.source)
    messages = [("user", "a question"), ("assistant", word), ("user", "a question")]
    try:
        text = template.render([{"role": role, "content": content} for role, content in messages])
    except TitanError:
        return frozenset()
    behind = text.rpartition(word)[2].lstrip()
    return frozenset(id for name, id in _special_ids(tokenizer, behind).items() if behind.startswith(name))


def _render_harmless(template: ChatTemplate, names: frozenset[str] | None, messages: Sequence[Message]) -> str | None:
    """The text of messages whose special tokens are all the template's; None where that has to be looked into.

    Most conversations are so, and are encoded once. Where a tokenizer's `names` are all that counts, a message that
    holds none writes no special token; and none is made of it if there are the same ones without their first letters.
    """
    said = [text for message in messages for text in message.values()]
    if names is None or any(written(text, names) for text in said):
        return None
    text = template.render(messages)
    found = written(text, names)
    letters = {name[0] for name in found}
    if not any(letter in text for text in said for letter in letters):
        return text
    try:
        without = template.render(_without_letters(template, messages, letters))
    except TitanError:  # a template that asks how a message begins
        return None
    return text if written(without, names) == found else None


def _cover(
    tokenizer: Tokenizer, messages: Sequence[Message], source: str
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The messages with each special token that they write replaced by a character of nobody, and whose it stands for.

    Such a character is no white space and no part of a word, so a template that trims or splits leaves it alone.
    """
    covered = [dict(message) for message in messages]
    places = [(message, key) for message in covered for key in message]
    free = _letters_of_nobody(source, messages)
    hidden: dict[str, str] = {}
    # again, for what a token stood between may be one too
    while names := {name for message, key in places for name in _special_ids(tokenizer, message[key])}:
        before = len(hidden)
        for name in sorted(names, key=len, reverse=True):
            if any(name in message[key] for message, key in places):
                hidden[next(free)] = name
        if len(hidden) == before:  # a tokenizer that also reads other spellings as this token
            raise _no_text_for(names)
        for message, key in places:
            for cover, name in hidden.items():
                message[key] = message[key].replace(name, cover)
    return covered, hidden


def _check_none_is_joined(
    template: ChatTemplate, tokenizer: Tokenizer, covered: Sequence[Message], ids: list[int], id_of: Mapping[str, int]
) -> None:
    """Raise where the template made a special token of a message that wrote none.

    A template that takes a word out of a message (Nemotron's /no_think) joins what stood around it. With the first
    letter of all special tokens covered no message can become one, so then there must be as many.
    """
    blunt = _without_letters(template, covered, {name[0] for name in id_of})
    if blunt == covered:
        return
    of_template = tokenizer.encode(template.render(blunt), special=True)
    if joined := [name for name, id in id_of.items() if ids.count(id) > of_template.count(id)]:
        raise ConfigError(f"the chat template makes a special token of what a message says: {', '.join(joined)}")


def _without_letters(template: ChatTemplate, messages: Sequence[Message], letters: set[str]) -> list[dict[str, str]]:
    """The messages with a character of nobody in place of each of `letters`."""
    free = _letters_of_nobody(template.source, messages)
    covers = str.maketrans({letter: next(free) for letter in sorted(letters)})
    return [{key: text.translate(covers) for key, text in message.items()} for message in messages]


def _letters_of_nobody(source: str, messages: Sequence[Message]) -> Iterator[str]:
    """Characters that stand neither in the template nor in a message."""
    used = {*source, *(letter for message in messages for text in message.values() for letter in text)}
    return (letter for letter in map(chr, _PRIVATE_USE) if letter not in used)


def _special_ids(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """The special tokens written in a text: those that are read as something else where none are looked for."""
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


def _way_to_read_middles(
    tokenizer: Tokenizer, parts: Sequence[str], id_of: Mapping[str, int], whole: list[int]
) -> _Encode | None:
    """How text behind a special token is read: the way in which the parts give the tokens of the whole."""
    ways = (tokenizer.encode, _encoder_of_middles(tokenizer))
    return next((way for way in ways if _joined(parts, id_of, tokenizer.encode, way) == whole), None)


def _encoder_of_middles(tokenizer: Tokenizer) -> _Encode:
    """For tokenizers that put a space before a text, but not before what stands behind a special token."""
    lead = chr(_PRIVATE_USE[-1])  # merges with nothing
    ids_of_lead = tokenizer.encode(lead)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(lead + text)
        return ids[len(ids_of_lead) :] if ids[: len(ids_of_lead)] == ids_of_lead else tokenizer.encode(text)

    return encode


def _no_text_for(names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"a message writes {', '.join(sorted(set(names)))}, and this tokenizer cannot read that as text",
        hint="a special token in a message would end it, or begin another",
    )
