"""DCP in native names: what `titan train`, torchtitan and stock `dcp.load` read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from converters.common.errors import ConfigError
from converters.containers.dcp_names import EXTRA_FILE
from converters.formats.base import Contents, Format, OutputOptions

if TYPE_CHECKING:
    from converters.containers.target import Target


def _plan(contents: Contents, options: OutputOptions) -> Target:
    from converters.common.box import Box
    from converters.common.dtypes import itemsize
    from converters.containers.dcp_write import plan_dcp
    from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES
    from converters.layout.layout import boxes_for_any_mesh, boxes_for_mesh
    from converters.layout.mesh_check import check_mesh
    from converters.layout.stages import split_stages

    tensors = contents.tensors
    if options.mesh is None:
        files = boxes_for_any_mesh(tensors, file_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES)
        return plan_dcp(tensors, files, streamed=contents.streamed)
    if options.shard_bytes is not None:
        raise ConfigError("--shard-size cannot be combined with --for-mesh, which makes one file per rank")
    check_mesh(options.mesh, contents.family, contents.info.args)
    # Stages are split over all parameters, also if an incomplete source lacks some.
    parameters = [p for p in contents.family.parameters(contents.info.args) if p.fqn in tensors]
    stages = split_stages(options.mesh.pp, contents.family.units(contents.info.args))
    itemsizes = {name: itemsize(info.dtype) for name, info in tensors.items()}
    files = boxes_for_mesh(parameters, options.mesh, itemsizes=itemsizes, stages=stages)
    trained = {p.fqn for p in parameters}
    if extras := [(name, Box.whole(info.shape)) for name, info in tensors.items() if name not in trained]:
        files[EXTRA_FILE] = extras  # which no rank reads
    return plan_dcp(tensors, files, streamed=contents.streamed)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    from converters.common.names import ASSETS_FOLDER
    from converters.model.model_info import write_model_info
    from converters.tokenizers.assets import write_assets

    info = contents.info
    write_model_info(folder, info)
    return [f"{ASSETS_FOLDER}/{name}" for name in write_assets(folder / ASSETS_FOLDER, info.assets, info.generation)]


DCP = Format(
    name="dcp",
    called="a DCP checkpoint",
    containers=("dcp",),
    takes=("mesh", "shard_bytes"),
    naming=lambda family, options: None,
    plan=_plan,
    write_small_files=_write_small_files,
)
