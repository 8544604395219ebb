"""Chat files for fine-tuning: write a small sample, and check a given one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import ConfigError, in_words, list_offenders
from converters.common.names import CHAT_LINES, CHAT_LIST
from converters.store.local_files import open_text, write_text

_ROLES = ("system", "user", "assistant")
_SHAPE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'

# Enough to see the loss decrease; meant to be replaced.
_CONVERSATIONS = (
    ("What is the capital of France?", "Paris."),
    ("How many legs does a spider have?", "Eight."),
    ("Which planet is closest to the sun?", "Mercury."),
    ("What is 12 times 12?", "144."),
    ("Name the largest ocean.", "The Pacific."),
    ("At what temperature does water boil at sea level?", "At 100 degrees Celsius."),
    ("What do bees make?", "Honey."),
    ("Which gas do plants take from the air?", "Carbon dioxide."),
)


@dataclass(frozen=True, slots=True)
class ChatFile:
    """The name of a chat file in the output, and the number of its conversations."""

    name: str
    num_conversations: int


def write_sample(path: Path) -> None:
    """Write a chat file with a few questions and answers, one conversation per line."""
    lines = []
    for question, answer in _CONVERSATIONS:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    write_text(path, "\n".join(lines) + "\n")


def check_chat_file(path: Path | None) -> ChatFile:
    """Check a chat file; None: the sample. Raises ConfigError unless all of it can be trained on.

    A conversation is an object whose `messages` have role and text, as torchtune expects: a system message only first,
    then user and assistant alternating. The file has one per line, or is a JSON list of them.
    """
    if path is None:
        return ChatFile(CHAT_LINES, len(_CONVERSATIONS))
    problems, num_conversations, name = [], 0, CHAT_LINES
    try:
        for where, item in _items(path):
            num_conversations += 1
            name = CHAT_LINES if where.startswith("line") else CHAT_LIST
            if problem := _problem(item):
                problems.append(f"{where}: {problem}")
    except OSError as error:
        raise ConfigError(f"--dataset {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        hint = f"expected: JSON, one conversation per line, each {_SHAPE}"
        raise ConfigError(f"--dataset {path} is not a chat file: {in_words(error)}", hint=hint) from None
    if problems or not num_conversations:
        raise ConfigError(
            f"--dataset {path} is not a chat file:" + list_offenders(problems or ["it has no conversation"]),
            hint=f"a conversation is {_SHAPE}",
        )
    return ChatFile(name, num_conversations)


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """Conversations with their position; line by line for a file of lines."""
    with open_text(path) as file:
        start = file.read(4096).lstrip()
        file.seek(0)
        if start.startswith("["):
            for number, item in enumerate(json.load(file), 1):
                yield f"conversation {number}", item
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None


def _problem(item: Any) -> str:
    turns = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(turns, list):
        return "has no list of messages"
    if len(turns) < 2:
        return "has fewer than two messages"
    before = "assistant"
    for number, turn in enumerate(turns, 1):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if role not in _ROLES:
            return f"message {number} has the role {role!r:.40}, not {', '.join(_ROLES)}"
        if not isinstance(content, str):
            return f"message {number} has no text as its content"
        if role == "system" and number > 1:
            return f"message {number} is a system message, which only the first may be"
        if role == "user" and before == "user":
            return f"messages {number - 1} and {number} are both the user's"
        if role == "assistant" and before != "user":
            return f"message {number}, the assistant's, follows none of the user's"
        before = role
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
        return "has no answer of the assistant to train on"
    return ""
