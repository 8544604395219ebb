"""The record of a container: how its files are recognized in a folder and opened, and what it can hold."""

from collections.abc import Callable
from dataclasses import dataclass

from converters.store.base import Store
from converters.views.catalog import Catalog


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files of a checkpoint folder, sorted by what their names say."""

    store: Store
    entry: str  # the file or index that transformers opens; "" if there is none
    dcp_metadata: tuple[str, ...]
    safetensors: tuple[str, ...]
    torch: tuple[str, ...]  # Meta's shards included
    meta: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Container:
    """A way to store tensors in files."""

    name: str
    called: str  # in messages: "a DCP checkpoint"
    title: str  # on the page of `titan inspect`
    suffixes: tuple[str, ...]  # of its data files
    find: Callable[[FolderFiles], str]  # the files that show it, for messages; "": the folder is another container
    open_folder: Callable[[FolderFiles], Catalog]
    keeps_sections: bool = False  # tensors of an optimizer and other state can be among the weights
    has_checksums: bool = True  # each item carries a CRC32
    is_for_transformers: bool = False  # transformers chooses the files, and adds a LoRA adapter beside them


def name_some(names: tuple[str, ...]) -> str:
    """The first of several file names, for a message."""
    return ", ".join(names[:3])
