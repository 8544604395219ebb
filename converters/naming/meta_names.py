"""A model's parameters as Meta's code names and shapes them, and its files' tensors as its code loads them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from converters.common.box import Box
from converters.common.dtypes import itemsize
from converters.families import rules
from converters.families.args import DecoderArgs
from converters.families.base import Family
from converters.families.foreign import StoredTensor
from converters.families.parameters import Parameter
from converters.naming.namings import rules_for, with_placeholder
from converters.naming.rule_expressions import foreign_tensors
from converters.views.catalog import Catalog, Chunk, TensorEntry


def meta_parameters(family: Family, args: DecoderArgs) -> dict[str, Parameter]:
    """Name in Meta's code → the parameter with its shape there, and the dim that shards cut.

    A tied model has its output, too.
    """
    naming, by_name = family.namings["meta"], {}
    parameters = family.parameters(replace(args, tied=False))
    by_native = rules_for((p.fqn for p in parameters), naming)
    for parameter in parameters:
        rule = by_native[with_placeholder(parameter.fqn)]
        foreign, dim = foreign_tensors(rule, parameter), parameter.tp_dim
        if isinstance(rule.op, rules.Transposed) and dim is not None:
            last = len(parameter.shape) - 1
            dim = {last: last - 1, last - 1: last}.get(dim, dim)
        for name in foreign.names:
            by_name[name] = replace(parameter, fqn=name, shape=foreign.shape, tp_dim=dim)
    return by_name


def as_loaded(shard: Catalog, stored: Sequence[StoredTensor]) -> Catalog:
    """A shard with its tensors as Meta's code has them after its load hooks: taken apart, renamed, and reshaped."""
    by_name = {each.name: each for each in stored}
    tensors: dict[str, TensorEntry] = {}
    for name, entry in shard.tensors.items():
        each = by_name.get(name)
        parts = _taken_apart(entry, each) if each and shard.tensors.keys().isdisjoint(each.parts) else None
        tensors |= parts or {name: entry}
    return replace(shard, tensors=tensors)


def _taken_apart(entry: TensorEntry, stored: StoredTensor) -> dict[str, TensorEntry] | None:
    """None if its shape does not allow that: the ledger lists it then."""
    (chunk,) = entry.chunks
    if not entry.shape:
        return None
    if stored.stack:
        rows, remainder = divmod(entry.shape[0], stored.stack)
        if remainder or len(entry.shape) != 2:
            return None
        shape = (stored.stack, rows, entry.shape[1])
        strides = (rows * chunk.strides[0], *chunk.strides)
        (name,) = stored.parts
        return {name: TensorEntry(name, entry.dtype, shape, (replace(chunk, box=Box.whole(shape), strides=strides),))}
    unit, remainder = divmod(entry.shape[0], sum(stored.parts.values()))
    if remainder:
        return None
    parts, start = {}, 0
    for name, number in stored.parts.items():
        parts[name] = _rows(entry, chunk, name, start, number * unit)
        start += number * unit
    return parts


def _rows(entry: TensorEntry, chunk: Chunk, name: str, start: int, count: int) -> TensorEntry:
    shape = (count, *entry.shape[1:])
    offset = chunk.byte_offset + start * chunk.strides[0] * itemsize(entry.dtype)
    return TensorEntry(name, entry.dtype, shape, (replace(chunk, box=Box.whole(shape), byte_offset=offset),))


def stored_shape(stored: StoredTensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that a tensor has in a file; `shapes`: of its parts in that file. The inverse of `as_loaded`."""
    first, *rest = (shapes[name] for name in stored.parts)
    if stored.stack:
        return (first[0] * first[1], first[2])
    return (first[0] + sum(shape[0] for shape in rest), *first[1:])
