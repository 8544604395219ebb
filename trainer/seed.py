"""Write a seed checkpoint: the initial weights of a config's model as a DCP, sharded for the config's mesh.

Values are drawn block by block and written by the copy engine of `convert`: no model is built, and memory is bounded
at any size.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from converters.common.box import TensorInfo
from converters.common.dtypes import itemsize
from converters.common.names import ASSETS_FOLDER
from converters.containers.dcp_write import plan_dcp
from converters.containers.registry import replaceable
from converters.conversion.execute import execute
from converters.conversion.records import Plan, Progress, Run, no_progress
from converters.engine.copy import DEFAULT_WORKERS
from converters.layout.layout import boxes_for_mesh
from converters.model.model_info import write_model_info
from converters.naming.namings import is_named
from converters.store.location import Place, locate
from converters.store.outputs import outputs_at
from converters.tokenizers.assets import write_assets
from trainer.config.sections import Config
from trainer.job.chosen_model import chosen_model
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.models.initial_weights import InitialWeights, least_cache_bytes
from trainer.ranks.machine import available_bytes, not_enough_memory


@dataclass(frozen=True, slots=True)
class SeedReport:
    """The report of a seed checkpoint."""

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


def job_of_seed(config: Config) -> Job:
    """The job whose weights are drawn. Its ranks need not divide a global batch, which the weights do not depend on."""
    return resolve_job(replace(config, training=replace(config.training, global_batch_size=-1)))


def seed(
    job: Job,
    dst: Place,
    *,
    workers: int = DEFAULT_WORKERS,
    overwrite: bool = False,
    ignore_memory: bool = False,
    progress: Progress = no_progress,
) -> SeedReport:
    """Write the initial weights that `titan train` would start from to `dst`.

    Raises ConfigError if the memory of this machine is too small even for the values that are drawn at a time.
    """
    started = time.monotonic()
    outputs = outputs_at(locate(dst))
    outputs.check(locate(dst), overwrite=overwrite, marks=replaceable())
    needed, available = least_cache_bytes(job.family.parameters(job.args)), available_bytes()
    if not ignore_memory and available is not None and needed > available:
        hint = "the values that are drawn at a time"
        raise not_enough_memory(needed, available, whose="seed", place="this machine", hint=hint, tries=[])
    info = chosen_model(job)
    model, dtype = job.config.model, job.config.training.dtype
    parameters = job.family.parameters(job.args)
    float32_names = job.family.keep_float32
    dtypes = {p.fqn: dtype if p.is_trained and not is_named(p.fqn, float32_names) else "float32" for p in parameters}
    files = boxes_for_mesh(
        parameters,
        job.dims,
        itemsizes={fqn: itemsize(saved_dtype) for fqn, saved_dtype in dtypes.items()},
        stages=job.split.modules,
        stage_ranks=job.split.ranks,
    )
    tensors = {p.fqn: TensorInfo(dtypes[p.fqn], p.shape) for p in parameters}
    target = plan_dcp(tensors, files, streamed=outputs.only_appends)

    def write_small_files(folder: Path) -> list[str]:
        write_model_info(folder, info)
        return write_assets(folder / ASSETS_FOLDER, info.assets, info.generation)

    plan = Plan(
        source=InitialWeights(info, seed=job.seed),
        target=target,
        casts={fqn: saved_dtype for fqn, saved_dtype in dtypes.items() if saved_dtype != "float32"},
        write_small_files=write_small_files,
        carried=list(info.assets.values()),
    )
    execute(dst, plan, Run(workers=workers, overwrite=overwrite, progress=progress))
    return SeedReport(
        destination=str(dst),
        model=f"{model.name} {model.flavor}",
        seed=job.seed,
        mesh=str(job.dims),
        dtype=dtype,
        num_parameters=job.num_parameters,
        num_tensors=len(target.tensors),
        num_files=len(files),
        num_bytes=target.total_bytes,
        secs=time.monotonic() - started,
        has_tokenizer=bool(info.assets),
    )
