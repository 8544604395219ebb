"""DCP in native names: what `titan train`, torchtitan and stock `dcp.load` read."""

from pathlib import Path

from converters.assets import write_assets
from converters.containers.dcp_write import plan_dcp
from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES
from converters.containers.target import Target
from converters.dtypes import itemsize
from converters.errors import ConfigError
from converters.formats.base import Contents, Output, OutputOptions
from converters.layout import boxes_for_any_mesh, boxes_for_mesh, check_mesh, split_stages
from converters.model_info import write_model_info
from converters.names import ASSETS_FOLDER


def _plan(contents: Contents, options: OutputOptions) -> Target:
    tensors = contents.tensors
    if options.mesh is None:
        return plan_dcp(tensors, boxes_for_any_mesh(tensors, file_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES))
    if options.shard_bytes is not None:
        raise ConfigError("--for-mesh settles the files, one for each rank; --shard-size has no say beside it")
    check_mesh(options.mesh, contents.info.args)
    # all that there are: of an incomplete source some are missing, and the stages are cut as if they were not
    parameters = [p for p in contents.family.parameters(contents.info.args) if p.fqn in tensors]
    stages = split_stages(options.mesh.pp, contents.info.args.num_layers)
    itemsizes = {name: itemsize(info.dtype) for name, info in tensors.items()}
    return plan_dcp(tensors, boxes_for_mesh(parameters, options.mesh, itemsizes=itemsizes, stages=stages))


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    info = contents.info
    write_model_info(folder, info)
    return [f"{ASSETS_FOLDER}/{name}" for name in write_assets(folder / ASSETS_FOLDER, info.assets, info.generation)]


DCP = Output(
    name="dcp",
    called="a DCP checkpoint",
    takes=frozenset({"mesh", "shard_bytes"}),
    naming=lambda family, options: None,
    plan=_plan,
    write_small_files=_write_small_files,
)
