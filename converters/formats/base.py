"""What a conversion can write: each format is an `Output`, a constant in the file of its name, found by registry.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from converters.catalog import TensorInfo
from converters.containers.target import Target
from converters.errors import ConfigError
from converters.families.base import Family, Naming
from converters.layout import MeshShape
from converters.model_info import ModelInfo
from converters.view import View


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a user may ask of an output. A field that is not None is refused by a format that does not take it."""

    mesh: MeshShape | None = None  # cut as this mesh reads it
    shard_bytes: int | None = None  # most bytes in a file
    num_shards: int | None = None  # model-parallel shards of an original Meta release
    style: str | None = None  # whose names torchtune shall find: hf, meta, torchtune
    device: str | None = None  # that torchtune's recipe runs on
    dataset: Path | None = None  # chat file that torchtune's recipe trains on

    def given(self) -> set[str]:
        return {field.name for field in fields(self) if getattr(self, field.name) is not None}


@dataclass(frozen=True, slots=True)
class Contents:
    """What an output is planned from: the tensors as they will be written, and the model that they are."""

    tensors: Mapping[str, TensorInfo]  # by target name, in order
    view: View  # gives their values; its ledger says which native tensor each one is
    family: Family
    info: ModelInfo
    dst: Path  # where all of it will lie once it is complete; it is written elsewhere


@dataclass(frozen=True, slots=True)
class Output:
    """A format to write: how it names tensors, cuts files, and what it puts beside them."""

    name: str
    called: str  # "a DCP checkpoint"
    takes: frozenset[str]  # fields of OutputOptions that mean something for it
    naming: Callable[[Family, OutputOptions], Naming | None]  # None: native names
    plan: Callable[[Contents, OutputOptions], Target]
    write_small_files: Callable[[Path, Contents, OutputOptions], list[str]]  # returns the names of what it wrote
    file_suffixes: frozenset[str] = frozenset()  # of a DST that is not a folder, but the one file of this format

    def check_options(self, options: OutputOptions) -> None:
        """Raise ConfigError, in the words of the command line, for what means nothing in this format."""
        for name in sorted(options.given() - self.takes):
            raise ConfigError(f"{_OPTION[name]} means nothing for {self.called}", hint=_MEANS[name])


_OPTION = {
    "mesh": "--for-mesh",
    "shard_bytes": "--shard-size",
    "num_shards": "--num-shards",
    "style": "--style",
    "device": "--device",
    "dataset": "--dataset",
}
_MEANS = {
    "mesh": "it cuts a DCP output as a mesh reads it; other formats have no layout",
    "shard_bytes": "it cuts an output that may be any number of files; this one may not",
    "num_shards": "it is the number of consolidated.NN.pth files of Meta's format",
    "style": "it chooses between the checkpointers of torchtune",
    "device": "it goes into torchtune's recipe",
    "dataset": "it goes into torchtune's recipe",
}
