"""The record of a container: how its files are recognized in a folder and opened, and what it can hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from converters.store.base import Store
from converters.views.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Listing:
    """The file names of a checkpoint folder."""

    store: Store
    names: Collection[str]
    entry: str  # the file or index that transformers opens; "" if there is none
    weights: tuple[str, ...]  # files that may have weights: neither adapters nor the state of a fine-tuning run
    is_marked: bool  # a container has its marks

    def ending(self, suffixes: str | tuple[str, ...]) -> tuple[str, ...]:
        """The files that may have weights, by the ends of their names."""
        return tuple(name for name in self.weights if name.endswith(suffixes))


def _no_marks(names: Collection[str]) -> Sequence[str]:
    return ()


def _no_remarks(store: Store, num_bytes: int) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Container:
    """A way to store tensors in files."""

    name: str
    called: str  # in messages: "a DCP checkpoint"
    title: str  # on the page of `titan inspect`
    suffixes: tuple[str, ...]  # of its data files
    find: Callable[[Listing], str]  # the files that show it, for messages; "": the folder is another container
    open_folder: Callable[[Listing], Catalog]
    index_suffixes: tuple[str, ...] = ()  # of files that say what the data files have, JSON apart
    marks: Callable[[Collection[str]], Sequence[str]] = _no_marks  # of the names in a folder, what only it has
    replaceable: tuple[str, ...] = ()  # patterns of names: a folder with such a file may be replaced
    stands_alone: bool = False  # weights of another container beside it are an error, whatever transformers reads
    keeps_state: bool = False  # whole training states, each entry an item of its own: they can be resharded and resumed
    keeps_sections: bool = False  # tensors of an optimizer and other state can be among the weights
    has_checksums: bool = True  # each item carries a CRC32
    has_parts_of_ranks: bool = False  # a file is one rank's part of one bare model; of what is unused, a part is listed
    has_common_suffixes: bool = False  # other files have them too, so that its files may lie among any others
    keeps_tokenizer_model: bool = False  # its readers open the tokenizer.model beside it
    rules: str = ""  # of its files, which opening checks besides sizes and cover; for `titan verify`
    index_remarks: Callable[[Store, int], list[str]] = _no_remarks  # harmless errors of an index; bytes of all tensors
    is_for_transformers: bool = False  # transformers chooses the files, and adds a LoRA adapter beside them

    def is_data(self, name: str) -> bool:
        """Whether a file of this name has data of tensors."""
        return name.endswith(self.suffixes)


def name_some(names: tuple[str, ...]) -> str:
    """The first of several file names, for a message."""
    return ", ".join(names[:3])
