"""Changes of the config that save memory: other settings of the same job, compared by the closed form in milliseconds.

Each is one change, with what it saves in allocated memory by the closed form. Reserved memory shrinks by about as much:
`titan estimate-memory` with the change gives the exact number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from converters.common.errors import ConfigError
from converters.common.sizes import format_bytes
from titan_tools.memory.formula.closed_form import peak_instant
from titan_tools.memory.formula.coverage import formula_gaps
from titan_tools.memory.formula.run_shape import run_shape
from trainer.config.sections import Config
from trainer.job.job import Job, resolve_job
from trainer.loss.registry import CHUNKED
from trainer.ranks.gpus import Gpu

MOST = 5
_MOST_TP = 8  # GPUs of a node, beyond which tensor parallelism is slow
_LEAST_SHARE = 0.02  # of allocated memory


@dataclass(frozen=True, slots=True)
class Change:
    """Words for the command line, and what they save on the fullest rank, in bytes."""

    words: str
    saved_bytes: int

    def __str__(self) -> str:
        return f"{self.words}: about {format_bytes(self.saved_bytes)} less"


def changes(job: Job, gpu: Gpu) -> list[Change]:
    """The single changes that save the most, largest first. None where the closed form does not describe the job."""
    if formula_gaps(job):
        return []
    now = _allocated_bytes(job, gpu)
    found = []
    for overrides in _candidates(job):
        try:
            other = resolve_job(_with(job.config, overrides), job.dims.world_size, args=job.args)
        except ConfigError:
            continue
        if formula_gaps(other):
            continue
        saved = now - _allocated_bytes(other, gpu)
        if saved > _LEAST_SHARE * now:
            words = " ".join(f"--{key}={value}" for key, value in overrides.items())
            found.append(Change(words, saved))
    return sorted(found, key=lambda change: -change.saved_bytes)[:MOST]


def _candidates(job: Job) -> Iterator[dict[str, Any]]:
    dims, training = job.dims, job.config.training
    checkpointing = job.config.activation_checkpoint
    same_samples = {"training.global_batch_size": job.samples_per_step}
    if checkpointing.mode == "none":
        yield {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    if checkpointing.mode != "full":
        yield {"activation_checkpoint.mode": "full"}
    if training.loss != CHUNKED:
        yield {"training.loss": CHUNKED}
    elif dims.pp == 1:
        yield {"training.loss_chunks": 2 * job.loss_chunks}
    if dims.pp == 1 and training.local_batch_size % 2 == 0:
        yield {"training.local_batch_size": training.local_batch_size // 2, **same_samples}
    if job.config.parallelism.fsdp_reshard_after_forward != "always":
        yield {"parallelism.fsdp_reshard_after_forward": "always"}
    if job.config.optimizer.state_dtype is None and training.dtype == "float32":
        yield {"optimizer.state_dtype": "bfloat16"}
    if dims.dp_replicate > 1:
        all_sharded = dims.dp_replicate * dims.dp_shard
        yield {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": all_sharded}
    if dims.dp_shard % 2 == 0:
        fewer_shards = {"parallelism.data_parallel_shard_degree": dims.dp_shard // 2, **same_samples}
        if 2 * dims.tp <= _MOST_TP:
            yield {"parallelism.tensor_parallel_degree": 2 * dims.tp, **fewer_shards}
        yield {"parallelism.context_parallel_degree": 2 * dims.cp, **fewer_shards}


def _with(config: Config, overrides: dict[str, Any]) -> Config:
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _allocated_bytes(job: Job, gpu: Gpu) -> int:
    """Of the fullest rank: in a pipeline the first has the most microbatches in flight, the last has the loss."""
    run = run_shape(job)
    return max(peak_instant(run, pp_rank=rank, gpu=gpu).total_bytes for rank in {0, job.dims.pp - 1})
