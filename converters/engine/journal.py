"""Fingerprints of plans: an unfinished output is resumed only by the same work (converters/store/journal.py)."""

import json
from collections.abc import Mapping

from xxhash import xxh3_128

from converters.common.box import DerivedSource, TensorSource
from converters.common.crc import crc32
from converters.common.names import MANIFEST
from converters.containers.registry import CONTAINERS
from converters.containers.target import Target
from converters.store.base import read_bytes
from converters.store.journal import VERSION
from converters.views.catalog import Catalog
from converters.views.expressions import Expression, HeadRows, Source, head_order
from converters.views.view import View


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
    small = {name for name in names if name.endswith(".json")} | {*CONTAINERS[catalog.container].marks(names)}
    for name in sorted(catalog.files | small):
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
