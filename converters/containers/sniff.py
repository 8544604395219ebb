"""Recognise files by their first bytes: weights, and what downloads leave in their place."""

from collections.abc import Iterable

from converters.common.errors import CheckpointError, TitanError, UnsupportedError, list_offenders
from converters.store.base import Store, read_bytes
from converters.store.location import Location
from converters.store.paths import NotAFile

_NUM_BYTES = 512


def is_zip(start: bytes) -> bool:
    """Whether a file with these first bytes is a zip, as torch.save writes."""
    return start[:4] == b"PK\x03\x04"


def is_safetensors(start: bytes) -> bool:
    """Whether a JSON header follows its length."""
    return start[8:9] == b"{"


def first_bytes(store: Store, name: str) -> bytes:
    """The first bytes of a file, as many as the checks of this module look at."""
    return read_bytes(store, name, 0, min(_NUM_BYTES, store.size(name)))


def refuse_foreign_files(store: Store, names: Iterable[str], *, pickles: bool = False) -> None:
    """Raise for files that hold something else than weights. `pickles`: a bare pickle is what is expected."""
    problems: list[TitanError] = []
    for name in names:
        try:
            start = first_bytes(store, name)
        except NotAFile:  # reported when it is opened
            continue
        if is_safetensors(start):  # a header of 640 bytes begins like a pickle (80 02)
            continue
        if not (pickles and start[:1] == b"\x80") and (problem := foreign_file_error(store.location / name, start)):
            problems.append(problem)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        first, messages = problems[0], [problem.message for problem in problems]
        raise type(first)(
            f"{store.location}: {len(messages)} files hold something else than weights:{list_offenders(messages)}",
            hint=first.hint,
            tries=first.tries,
        )


def foreign_file_error(path: Location, start: bytes) -> TitanError | None:
    """The error for a file whose first bytes are not those of weights, if they tell what it is."""
    text = start.lstrip().lower()
    if not start:
        return CheckpointError(f"{path}: is empty", hint="the download or the copy was interrupted")
    if start.startswith(b"version https://git-lfs"):
        return CheckpointError(
            f"{path}: a Git LFS pointer, not the weights", hint="fetch them in the repository", tries=["git lfs pull"]
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return CheckpointError(
            f"{path}: a web page, not weights",
            hint="the server answered with an error or a log-in page; fetch it again",
        )
    if start.startswith(b"\x1f\x8b"):
        unpacked = str(path).removesuffix(".gz") if path.suffix == ".gz" else f"{path}.unpacked"
        return CheckpointError(f"{path}: compressed with gzip", tries=[f"gunzip < {path} > {unpacked}"])
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return UnsupportedError(
            f"{path}: a legacy torch file (a bare pickle), which cannot be read without running it",
            hint="load it once with torch.load(weights_only=True) and save it again with torch.save",
        )
    return None
