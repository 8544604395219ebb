"""Small checkpoints of every kind, made by torch and safetensors themselves, and what is in them."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from converters.common.box import Box, TensorInfo
from converters.common.dtypes import DTYPES
from converters.containers.target import Target
from converters.engine.copy import CopyResult, Processing, copy_tensors
from converters.engine.read import CatalogReader
from converters.store.folder_output import FolderOutput
from converters.store.manifest import TensorSum
from converters.store.output import write_file, write_manifest
from converters.views.catalog import Catalog


class Arrays:
    """A TensorSource over arrays in memory, which notes the boxes that are read."""

    def __init__(self, arrays: Mapping[str, np.ndarray] | None = None, /, **more: np.ndarray):
        self.arrays, self.read_boxes = {**(arrays or {}), **more}, []
        self.tensors = {name: TensorInfo(array.dtype.name, array.shape) for name, array in self.arrays.items()}

    def read(self, fqn: str, box: Box) -> np.ndarray:
        self.read_boxes.append((fqn, box))
        return self.arrays[fqn][box.slices_within(Box.whole(self.arrays[fqn].shape))]


def state_dict(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every element type and every awkward shape: 0-dim, empty, 1-D, 3-D, transposed, a slice with gaps."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "matrix": randn(37, 24).bfloat16(),
        "vector": randn(5),
        "scalar": torch.tensor(3.5),
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "empty_inside": torch.zeros(3, 0, dtype=torch.bfloat16),
        "cube": randn(4, 6, 10),
        "transposed": randn(6, 8).t(),
        "permuted": randn(3, 4, 5).permute(2, 0, 1),
        "with_gaps": randn(9, 8)[::2, 1:5],
        "truth": torch.tensor([True, False, True]),
    }
    for name in DTYPES:
        raw = torch.randint(0, 2, (6 * DTYPES[name].itemsize,), generator=generator, dtype=torch.uint8)
        tensors[f"of_{name}"] = raw.view(getattr(torch, name)).reshape(2, 3)
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    """The values, row-major."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)  # clone: fresh strides
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same names, types, shapes and bits."""

    def content(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.shape, raw(tensor)

    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in tensors.items() if content(tensor) != content(expected[name])] == []


def save_dcp(folder: Path, state: dict, *, threads: int = 1) -> Path:
    """A stock dcp.save in one process."""
    writer = FileSystemWriter(folder, thread_count=threads)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    return folder


def load_dcp(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A stock dcp.load into fresh tensors."""
    loaded = {fqn: torch.empty(t.shape, dtype=t.dtype) for fqn, t in like.items()}
    dcp.load(loaded, checkpoint_id=str(folder), no_dist=True)
    return loaded


def read_all(catalog: Catalog) -> dict[str, bytes]:
    """Every tensor of a catalog, row-major."""
    with CatalogReader(catalog) as reader:
        return {fqn: reader.read(fqn, Box.whole(i.shape)).tobytes() for fqn, i in reader.tensors.items()}


def infos(state: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {f: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for f, t in state.items()}


class AppendOnly(FolderOutput):
    """The output of a folder whose files can only be appended to, as those of an object store."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.offset_files = None


def write(source, target: Target, folder: Path, *, in_order: bool = False, **options) -> CopyResult:
    """Copy and seal, as a conversion does, into a new folder, or `in_order` to one that can only be appended to."""
    folder.mkdir()
    output = AppendOnly(folder) if in_order else FolderOutput(folder)
    how = {field.name: options.pop(field.name) for field in fields(Processing) if field.name in options}
    result = copy_tensors(source, target, output, Processing(**how), **options)
    sums = result.files | {name: write_file(output, name, data) for name, data in target.other_files.items()}
    assert {name: s.size for name, s in sums.items()} == dict(target.file_bytes)
    tensors = {f: TensorSum(i.dtype, i.shape, result.digests.get(f, "")) for f, i in target.tensors.items()}
    write_manifest(output, tensors=tensors, files=sums)
    return result
