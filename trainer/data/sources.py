"""Documents from files and folders: one per .txt, .md and .py file, one per line or row of JSON lines and parquet.

A .npy file of token ids is one document too, for text that is already tokenized.
"""

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from converters.common.errors import DataError, UnsupportedError
from trainer.data.columns import decompressed, parquet_values

TEXT = (".txt", ".md", ".py")
JSON_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")  # C4's files are called .json.gz
PARQUET = (".parquet",)
_TOKEN_IDS = (".npy",)
KNOWN = TEXT + JSON_LINES + PARQUET + _TOKEN_IDS
_JSON_KINDS = {
    int: "a number", float: "a number", bool: "a boolean", list: "a list", dict: "an object", type(None): "null",
}  # fmt: skip
_NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GENERATED = {"encodings", "pydoc_data"}  # code page tables and a book: nothing like the rest


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or token ids in place of one."""

    text: str
    where: str  # file, file:line, or file:row
    ids: np.ndarray | None = None

    @property
    def content(self) -> str | np.ndarray:
        return self.text if self.ids is None else self.ids


@dataclass(slots=True)
class Skipped:
    """Documents that could not be read and were left out: how many, and what was wrong with the first few."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: DataError) -> None:
        self.count += 1
        if len(self.first) < 5:
            self.first.append(error.message)


def find_files(
    sources: Sequence[Path], *, kinds: Sequence[str] = KNOWN, left_out: Counter[str] | None = None
) -> list[Path]:
    """Every file in the sources whose name ends in one of `kinds`, each once; folders are walked in the order of names.

    `left_out`: counts, by kind, the files of folders that are not read. Raises DataError for a source that is missing,
    and for one that holds nothing to read.
    """
    files: list[Path] = []
    for source in each_once(sources):
        if source.is_dir():
            endings = _in_folders(kinds)
            matches = list(_walk(source, endings, left_out=left_out))
            if not matches:
                raise DataError(f"{source}: no file in it ends in {', '.join(endings)}")
            files += matches
        elif not source.exists():
            raise DataError(f"{source}: there is no such file or folder")
        elif not source.name.endswith(tuple(kinds)):
            raw = source.name.endswith(".bin")
            raise UnsupportedError(
                f"{source}: files of this kind are not read",
                hint="such a file does not say how its token ids are stored" if raw else f"read: {', '.join(kinds)}",
                tries=[f"numpy.save('{source.stem}.npy', numpy.fromfile('{source}', 'uint16'))"] if raw else (),
            )
        else:
            files.append(source)
    return each_once(files)


def each_once(paths: Iterable[Path]) -> list[Path]:
    """The paths without those that lead to a file or folder that an earlier one leads to."""
    found: dict[str, Path] = {}
    for path in paths:
        found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def standard_library(*, max_bytes: int) -> tuple[Path, list[Path]]:
    """The folder of the running Python's own modules, and at most `max_bytes` of their sources: text every machine has.

    Tests and generated tables are left out. A hash of their names decides which files are taken: a repeatable sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _walk(root, (".py",), leave_out=_NO_SOURCES | _GENERATED) if _is_utf8(path)]
    if not files:
        raise DataError(
            f"{root}: this Python has no sources of its standard library", tries=["titan data prepare FILES…"]
        )
    chosen, num_bytes = [], 0
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest()):
        size = path.stat().st_size
        if num_bytes + size <= max_bytes:
            chosen.append(path)
            num_bytes += size
    return root, sorted(chosen)


def read_documents(
    files: Iterable[Path], *, text_key: str = "text", max_bytes: int | None = None, skipped: Skipped | None = None
) -> Iterator[Document]:
    """The documents of the files in order, up to `max_bytes` of text; those without any text are left out.

    They are whole, but a first one that is longer than `max_bytes` is cut.

    Raises DataError with file and line for bad UTF-8, a line that is no JSON object, and a missing `text_key`; if
    `skipped` is given, such documents are skipped and counted there. A truncated file is always an error, since the
    missing part is unknown.
    """
    num_left, is_first = max_bytes, True
    for path in files:
        for document in _documents_of(path, text_key, skipped):
            content = document.content
            if not len(content):
                continue
            if num_left is not None:
                num_left -= content.nbytes if isinstance(content, np.ndarray) else len(content.encode("utf-8"))
                if num_left < 0:
                    if is_first and max_bytes is not None and len((cut := _cut(document, max_bytes)).content):
                        yield cut
                    return
            is_first = False
            yield document


def _cut(document: Document, max_bytes: int) -> Document:
    """The beginning of a document that takes at most `max_bytes`, in whole characters or ids."""
    if document.ids is not None:
        return replace(document, ids=document.ids[: max_bytes // document.ids.itemsize])
    return replace(document, text=document.text.encode("utf-8")[:max_bytes].decode("utf-8", "ignore"))


def _documents_of(path: Path, text_key: str, skipped: Skipped | None) -> Iterator[Document]:
    if path.name.endswith(_TOKEN_IDS):
        yield Document("", str(path), _token_ids(path))
        return
    source: tuple[Iterable[tuple[str, Any]], Callable[[Any, str, str], str]]
    if path.name.endswith(JSON_LINES):
        source = _lines(path), _text_of_line
    elif path.name.endswith(PARQUET):
        source = parquet_values(path, text_key), _text_of_value
    else:
        source = [(str(path), path)], _whole_file
    pieces, read = source
    for where, piece in pieces:
        try:
            yield Document(read(piece, text_key, where), where)
        except DataError as error:
            if skipped is None:
                error.tries = (*error.tries, "titan data prepare … --skip-bad")
                raise
            skipped.add(error)


def _in_folders(kinds: Sequence[str]) -> tuple[str, ...]:
    """Among files of all kinds .json is mostly a config, not lines of text, and .npy mostly a token index."""
    left_out = (".json", *_TOKEN_IDS) if kinds is KNOWN else ()
    return tuple(ending for ending in kinds if ending not in left_out)


def _walk(
    folder: Path, endings: tuple[str, ...], *, leave_out: Iterable[str] = (), left_out: Counter[str] | None = None
) -> Iterator[Path]:
    left_out = Counter() if left_out is None else left_out
    for where, folders, names in os.walk(folder, onerror=_raise):  # does not follow links, so no loop
        left_out["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        left_out["links to folders"] += sum(os.path.islink(os.path.join(where, name)) for name in folders)
        for name in sorted(name for name in names if not name.startswith(".")):
            if name.endswith(endings):
                yield Path(where, name)
            else:
                left_out[Path(name).suffix or "no ending"] += 1


def _whole_file(path: Path, text_key: str, where: str) -> str:
    data = _read(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: byte {error.start} of the file is not UTF-8") from None


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """`file:line` and the line, of those that are not blank."""
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number}: {error}") from None


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path)
    return decompressed(path) if path.suffix == ".zst" else path.open("rb")


def _token_ids(path: Path) -> np.ndarray:
    """The ids of a .npy file, memory-mapped: one row of whole numbers, none of them negative."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not an array of token ids: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "ui":
        content = f"{ids.dtype}{list(ids.shape)}" if isinstance(ids, np.ndarray) else "several arrays"
        raise DataError(f"{path}: holds {content}; token ids are one row of whole numbers", hint="uint16 or uint32")
    if len(ids) and int(ids.min()) < 0:
        raise DataError(f"{path}: token {int(ids.argmin())} is {int(ids.min())}; a token id is not negative")
    return ids


def _text_of_line(line: bytes, text_key: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} of the line is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}", hint="each line is one JSON object") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, not an object", hint="each line is one JSON object")
    if text_key not in record:
        keys = ", ".join(map(repr, list(record)[:10])) or "no key at all"
        raise DataError(
            f"{where}: no text under {text_key!r}; the line has {keys}",
            tries=["titan data prepare … --text-key KEY"],
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} is {_JSON_KINDS[type(text)]}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a lone surrogate at character {error.start}, which no UTF-8 can hold") from None
    return text


def _text_of_value(value: bytes | None, text_key: str, where: str) -> str:
    if value is None:
        raise DataError(f"{where}: no text under {text_key!r}")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} of the text is not UTF-8") from None


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
