"""Make a seed checkpoint: the first weights of a config's model as a DCP, cut for the mesh that the config names.

Values are drawn block by block and copied as `convert` copies: no model is built, and memory stays bounded at any size.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converters.assets import write_assets
from converters.catalog import TensorInfo
from converters.commit import check_destination
from converters.containers.dcp_write import plan_dcp
from converters.dtypes import itemsize
from converters.engine.copy import DEFAULT_WORKERS
from converters.execute import Progress, execute, no_progress
from converters.families.registry import get_family
from converters.layout import boxes_for_mesh
from converters.model_info import write_model_info
from converters.names import ASSETS_FOLDER
from trainer.chosen_model import chosen_model
from trainer.config.sections import Config
from trainer.init import InitialWeights
from trainer.parallel_dims import check_layout, required_world_size, resolve
from trainer.stages import split_model


@dataclass(frozen=True, slots=True)
class SeedReport:
    """What was made."""

    destination: str
    model: str
    seed: int
    mesh: str
    dtype: str
    num_parameters: int
    num_tensors: int
    num_files: int
    num_bytes: int
    secs: float
    has_tokenizer: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def seed(
    config: Config,
    dst: Path,
    *,
    workers: int = DEFAULT_WORKERS,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> SeedReport:
    """Write the weights that `titan train` would begin with to `dst`. Raises ConfigError where the layout cannot be."""
    started = time.monotonic()
    check_destination(dst, overwrite=overwrite)
    info = chosen_model(config.model, config.training)
    dims = resolve(config.parallelism, required_world_size(config.parallelism))
    check_layout(config, info.args, dims)
    family, dtype, number = get_family(info.family), config.training.dtype, config.debug.seed or 0
    parameters = family.parameters(info.args)
    split = split_model(config.parallelism, info.args.num_layers, dims.pp)
    files = boxes_for_mesh(
        parameters,
        dims,
        itemsizes={p.fqn: itemsize(dtype) for p in parameters},
        stages=split.modules,
        stage_ranks=split.ranks,
    )
    target = plan_dcp({p.fqn: TensorInfo(dtype, p.shape) for p in parameters}, files)

    def write_small_files(folder: Path) -> list[str]:
        write_model_info(folder, info)
        return write_assets(folder / ASSETS_FOLDER, info.assets, info.generation)

    execute(
        dst,
        source=InitialWeights(info, seed=number),
        target=target,
        casts={} if dtype == "float32" else {p.fqn: dtype for p in parameters},
        write_small_files=write_small_files,
        carried=list(info.assets.values()),
        overwrite=overwrite,
        progress=progress,
        workers=workers,
    )
    return SeedReport(
        destination=str(dst),
        model=f"{config.model.name} {config.model.flavor}",
        seed=number,
        mesh=str(dims),
        dtype=dtype,
        num_parameters=family.num_parameters(info.args),
        num_tensors=len(target.tensors),
        num_files=len(files),
        num_bytes=target.total_bytes,
        secs=time.monotonic() - started,
        has_tokenizer=bool(info.assets),
    )
