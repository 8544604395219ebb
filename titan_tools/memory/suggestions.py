"""What to change so that a run takes less: other settings of the same job, compared by the closed form in milliseconds.

Each is one change, with the savings in allocated memory that the closed form tells. What it saves of the reserved
memory is about as much: `titan estimate-memory` with the change says it exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from converters.errors import ConfigError
from converters.families.registry import get_family
from converters.layout import MeshShape
from converters.sizes import format_bytes
from titan_tools.memory.constants import Gpu
from titan_tools.memory.formula.closed_form import peak_instant
from titan_tools.memory.formula.coverage import formula_gaps
from titan_tools.memory.formula.run_shape import run_shape
from trainer.config.sections import Config
from trainer.job import layout_problems, resolve, samples_per_step
from trainer.loss.registry import CHUNKED

MOST = 5
_MOST_TP = 8  # GPUs of a node, beyond which tensor parallelism is slow
_WORTH_SAYING = 0.02  # of allocated memory


@dataclass(frozen=True, slots=True)
class Change:
    """Words for the command line, and what they save on the fullest rank, in bytes."""

    words: str
    saved_bytes: int

    def __str__(self) -> str:
        return f"{self.words}: about {format_bytes(self.saved_bytes)} less"


def changes(config: Config, dims: MeshShape, gpu: Gpu) -> list[Change]:
    """Single changes that save the most, largest first. None where the closed form does not describe the run."""
    if formula_gaps(config, dims):
        return []
    now = _allocated_bytes(config, dims, gpu)
    found = []
    for overrides in _candidates(config, dims):
        words = " ".join(f"--{key}={value}" for key, value in overrides.items())
        other = _with(config, overrides)
        other_dims = _fitting(other, dims.world_size)
        if other_dims is None or formula_gaps(other, other_dims):
            continue
        saved = now - _allocated_bytes(other, other_dims, gpu)
        if saved > _WORTH_SAYING * now:
            found.append(Change(words, saved))
    return sorted(found, key=lambda change: -change.saved_bytes)[:MOST]


def _candidates(config: Config, dims: MeshShape) -> Iterator[dict[str, Any]]:
    training, checkpointing = config.training, config.activation_checkpoint
    if checkpointing.mode == "none":
        yield {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    if checkpointing.mode != "full":
        yield {"activation_checkpoint.mode": "full"}
    if training.loss != CHUNKED:
        yield {"training.loss": CHUNKED}
    elif dims.pp == 1:
        yield {"training.loss_chunks": 2 * training.loss_chunks}
    if dims.pp == 1 and training.local_batch_size % 2 == 0:
        total = samples_per_step(training, dims.batch)
        yield {"training.local_batch_size": training.local_batch_size // 2, "training.global_batch_size": total}
    if config.parallelism.fsdp_reshard_after_forward != "always" and dims.fsdp > 1:
        yield {"parallelism.fsdp_reshard_after_forward": "always"}
    if config.optimizer.state_dtype is None and training.dtype == "float32":
        yield {"optimizer.state_dtype": "bfloat16"}
    if dims.dp_replicate > 1:
        all_sharded = dims.dp_replicate * dims.dp_shard
        yield {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": all_sharded}
    if dims.dp_shard % 2 == 0:
        total = samples_per_step(training, dims.batch)
        same_samples = {
            "parallelism.data_parallel_shard_degree": dims.dp_shard // 2,
            "training.global_batch_size": total,
        }
        if 2 * dims.tp <= _MOST_TP:
            yield {"parallelism.tensor_parallel_degree": 2 * dims.tp, **same_samples}
        yield {"parallelism.context_parallel_degree": 2 * dims.cp, **same_samples}


def _with(config: Config, overrides: dict[str, Any]) -> Config:
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _fitting(config: Config, world_size: int) -> MeshShape | None:
    """The degrees on as many ranks; None where they cannot be."""
    args = get_family(config.model.name).flavors[config.model.flavor]
    try:
        dims = resolve(config.parallelism, world_size)
    except ConfigError:
        return None
    return None if layout_problems(config, args, dims) else dims


def _allocated_bytes(config: Config, dims: MeshShape, gpu: Gpu) -> int:
    """Of the fullest rank: in a pipeline the first has the most microbatches in flight, the last has the loss."""
    run = run_shape(config, world_size=dims.world_size)
    ranks = (peak_instant(run, pp_rank=rank, gpu=gpu, steady=True) for rank in {0, dims.pp - 1})
    return max(instant.total_bytes for instant in ranks)
