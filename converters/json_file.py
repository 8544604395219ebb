"""JSON files: read with errors that name the file, written as people and diff tools like them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.errors import CheckpointError, in_words


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError where it is anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        hint = "an interrupted download, or a Git LFS pointer?"
        raise CheckpointError(f"{path} is not JSON: {in_words(error)}", hint=hint) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON object, indented, ending in a newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
