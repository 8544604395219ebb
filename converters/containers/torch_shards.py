"""Open a folder of torch files with an index (`pytorch_model.bin.index.json`) as one catalog."""

from pathlib import Path

from converters.catalog import Catalog, TensorEntry
from converters.containers import torch_file
from converters.containers.safetensors import read_indexed
from converters.names import TORCH_INDEX


def read_catalog(path: Path) -> Catalog:
    """The catalog of a folder: what its index says, file by file and key by key."""
    return Catalog(path, "torch", read_indexed(path, path / TORCH_INDEX, _read_file))


def _read_file(folder: Path, name: str) -> dict[str, TensorEntry]:
    return torch_file.read_catalog(folder / name).tensors
