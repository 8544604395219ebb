"""The tokens of a conversation: what a message says is text, and only the template's own special tokens are tokens.

A template writes one text of its special tokens and the messages. So that no user can end a turn that is not theirs,
special tokens that a message writes are told from the template's before that text is read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from converters.errors import ConfigError, TitanError
from titan_tools.infer.text.chat_template import ChatTemplate, Message
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
    covered, hidden = _cover(tokenizer, messages, template.source)
    text = template.render(covered)
    ids = tokenizer.encode(text, special=True)
    id_of = _special_ids(tokenizer, text)
    _check_none_is_joined(template, tokenizer, covered, ids, id_of)
    if not hidden:
        return ids
    parts = _split(text, id_of)
    for encode in (tokenizer.encode, _encoder_of_middles(tokenizer)):
        if _joined(parts, id_of, tokenizer.encode, encode) == ids:  # so this is how text behind a special token is read
            break
    else:
        raise _no_text_for(hidden.values())
    for cover, name in hidden.items():
        parts = [part.replace(cover, name) for part in parts]
    ids = _joined(parts, id_of, tokenizer.encode, encode)
    special = {*id_of.values(), *(id for name in hidden.values() for id in tokenizer.encode(name, special=True))}
    if sum(id in special for id in ids) != len(parts) // 2:
        raise _no_text_for(hidden.values())
    return ids


def turn_end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The special token that the template puts behind what the model said: its turn ends there.

    None where the template puts something else there, or takes no such conversation.
    """
    word = next(word for n in count() if (word := f"answer{n}") not in template.source)
    messages = [("user", "a question"), ("assistant", word), ("user", "a question")]
    try:
        text = template.render([{"role": role, "content": content} for role, content in messages])
    except TitanError:
        return frozenset()
    behind = text.rpartition(word)[2].lstrip()
    return frozenset(id for name, id in _special_ids(tokenizer, behind).items() if behind.startswith(name))


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
    free = _letters_of_nobody(template.source, covered)
    covers = str.maketrans({letter: next(free) for letter in {name[0] for name in id_of}})
    blunt = [{key: text.translate(covers) for key, text in message.items()} for message in covered]
    if blunt == covered:
        return
    of_template = tokenizer.encode(template.render(blunt), special=True)
    if joined := [name for name, id in id_of.items() if ids.count(id) > of_template.count(id)]:
        raise ConfigError(f"the chat template makes a special token of what a message says: {', '.join(joined)}")


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
