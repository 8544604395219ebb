"""JSON lines, as batches and their results are."""

import json
from pathlib import Path


def write_lines(path: Path, lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(text: str) -> list:
    """Only line feeds end a line."""
    return [json.loads(line) for line in text.split("\n")[:-1]]
