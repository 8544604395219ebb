"""A tokenizer.json read in little memory: its merges, which are most of it, one by one."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from converters.json_file import read_json

_TEXT = rb'"(?:[^"\\]|\\.)*+"'
_MERGE = rb"(?:%b|\[\s*%b\s*,\s*%b\s*\])" % (_TEXT, _TEXT, _TEXT)  # "a b" before tokenizers 0.20, then ["a", "b"]
_MERGES = re.compile(rb'"merges"\s*:\s*\[\s*((?:%b(?:\s*,\s*%b)*+)?+)\s*\]' % (_MERGE, _MERGE))


def read_tokenizer_json(path: Path) -> tuple[dict[str, Any], Iterable[Any]]:
    """The content without `model.merges`, and these. Raises CheckpointError where the file is no JSON object.

    Half a million Python strings for a Llama 3 would be more memory than the rest of a conversion takes.
    """
    raw = path.read_bytes() if path.is_file() else b""
    if found := _MERGES.search(raw):
        start, end = found.span(1)
        try:
            content = json.loads(raw[:start] + raw[end:])
            if content["model"]["merges"] == []:
                return content, _each(raw, start, end)
        except (ValueError, RecursionError, TypeError, KeyError):
            pass  # told below
    content = read_json(path)  # as others may write it; or not at all
    model = content.get("model")
    return content, model.pop("merges", []) if isinstance(model, dict) else []


def _each(raw: bytes, start: int, end: int) -> Iterator[Any]:
    return (json.loads(found.group()) for found in re.compile(_MERGE).finditer(raw, start, end))
