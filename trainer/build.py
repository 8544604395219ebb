"""Build the model that a rank trains: meta device → stage → parallelisms → real memory.

Used by train, estimate and dry run alike. Every mode (pipeline or not, context parallel or not) is decided here, so
that the loop only calls `forward_backward(batch, num_units)`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from converters.common.errors import UnsupportedError, list_offenders
from converters.families.parameters import Parameter
from converters.layout.layout import cuts_within_experts
from trainer.job.hardware import check_hardware
from trainer.job.record import Job
from trainer.loss.registry import CHUNKED, is_loss_parallel
from trainer.models.objectives import get_objective
from trainer.models.registry import check_kinds, check_parameters, get_trainer_family
from trainer.models.units import ModelPart
from trainer.observability.log import note
from trainer.parallel.activation_checkpoint import apply_activation_checkpoint, set_memory_budget
from trainer.parallel.async_tensor import enable_async_tp
from trainer.parallel.compile import apply_compile, compiles
from trainer.parallel.ddp import Replicated, compute_in, is_ddp
from trainer.parallel.expert_parallel import apply_expert_parallel, with_shared_gather
from trainer.parallel.expert_shards import ShardedExperts
from trainer.parallel.experts import apply_expert_settings
from trainer.parallel.float8 import (
    apply_float8,
    float8_filters,
    float8_styles,
    is_float8,
    scale_weights,
)
from trainer.parallel.fsdp import (
    apply_fsdp,
    computes_in_copies,
    is_fsdp,
    keep_on_cpu,
    keeps_gathered,
    reshard_policy,
)
from trainer.parallel.one_rank import compute_in_copies
from trainer.parallel.pipeline import Pipeline, keep_modules
from trainer.parallel.stages import schedule_machine_problems
from trainer.parallel.tensor import apply_tp
from trainer.ranks.mesh import Meshes
from trainer.runner import Runner, WholeModel
from trainer.train_model import TrainModel


def build(
    job: Job,
    meshes: Meshes,
    device: torch.device,
    *,
    memory: AbstractContextManager[Any] | None = None,
    collectives_of: str | None = None,
    imbalance: float = 1.0,
) -> TrainModel:
    """The model as this rank trains it, in uninitialized memory on `device`.

    A dry run and an estimate allocate under `memory`, a fake tensor mode; then this machine's devices do not matter.
    `collectives_of`: the device type whose collectives tensor parallelism uses, by default the meshes'. `imbalance`:
    rows that fake experts receive, over the mean of all ranks.
    Raises UnsupportedError with everything that this machine cannot run.
    """
    config, dims, split = job.config, job.dims, job.split
    objective = get_objective(job.family.name)
    if memory is None:
        check_hardware(config, device)
    elif problems := schedule_machine_problems(config.parallelism):  # a trace runs torch's schedule, too
        raise UnsupportedError("this torch cannot trace the config:" + list_offenders(problems))
    pp_rank = meshes["pp"].get_local_rank()
    set_memory_budget(config.activation_checkpoint, Path(config.job.dump_folder))
    if config.parallelism.enable_async_tensor_parallel and memory is None:
        enable_async_tp(meshes["tp"].get_group())
    parts = []
    for stage in split.stages_of(pp_rank):
        part = build_part(job, stage)
        parallelize(
            part,
            job,
            meshes,
            device,
            collectives_of=collectives_of or meshes.device_type,
            imbalance=None if memory is None else imbalance,
        )
        with memory or nullcontext():
            if config.training.enable_cpu_offload:
                keep_on_cpu(part, device)
            else:
                part.to_empty(device=device)
        part.tie()
        parts.append(part)

    accumulating: Callable[[], AbstractContextManager[Any]] = nullcontext
    if dims.pp == 1:
        runner: Runner = WholeModel(parts[0])
        if is_ddp(dims):
            compute_in(parts[0], getattr(torch, config.training.mixed_precision_param))
            reduce_dtype = getattr(torch, config.training.mixed_precision_reduce)
            runner = Replicated(runner, parts[0], meshes["dp_replicate"].get_group(), reduce_dtype)
            accumulating = runner.accumulating
        elif computes_in_copies(config.training, config.parallelism, config.float8, dims):
            compute_in_copies(parts[0], getattr(torch, config.training.mixed_precision_param))
    else:
        assert objective.stage_shapes is not None, "an objective with the axis pp"
        runner = Pipeline(
            parts,
            split,
            meshes["pp"].get_group(),
            schedule=job.schedule,
            shapes=objective.stage_shapes(job),
            num_microbatches=job.num_microbatches,
            device=device,
        )
    precomputes_scales = is_float8(config.model) and config.float8.precompute_float8_dynamic_scale_for_fsdp
    return TrainModel(
        family=config.model.name,
        args=job.args,
        meshes=meshes,
        parts=parts,
        runner=runner,
        place=objective.place(job, meshes, device),
        first_and_last_on_one_rank=split.first_and_last_on_one_rank,
        accumulating=accumulating,
        after_update=partial(scale_weights, parts) if precomputes_scales else None,
    )


def build_part(job: Job, stage: int) -> ModelPart:
    """A pipeline stage of the model on the meta device."""
    parameters = job.family.parameters(job.args)
    with torch.device("meta"):
        model = get_trainer_family(job.family.name).build_model(job.args).to(getattr(torch, job.config.training.dtype))
    check_parameters(model, parameters, family=job.family.name)
    check_kinds(model, job.family, job.args)
    for parameter in parameters:
        if not parameter.is_trained:  # a router's bias is a sum of small moves
            owner, name = model.get_submodule(parameter.module), parameter.fqn.rpartition(".")[2]
            setattr(owner, name, getattr(owner, name).float())
    return keep_modules(model, job.split.modules[stage])


def parallelize(
    part: ModelPart,
    job: Job,
    meshes: Meshes,
    device: torch.device,
    *,
    collectives_of: str,
    imbalance: float | None = None,
) -> None:
    """Float8 → what the objective prepares → tensor → experts → checkpointing → compile → loss → FSDP.

    Each wraps the result of the previous one.
    """
    config, dims = job.config, job.dims
    parallelism, training = config.parallelism, config.training
    objective, compiles_model = get_objective(job.family.name), compiles(config.compile, "model")
    parameters: list[Parameter] = job.family.parameters(job.args)
    apply_expert_settings(part, config)
    if is_float8(config.model):
        filters = float8_filters(config.float8, training)
        apply_float8(part, config.float8, parameters, filters=filters, tp=dims.tp, compiles_model=compiles_model)
    if config.model.print_after_conversion:
        note(str(part))
    objective.prepare(part, job, meshes, device)
    if dims.tp > 1:
        plan = with_shared_gather(get_trainer_family(job.family.name).tensor_plan(parameters), part, dims)
        apply_tp(
            part,
            meshes["tp"],
            plan,
            # a chunked output computes the loss itself
            loss_parallel=is_loss_parallel(parallelism, dims) and training.loss != CHUNKED,
            converted=float8_styles(part, plan, config.float8, device_type=collectives_of)
            if is_float8(config.model)
            else None,
        )
    apply_expert_parallel(part, meshes, imbalance=imbalance)
    apply_activation_checkpoint(part, config.activation_checkpoint)
    if compiles_model:
        apply_compile(part, config.compile)
    objective.install_loss(part, job, meshes)
    if is_fsdp(training, parallelism, config.float8, dims):
        reshard, reshard_last = reshard_policy(
            parallelism.fsdp_reshard_after_forward, keeps=keeps_gathered(training, dims)
        )
        apply_fsdp(
            part,
            meshes.fsdp,
            experts=_expert_shards(job, meshes),
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            reshard_after_forward=reshard,
            reshard_last=reshard_last,
            offload_to_cpu=training.enable_cpu_offload,
        )


def _expert_shards(job: Job, meshes: Meshes) -> ShardedExperts | None:
    """None if experts are sharded as the rest of their layer."""
    if meshes.efsdp is None:
        return None
    num_experts = min(p.shape[p.expert_dim] for p in job.family.parameters(job.args) if p.expert_dim is not None)
    return ShardedExperts(meshes.efsdp, dim=1 if cuts_within_experts(num_experts, job.dims) else 0)
