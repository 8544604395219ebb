"""The journal of an unfinished output: one line per finished unit of work, and the lock of its writer.

A line has JSON and its CRC32; reading ends at the first line that does not match, so that a line cut short by a kill
loses only its unit. A record is not a proof: `copy.py` reads each region back before it skips it.
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from converters.common.box import DerivedSource, TensorSource
from converters.common.crc import crc32
from converters.common.errors import CheckpointError
from converters.common.names import DCP_METADATA, MANIFEST
from converters.containers.target import Target
from converters.store.base import read_bytes
from converters.store.file_lock import is_open_file, lock_file
from converters.views.catalog import Catalog
from converters.views.expressions import Expression, HeadRows, Source, head_order
from converters.views.view import View

VERSION = 3


def plan_fingerprint(
    catalog: Catalog, target: Target, casts: Mapping[str, str], *, digests: bool = True, quantization: str = ""
) -> str:
    """32 hex digits that identify source and plan; another source file, layout, cast or quantization gives others.

    They include identities of the files with values and of JSON files in their folder, because a config determines
    the order of rows, and the bytes of the manifest. `execute` adds the order in which its source reads rows.
    """
    summed = xxh3_128(f"{VERSION} {catalog.container} {digests}".encode())

    def add(*parts: object) -> None:
        summed.update(json.dumps(parts).encode())

    store, names = catalog.store, catalog.store.names()
    files = catalog.tensor_files
    files |= {blob.file for blob in catalog.blobs.values()}
    files |= {name for name in names if name.endswith(".json") or name == DCP_METADATA}
    for name in sorted(files):
        add(name, *store.identity(name))
    manifest = crc32(read_bytes(store, MANIFEST)) if MANIFEST in names else None
    add(str(catalog.location.resolved()), manifest)
    for fqn, info in target.tensors.items():
        add(fqn, info.dtype, info.shape)
    for slot in target.slots:
        add(slot.fqn, slot.dtype, slot.box.offsets, slot.box.sizes, slot.file, slot.byte_offset)
    add(sorted(target.file_bytes.items()), sorted(casts.items()))
    if quantization:
        add(quantization)
    if catalog.selected is not None:
        add(catalog.selected)
    return summed.hexdigest()


def files_identity(catalog: Catalog) -> str:
    """Text that identifies another checkpoint that a plan reads, by the identities of its files with values."""
    states = [(name, *catalog.store.identity(name)) for name in sorted(catalog.tensor_files)]
    return f"{catalog.location.resolved()} {states}"


def reading_order(source: TensorSource, *numbers: int) -> str:
    """32 hex digits that identify `numbers`, and what a source and its views read for each tensor."""
    summed = xxh3_128(repr(numbers).encode())
    while isinstance(source, View | DerivedSource):
        if isinstance(source, View):
            _add_expressions(summed, source.expressions)
        else:
            summed.update(repr(source.identity).encode())
        source = source.source
    return summed.hexdigest()


def _add_expressions(summed: xxh3_128, expressions: Mapping[str, Expression]) -> None:
    # as before there were expressions, where a tensor is made of one
    first = sorted((fqn, made.sources[0]) for fqn, made in expressions.items() if made.sources)
    summed.update(repr(first).encode())
    for fqn, made in sorted(expressions.items()):
        match made:
            case HeadRows(Source(), head_dim, to_halves):
                summed.update(fqn.encode() + head_order(head_dim, to_halves=to_halves).tobytes())
            case Source():
                continue
            case _:
                summed.update(f"{fqn} {made!r}".encode())


class Journal:
    """The journal of one output, locked as long as it is open. Records are JSON objects by number of their unit."""

    def __init__(self, path: Path):
        """Open or create it. Raises CheckpointError if another process has locked it."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._places: dict[int, tuple[int, int]] = {}  # unit → (offset, length) of its line
        try:
            self._lock()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        try:
            lock_file(self._descriptor)  # where there are no locks, the user must avoid two conversions to one place
        except BlockingIOError as error:
            raise CheckpointError(f"{self.path.parent}: another conversion is writing here") from error
        if not is_open_file(self._descriptor, self.path):  # removed by the process that held it
            raise CheckpointError(f"{self.path.parent}: another conversion has just ended here")

    def start(self, header: Mapping[str, Any]) -> None:
        """Start with `header` and no records."""
        os.ftruncate(self._descriptor, 0)
        self._places = {}
        os.write(self._descriptor, _line({"journal": VERSION, **header}))

    def load(self, header: Mapping[str, Any]) -> bool:
        """Read the records; False if the journal is empty or has another header.

        What follows the last valid line is removed, so that the next record begins a line.
        """
        self._places = {}
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None:
                    break
                if not end and record != {"journal": VERSION, **header}:
                    return False
                if end:
                    self._places[record["unit"]] = (end, len(line))
                end += len(line)
        if not end:
            return False
        os.ftruncate(self._descriptor, end)
        return True

    def append(self, unit: int, record: Mapping[str, Any]) -> None:
        """Record that a unit is written, by one write at the end."""
        line = _line({"unit": unit, **record})
        if os.write(self._descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def recorded(self, unit: int) -> dict[str, Any] | None:
        """The last record of a unit that `load` has read. Thread-safe."""
        place = self._places.get(unit)
        return None if place is None else _parsed(os.pread(self._descriptor, place[1], place[0]))

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is incomplete."""
    text = line[9:-1]
    if not line.endswith(b"\n") or line[:9] != b"%08x " % crc32(text):
        return None
    record: dict[str, Any] = json.loads(text)
    return record
