"""The least memory of a training run: weights, gradients and moments of each rank, from shapes and layout. Torch-free.

They exist together at the end of backward, whatever else a step needs. Activations, buffers of collectives, libraries
and asynchronous checkpoints come in addition: `titan estimate-memory` counts those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from converters.common.dtypes import itemsize
from converters.common.errors import ConfigError
from converters.common.sizes import format_bytes
from converters.families.args import is_tied
from converters.families.parameters import EMBEDDING, OUTPUT, Parameter, unit_of
from converters.layout.layout import local_box
from trainer.job.record import Job
from trainer.parallel.ddp import is_ddp
from trainer.ranks.machine import available_bytes, machine_identity, not_enough_memory

if TYPE_CHECKING:
    from trainer.ranks.process_group import Ranks


def state_bytes(job: Job, ranks: Iterable[int]) -> list[int]:
    """Bytes of state of each rank: weights, gradients and moments, and what is saved and not trained."""
    value = itemsize(job.config.training.dtype)
    moments = 2 * itemsize(job.config.optimizer.state_dtype or job.config.training.dtype)
    kinds: dict[int, Counter[tuple[Parameter, bool]]] = {}  # layers are alike

    def of_rank(rank: int) -> int:
        pp_rank, total = job.dims.coordinates(rank).pp, 0
        if pp_rank not in kinds:
            kinds[pp_rank] = Counter((replace(p, fqn="", input_group=""), has) for p, has in _held(job, pp_rank))
        for (kind, has_moments), count in kinds[pp_rank].items():
            box = local_box(kind, job.dims, rank)
            each = 2 * value + moments * has_moments if kind.is_trained else itemsize("float32")
            total += count * each * (box.num_elements if box else 0)
        return total

    return [of_rank(rank) for rank in ranks]


def _held(job: Job, pp_rank: int) -> Iterator[tuple[Parameter, bool]]:
    """The parameters of a pipeline rank's stages, and whether the optimizer has moments of them."""
    modules = {module for stage in job.split.stages_of(pp_rank) for module in job.split.modules[stage]}
    for parameter in job.family.parameters(job.args):
        if parameter.unit in modules:
            yield parameter, True
        # The last of several stages has a copy of a tied embedding (parallel/tied.py)
        has_copy = is_tied(job.args) and parameter.fqn == EMBEDDING
        if has_copy and job.split.num_stages > 1 and unit_of(OUTPUT) in modules:
            yield parameter, not job.split.first_and_last_on_one_rank


def too_large_for_host(job: Job) -> ConfigError | None:
    """The error if all ranks of a job together need more host memory than this machine has available.

    For a job whose ranks all run here and keep their state in host memory; before they start.
    """
    return _too_large(job, range(job.dims.world_size), available_bytes(), place="this machine")


def require_on_ranks(job: Job, ranks: Ranks) -> None:
    """Raise ConfigError on all ranks if a GPU, or the host memory of a machine, cannot hold its ranks' state.

    Every rank must call this, before anything is built.
    """
    import torch

    from trainer.ranks.agree import on_each

    device, rank = ranks.device, ranks.agreement.rank()
    if is_in_gpus(job, has_gpus=device.type == "cuda"):
        free = torch.cuda.mem_get_info(device)[0]
        errors = on_each(ranks.agreement, lambda: _too_large(job, [rank], free, place=f"the GPU of rank {rank}"))
    else:
        machines = on_each(ranks.agreement, lambda: (machine_identity(), available_bytes()))
        errors = []
        for machine in dict.fromkeys(identity for identity, _ in machines):
            on_it = [number for number, (identity, _) in enumerate(machines) if identity == machine]
            sizes = [available for identity, available in machines if identity == machine and available is not None]
            errors.append(_too_large(job, on_it, min(sizes, default=None), place=machine[0]))
    if error := next(filter(None, errors), None):
        raise error


def is_in_gpus(job: Job, *, has_gpus: bool) -> bool:
    """Whether the ranks keep weights, gradients and moments in their GPUs, not in host memory."""
    return has_gpus and not job.config.training.enable_cpu_offload


def _too_large(job: Job, on_it: Sequence[int], available: int | None, *, place: str) -> ConfigError | None:
    needed = sum(state_bytes(job, on_it))
    if available is None or needed <= available:
        return None
    holders = f"{len(on_it):,} ranks" if len(on_it) > 1 else "a rank"
    return not_enough_memory(
        needed,
        available,
        whose="training",
        place=place,
        hint=f"weights, gradients and optimizer states of {holders} alone; activations come in addition",
        tries=list(_tries(job, on_it, needed, available)),
    )


def _tries(job: Job, on_it: Sequence[int], needed: int, available: int) -> Iterator[str]:
    config = job.config
    smaller = {
        "--optimizer.state_dtype": replace(config, optimizer=replace(config.optimizer, state_dtype="bfloat16")),
        "--training.dtype": replace(config, training=replace(config.training, dtype="bfloat16")),
    }
    for option, changed in smaller.items():
        num_bytes = sum(state_bytes(replace(job, config=changed), on_it))
        if num_bytes <= available:
            yield f"{option} bfloat16, which needs at least {format_bytes(num_bytes)}"
    if not is_ddp(job.dims):
        times = ceil(needed / max(available, 1))
        yield f"{times:,} times as many ranks on as many times the hardware (torchrun), where they share the model"
    yield "a smaller flavor (titan models); titan estimate-memory CONFIG shows what a rank of any layout needs"
