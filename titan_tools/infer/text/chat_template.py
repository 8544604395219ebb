"""Messages of a conversation, written as the checkpoint's chat template says, and their tokens.

What a message says is text, whatever it says: only the template's own special tokens become tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from converters.assets import CHAT_TEMPLATES, find_assets
from converters.errors import CheckpointError, ConfigError, TitanError
from converters.json_file import read_json
from converters.names import TIKTOKEN_MODEL, TOKENIZER_CONFIG
from converters.tokenizers.tiktoken_model import BEGIN, END, looks_like_tiktoken
from titan_tools.infer.text.template_sandbox import Refusal, render_template
from trainer.data.tokenizer import Tokenizer

Message = Mapping[str, str]  # role, content
_Encode = Callable[[str], list[int]]

_JINJA, _PROCESSOR, _SPECIAL_MAP = "chat_template.jinja", "chat_template.json", "special_tokens_map.json"
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_NOW = "strftime_now"  # as templates call it
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # Unicode promises never to give these a meaning

# How Meta's own code writes messages for Llama 3 (llama-models, models/llama3/chat_format.py), whose releases bring no
# template
_LLAMA3_HEADERS = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template, the special tokens that it may name, where it came from, and what time it is to it."""

    source: str
    special_tokens: Mapping[str, str]
    where: str = "memory"
    moment: datetime = field(default_factory=datetime.now)

    @property
    def tells_time(self) -> bool:
        """Whether what it writes may be something else on another day."""
        return _NOW in self.source

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The text of `messages`; `answer`: with the beginning of the model's next one.

        Raises ConfigError where the template does not take such messages, CheckpointError where it is broken.
        """
        try:
            return self._render(messages, answer)
        except Refusal as refusal:
            raise ConfigError(
                f"the checkpoint's chat template refuses these messages: {refusal}",
                hint="it takes them without the system message" if self._takes_without_system(messages, answer) else "",
            ) from None

    def _render(self, messages: Sequence[Message], answer: bool) -> str:
        names = {
            **self.special_tokens,
            _NOW: self.moment.strftime,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": answer,
        }
        return render_template(self.source, names, where=self.where)

    def _takes_without_system(self, messages: Sequence[Message], answer: bool) -> bool:
        others = [message for message in messages if message["role"] != "system"]
        try:
            return len(others) < len(messages) and bool(self._render(others, answer))
        except (Refusal, TitanError):
            return False


def read_template(folder: Path) -> ChatTemplate:
    """The template of a checkpoint's folder, or Llama 3's headers for a release of Meta, which needs none.

    Raises CheckpointError where there is none.
    """
    assets = find_assets(folder)
    config = read_json(assets[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in assets else {}
    if _JINJA in assets:
        return ChatTemplate(_read_text(assets[_JINJA]), _special_tokens(assets, config), str(assets[_JINJA]))
    for place in (TOKENIZER_CONFIG, _PROCESSOR):
        content = read_json(assets[place]) if place in assets else {}
        if content.get("chat_template") is not None:
            source = _default_of(content["chat_template"], assets[place])
            return ChatTemplate(source, _special_tokens(assets, config), str(assets[place]))
    if TIKTOKEN_MODEL in assets and TOKENIZER_CONFIG not in assets and looks_like_tiktoken(assets[TIKTOKEN_MODEL]):
        return ChatTemplate(_LLAMA3_HEADERS, {"bos_token": BEGIN, "eos_token": END}, "titan, for releases of Meta")
    others = sorted(name for name in assets if name.startswith(CHAT_TEMPLATES))
    raise CheckpointError(
        f"{folder} has no chat template: neither a {_JINJA} nor a chat_template in a {TOKENIZER_CONFIG}",
        hint=f"there is no default one beside {', '.join(others)}" if others else "base models have none",
        tries=["--prompt TEXT without --chat", "--model-from FOLDER, one that has the template and this tokenizer"],
    )


def _default_of(found: Any, path: Path) -> str:
    """The template where it is alone, and the one named "default" of a list."""
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        by_name = {item.get("name"): item.get("template") for item in found}
        found = by_name.get("default")
        if found is None:
            raise CheckpointError(f"{path}: none of its chat templates {sorted(map(str, by_name))} is the default one")
    if not isinstance(found, str):
        raise CheckpointError(f"{path}: chat_template must be a text or a list of named ones, not {found!r:.80}")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _special_tokens(assets: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, str]:
    """What a template may name: bos_token and its like, from where transformers takes them."""
    named = dict(config)
    if _SPECIAL_MAP in assets and "added_tokens_decoder" not in config:
        named |= read_json(assets[_SPECIAL_MAP])
    texts = {name: named.get(name) for name in _NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in texts.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


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
