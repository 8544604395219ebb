"""Documents out of files and folders of text: .txt, .md and .py are one document each, JSON lines one per line."""

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.errors import DataError, UnsupportedError

_TEXT = (".txt", ".md", ".py")
_JSON_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")  # C4's files are called .json.gz
KNOWN = _TEXT + _JSON_LINES
_IN_FOLDERS = tuple(ending for ending in KNOWN if ending != ".json")  # there it is mostly a config, not lines of text
_NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GENERATED = {"encodings", "pydoc_data"}  # code page tables and a book: nothing like the rest


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    where: str  # file, or file:line


def find_files(sources: Sequence[Path]) -> list[Path]:
    """Every file of a known kind in the sources, each once; folders are walked in the order of names.

    Raises DataError for a source that is missing, and for one that holds nothing to read.
    """
    files: dict[Path, None] = {}
    for source in sources:
        if source.is_dir():
            found = list(_walk(source))
            if not found:
                raise DataError(f"{source}: no file in it ends in {', '.join(_IN_FOLDERS)}")
            files |= dict.fromkeys(found)
        elif not source.exists():
            raise DataError(f"{source}: there is no such file or folder")
        elif not source.name.endswith(KNOWN):
            raise UnsupportedError(f"{source}: files of this kind are not read", hint=f"read: {', '.join(KNOWN)}")
        else:
            files[source] = None
    return list(files)


def standard_library(*, max_bytes: int) -> tuple[Path, list[Path]]:
    """The folder of the running Python's own modules, and at most `max_bytes` of their sources: text every machine has.

    Tests and generated tables are left out. A hash of their names decides which files are taken: a repeatable sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path for path in _walk(root, leave_out=_NO_SOURCES | _GENERATED) if path.suffix == ".py" and _is_utf8(path)
    ]
    if not files:
        raise DataError(
            f"{root}: this Python has no sources of its standard library", tries=["titan data prepare FILES…"]
        )
    taken, num_bytes = [], 0
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest()):
        size = path.stat().st_size
        if num_bytes + size <= max_bytes:
            taken.append(path)
            num_bytes += size
    return root, sorted(taken)


def read_documents(
    files: Iterable[Path], *, text_key: str = "text", max_bytes: int | None = None
) -> Iterator[Document]:
    """The documents of the files in order, up to `max_bytes` of text; those without any text are left out.

    Raises DataError with file and line for bad UTF-8, a line that is no JSON object, and a missing `text_key`.
    """
    left = max_bytes
    for path in files:
        documents = _json_lines(path, text_key) if path.name.endswith(_JSON_LINES) else _whole_file(path)
        for document in documents:
            if not document.text:
                continue
            if left is not None:
                left -= len(document.text.encode("utf-8"))
                if left < 0:
                    return
            yield document


def _walk(folder: Path, *, leave_out: Iterable[str] = ()) -> Iterator[Path]:
    for where, folders, names in os.walk(folder, onerror=_raise):  # does not follow links, so no loop
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        yield from (
            Path(where, name) for name in sorted(names) if name.endswith(_IN_FOLDERS) and not name.startswith(".")
        )


def _whole_file(path: Path) -> Iterator[Document]:
    data = _read(path)
    try:
        yield Document(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: byte {error.start} of the file is not UTF-8") from None


def _json_lines(path: Path, text_key: str) -> Iterator[Document]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Document(_text_of(line, text_key, f"{path}:{number}"), f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number}: {error}") from None


def _text_of(line: bytes, text_key: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} of the line is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}", hint="each line is one JSON object") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, not an object", hint="each line is one JSON object")
    text = record.get(text_key)
    if not isinstance(text, str):
        keys = ", ".join(map(repr, list(record)[:10])) or "no key at all"
        raise DataError(f"{where}: no text under {text_key!r}; the line has {keys}", tries=["--text-key KEY"])
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a lone surrogate at character {error.start}, which no UTF-8 can hold") from None
    return text


def _raise(error: OSError) -> None:
    raise DataError(f"{error.filename}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
