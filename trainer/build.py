"""Build the model that a rank trains: meta → stage → context, tensor, checkpointing, compile, FSDP → real memory.

Used by train, seed, estimate and infer alike. Every mode (pipeline or not, context parallel or not) is settled here, so
that the loop knows one `forward_backward(batch, num_valid_tokens)`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from converters.families.base import ModelArgs, Parameter
from converters.families.registry import get_family
from converters.layout import MeshShape
from trainer.config.sections import Config
from trainer.data.batch import Batch
from trainer.loss.install import install_loss, leaves_columns
from trainer.machine import refuse_what_cannot_run
from trainer.mesh import Meshes
from trainer.models.registry import TrainerFamily, get_trainer_family
from trainer.parallel.activation_checkpoint import apply_activation_checkpoint, set_memory_budget
from trainer.parallel.async_tensor import enable_async_tp
from trainer.parallel.compile import apply_compile, compiles
from trainer.parallel.context import apply_cp, head_tail_positions
from trainer.parallel.ddp import Replicated, compute_in, is_ddp
from trainer.parallel.float8 import apply_float8, float8_styles, is_float8, precomputes_scales, scale_weights
from trainer.parallel.fsdp import apply_fsdp, is_fsdp, keep_on_cpu, reshard_policy
from trainer.parallel.pipeline import Microbatch, Pipeline, keep_modules
from trainer.parallel.tensor import apply_tp
from trainer.parallel_dims import check_layout
from trainer.runner import Runner, WholeModel
from trainer.stages import split_model
from trainer.train_model import TrainModel
from trainer.watching.metrics import note


def build(
    config: Config,
    args: ModelArgs,
    dims: MeshShape,
    meshes: Meshes,
    device: torch.device,
    *,
    memory: AbstractContextManager | None = None,
) -> TrainModel:
    """The model as this rank trains it, in real memory on `device`, its values not yet set.

    `memory`: a dry run makes tensors under it that take none, and asks nothing of this machine.
    Raises ConfigError with every problem of the layout, UnsupportedError with all that this machine cannot run.
    """
    check_layout(config, args, dims)
    if memory is None:
        refuse_what_cannot_run(config, device)
    family = get_trainer_family(config.model.name)
    parameters = get_family(config.model.name).parameters(args)
    split = split_model(config.parallelism, args.num_layers, dims.pp)
    pp_rank = meshes["pp"].get_local_rank()
    set_memory_budget(config.activation_checkpoint, Path(config.job.dump_folder))
    if config.parallelism.enable_async_tensor_parallel and memory is None:
        enable_async_tp(meshes["tp"].get_group())
    parts = []
    for stage in split.stages_of(pp_rank):
        part = build_part(config, family, args, parameters, split.modules[stage])
        parallelize(part, config, family, parameters, meshes)
        with memory or nullcontext():
            if config.training.enable_cpu_offload:
                keep_on_cpu(part, device)
            else:
                part.to_empty(device=device)
        part.tie()
        parts.append(part)

    accumulating: Callable[[], AbstractContextManager] = nullcontext
    if dims.pp == 1:
        runner: Runner = WholeModel(parts[0])
        if is_ddp(dims):
            compute_in(parts[0], getattr(torch, config.training.mixed_precision_param))
            runner = Replicated(runner, parts[0], meshes["dp_replicate"].get_group())
            accumulating = runner.accumulating
    else:
        size = config.parallelism.pipeline_parallel_microbatch_size
        runner = Pipeline(
            parts,
            split,
            meshes["pp"].get_group(),
            schedule=config.parallelism.pipeline_parallel_schedule,
            microbatch=Microbatch(
                size=size,
                local_len=config.training.seq_len // dims.cp,
                sequence_shards=dims.tp,
                dim=args.dim,
                dtype=getattr(torch, config.training.mixed_precision_param),
            ),
            num_microbatches=config.training.local_batch_size // size,
            device=device,
        )
    return TrainModel(
        family=config.model.name,
        args=args,
        meshes=meshes,
        parts=parts,
        runner=runner,
        take_shard=_shard_taker(meshes, device),
        ends_meet=split.ends_meet,
        accumulating=accumulating,
        after_update=partial(scale_weights, parts) if precomputes_scales(config) else None,
    )


def build_part(
    config: Config, family: TrainerFamily, args: ModelArgs, parameters: list[Parameter], modules: tuple[str, ...]
) -> nn.Module:
    """A stage of the model on the meta device."""
    with torch.device("meta"):
        model = family.build_model(args).to(getattr(torch, config.training.dtype))
    return keep_modules(model, modules)


def parallelize(
    part: nn.Module, config: Config, family: TrainerFamily, parameters: list[Parameter], meshes: Meshes
) -> None:
    """Float8 → context → tensor → checkpointing → compile → loss → FSDP: each wraps what the one before made."""
    dims, parallelism, training = meshes.dims, config.parallelism, config.training
    if is_float8(config):
        apply_float8(part, config, parameters, tp=dims.tp)
    if config.model.print_after_conversion:
        note(str(part))
    if dims.cp > 1:
        apply_cp(part, meshes["cp"].get_group())
    if dims.tp > 1:
        plan = family.tensor_plan(parameters)
        apply_tp(
            part,
            meshes["tp"],
            plan,
            loss_parallel=leaves_columns(config, meshes),
            converted=float8_styles(part, plan, config.float8, device_type=meshes.device_type)
            if is_float8(config)
            else None,
        )
    apply_activation_checkpoint(part, config.activation_checkpoint)
    if compiles(config.compile, "model"):
        apply_compile(part, config.compile)
    install_loss(part, config, meshes)
    if is_fsdp(config, dims):
        reshard, reshard_last = reshard_policy(parallelism.fsdp_reshard_after_forward, pipelined=dims.pp > 1)
        apply_fsdp(
            part,
            meshes.fsdp,
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            reshard_after_forward=reshard,
            reshard_last=reshard_last,
            offload_to_cpu=training.enable_cpu_offload,
        )


def _shard_taker(meshes: Meshes, device: torch.device) -> Callable[[Batch], tuple[Tensor, Tensor, Tensor]]:
    """Batch → this context rank's tokens, targets and positions, on the device."""
    cp, cp_rank = meshes.dims.cp, meshes["cp"].get_local_rank()

    def copied(ids: Tensor) -> Tensor:
        return ids.to(device, non_blocking=True)  # from pinned memory the host need not wait; from other it does anyway

    def whole(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(batch.tokens.shape[1], device=device)
        # contiguous: pipeline stages announce their inputs' strides
        return copied(batch.tokens).contiguous(), copied(batch.targets), positions

    def head_and_tail(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        positions = head_tail_positions(batch.tokens.shape[1], cp_rank, cp, device)
        return copied(batch.tokens)[:, positions], copied(batch.targets)[:, positions], positions

    return whole if cp == 1 else head_and_tail
