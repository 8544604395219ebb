"""Read JSON files strictly, with errors that name the file, and write them indented."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, in_words, list_offenders
from converters.store.hub_checksums import fetch_again
from converters.store.local_files import write_text

MOST_BYTES = 256 << 20  # the largest index there is takes 9 MB, the largest tokenizer.json 35 MB


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if it is anything else, or larger than is plausible."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise CheckpointError(f"{path}: {size:,} bytes, more than the plausible {MOST_BYTES:,}")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        return parse_json(raw, what=str(path))
    except CheckpointError as error:
        raise CheckpointError(error.message, **fetch_again(path) or {"hint": error.hint}) from None


def parse_json(raw: bytes, *, what: str) -> dict[str, Any]:
    """Parse a JSON object without repeated keys: "the last one wins" would hide a tensor.

    `what` begins the messages. A byte order mark, which editors on Windows write, is ignored. NaN is accepted, so that
    the reader of a number can name its key.
    """
    try:
        content, twice = load_with_repeated_keys(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        hint = "an interrupted download, or a Git LFS pointer?"
        raise CheckpointError(f"{what} is not JSON: {in_words(error)}", hint=hint) from None
    if twice:
        raise CheckpointError(f"{what}: repeated keys:{list_offenders([f'{key!r:.200}' for key in twice])}")
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} holds a JSON {type(content).__name__}, not an object")
    return content


def load_with_repeated_keys(text: str) -> tuple[Any, list[str]]:
    """The content of JSON, and every key that one of its objects repeats. Raises as `json.loads` does."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return content

    return json.loads(text, object_pairs_hook=unique), twice


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, with a newline at the end."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape and UTF-8 cannot encode
        text = json.dumps(content, indent=2)
    write_text(path, text + "\n")
