"""The catalog of a checkpoint: its tensors and values, and the file and offset of each, in any container.

It is built from headers only. Convert, reshard, inspect, diff, verify and the trainer's loader work on it.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from converters.common.box import Box
from converters.common.dtypes import itemsize
from converters.common.names import section_of
from converters.store.base import Store
from converters.store.location import Location
from converters.store.manifest import Manifest, read_manifest

UNLOCATED = -1  # a chunk's byte_offset before its DCP item was opened


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor in a file. Element `i` of the box is at `byte_offset + sum(i[d] * strides[d]) * itemsize`.

    DCP's `.metadata` names only the item (a zip) around the data. Opening 200,000 items to list a checkpoint would take
    many seconds, so such a chunk starts with `item` alone (`byte_offset` is UNLOCATED); the reader fills in the rest on
    first use (`CatalogReader.located`).
    """

    box: Box
    file: str  # its name in the catalog's store
    byte_offset: int
    strides: tuple[int, ...]  # in elements; row-major but in some torch files
    crc32: int | None = None  # of the chunk's whole record, if the container carries one
    record: tuple[int, int] | None = None  # (offset, length) of the bytes that `crc32` covers
    item: tuple[int, int] | None = None  # DCP: (offset, length) of the torch.save zip that holds the data


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor by name: its element type, full shape, and the chunks that together cover it."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Item:
    """The part of a file that holds one value (in DCP: a zip made by torch.save)."""

    file: str
    byte_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Value:
    """An entry that is no tensor: `plain` if opening has read it, else the item that `CatalogReader` reads."""

    plain: Any = None
    item: Item | None = None


@dataclass
class Catalog:
    """All tensors and values of one checkpoint."""

    store: Store  # of its files
    container: str  # "dcp" | "safetensors" | "torch" | "meta"
    tensors: dict[str, TensorEntry]
    values: dict[str, Value] = field(default_factory=dict)  # what is no tensor
    planner_data: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # flat key → path in the nested state dict
    copies: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)  # what Meta's shards repeat
    of_ranks: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)  # further shards' own parts of dropped tensors
    file: str = ""  # the one file that holds all tensors, if there is one: errors name it
    is_lone_file: bool = False  # a file was opened by its name, not the folder that it is in
    unread: dict[str, str] = field(default_factory=dict)  # weight files of the folder that are not read, and why
    prefixes: dict[str, int] = field(default_factory=dict)  # removed from names (see wrappers.py) → number of tensors
    stored: dict[str, str] = field(default_factory=dict)  # name → name in the files, if prefixes were removed
    selected: str | None = None  # the place of the weights in the state dict, if --select chose one of several models
    other_models: tuple[str, ...] = ()  # the places of the others

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the folder that the files are in, read once; None if it has none."""
        return read_manifest(self.root)

    @property
    def root(self) -> Path:
        """A folder on this machine that has the small files; if the checkpoint is in a folder, that folder."""
        return self.store.local()

    @property
    def location(self) -> Location:
        """The location of the folder of its files."""
        return self.store.location

    @property
    def place(self) -> Location:
        """The location that errors about its tensors name: the file, or the folder of several."""
        return self.location / self.file

    @property
    def place_of_selected(self) -> str:
        """The place of the weights as `--select` names it; "" if the checkpoint holds one model."""
        return "" if self.selected is None else self.selected or "."

    @property
    def tensor_files(self) -> set[str]:
        """The files that hold tensors."""
        return {chunk.file for entry in self.tensors.values() for chunk in entry.chunks}

    @property
    def files(self) -> set[str]:
        """The files that hold tensors and values."""
        return self.tensor_files | {item.file for item in self.items.values()}

    @property
    def notes(self) -> list[str]:
        """Notes for a user of the checkpoint on how it was opened."""
        removed = [f"names: removed the prefix `{text}` ({number:,} tensors)" for text, number in self.prefixes.items()]
        if self.selected is not None:
            others = ", ".join(place or "." for place in self.other_models)
            removed.append(f"the model is {self.place_of_selected}, as selected; not read as weights: {others}")
        return removed + [f"{name} is not read: {why}" for name, why in self.unread.items()]

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors.values()) + sum(item.length for item in self.items.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all entries."""
        return (*self.tensors, *self.values)

    @property
    def items(self) -> dict[str, Item]:
        """The items of the values that opening has not read."""
        return {name: value.item for name, value in self.values.items() if value.item is not None}

    def all_chunks(self, fqn: str) -> tuple[Chunk, ...]:
        """The chunks of a tensor, and what further shards hold under its name."""
        return (*self.tensors[fqn].chunks, *self.copies.get(fqn, ()), *self.of_ranks.get(fqn, ()))

    def path_of(self, name: str) -> tuple[Any, ...]:
        """The keys that lead to an entry in the nested state dict that was saved."""
        return self.planner_data.get(name) or (name,)

    def section_of(self, name: str) -> str:
        """The section of an entry that is not a weight: a section of titan's, or else the entry's first key."""
        section = section_of(name)
        return section if section != "model" else str(self.path_of(name)[0])
