"""Checkpoints of the largest open models in their real shapes: real headers over sparse files that take no room."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from converters.common.box import Box, TensorInfo, row_blocks
from converters.common.dtypes import itemsize
from converters.containers.dcp_write import plan_dcp
from converters.containers.safetensors_write import plan_safetensors
from converters.containers.target import Target
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.naming.foreign_view import foreign_view
from converters.quantized.quantization import Fp8Scheme
from converters.store.folder_output import FolderFiles
from tests.fp8_folders import CONFIG, is_quantized


def native_shapes(family: str, flavor: str, **numbers: Any) -> dict[str, TensorInfo]:
    """Native tensors of a published model in bfloat16; `numbers` are changed."""
    found = get_family(family)
    parameters = found.parameters(replace(found.flavors[flavor], **numbers))
    return {p.fqn: TensorInfo("bfloat16" if p.is_trained else "float32", p.shape) for p in parameters}


def hub_shapes(
    family: str, flavor: str, *, fp8: bool = False, **numbers: Any
) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Tensors of a published model as the hub has them, and its config.json."""
    found = get_family(family)
    args = replace(found.flavors[flavor], **numbers)
    native = SimpleNamespace(tensors=native_shapes(family, flavor, **numbers))
    tensors = dict(foreign_view(native, ModelInfo(family, args), found.namings["hf"]).tensors)
    config = found.hf_config(args) | {"torch_dtype": "bfloat16"}
    if fp8:
        for name in [name for name in tensors if is_quantized(name)]:
            tensors[name], tensors[f"{name}_scale_inv"] = Fp8Scheme().stored(tensors[name].shape)
        config |= {"quantization_config": CONFIG}
    return tensors, config


def write_sparse_hf(
    folder: Path, tensors: Mapping[str, TensorInfo], config: Mapping, *, shard_bytes: int = 4_800_000_000
) -> None:
    """Safetensors files with their index; only headers take room."""
    _write_sparse(folder, plan_safetensors(tensors, shard_bytes=shard_bytes))
    (folder / "config.json").write_text(json.dumps(config))


def write_sparse_dcp(
    folder: Path, tensors: Mapping[str, TensorInfo], *, chunk_bytes: int = 64 << 20, num_files: int = 64
) -> None:
    """A DCP folder of row blocks, dealt to the files in turn; only the shells of items take room."""
    files: dict[str, list[tuple[str, Box]]] = {f"__{rank}_0.distcp": [] for rank in range(num_files)}
    names, position = list(files), 0
    for fqn, info in tensors.items():
        for box in row_blocks(Box.whole(info.shape), itemsize(info.dtype), chunk_bytes):
            files[names[position % num_files]].append((fqn, box))
            position += 1
    _write_sparse(folder, plan_dcp(tensors, {name: boxes for name, boxes in files.items() if boxes}))


def _write_sparse(folder: Path, target: Target) -> None:
    folder.mkdir(parents=True)
    for name, size in target.file_bytes.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    target.finish(FolderFiles(folder), [0] * len(target.slots))  # a CRC32 of 0 means that there is none
    for name, data in target.other_files.items():
        (folder / name).write_bytes(data)
