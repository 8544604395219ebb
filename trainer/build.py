"""Build the model that a rank trains: meta model → stage → context, tensor, checkpointing, FSDP → real memory.

Used by train, seed, estimate and infer alike. Every mode (pipeline or not, context parallel or not) is settled here, so
that the loop knows one `forward_backward(batch, num_valid_tokens)`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from converters.families.base import ModelArgs, Parameter
from converters.families.registry import get_family
from converters.layout import MeshShape, local_box
from converters.model_info import ModelInfo
from trainer.config.sections import Config
from trainer.data.batch import Batch
from trainer.init import InitialWeights
from trainer.loss import cross_entropy_sum, sharded_cross_entropy_sum
from trainer.mesh import Meshes
from trainer.models.registry import TrainerFamily, get_trainer_family
from trainer.parallel.activation_checkpoint import apply_activation_checkpoint
from trainer.parallel.context import apply_cp, head_tail_positions
from trainer.parallel.fsdp import apply_fsdp, reshard_policy
from trainer.parallel.pipeline import LossSum, Microbatch, Pipeline, keep_modules
from trainer.parallel.tensor import apply_tp
from trainer.parallel.tied import TiedCopies
from trainer.parallel_dims import check_layout
from trainer.stages import split_model


class Runner(Protocol):
    """How tokens go through this rank's parts: in one piece, or as a pipeline."""

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor, num_valid_tokens: float
    ) -> Tensor: ...

    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor: ...


class WholeModel:
    """The runner where a rank holds all layers."""

    def __init__(self, model: nn.Module, loss_sum: LossSum):
        self.model, self.loss_sum = model, loss_sum

    def forward_backward(self, tokens: Tensor, targets: Tensor, positions: Tensor, num_valid_tokens: float) -> Tensor:
        loss = self.loss_sum(self.model(tokens, positions), targets) / num_valid_tokens
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def forward_loss(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        return self.loss_sum(self.model(tokens, positions), targets)


class TrainModel:
    """What a rank holds of the model, and the two things the loop does with it."""

    def __init__(
        self,
        *,
        family: str,
        args: ModelArgs,
        meshes: Meshes,
        parts: list[nn.Module],
        runner: Runner,
        take_shard: Callable[[Batch], tuple[Tensor, Tensor, Tensor]],
    ):
        self.family, self.args, self.meshes, self.parts = family, args, meshes, parts
        self._runner, self._take_shard = runner, take_shard
        # Taken once: while FSDP has a parameter gathered, its module shows the gathered one.
        self._parameters = {_native_name(name, args): p for part in parts for name, p in part.named_parameters()}
        self._tied = TiedCopies(args, parts, meshes)

    def forward_backward(self, batch: Batch, num_valid_tokens: float) -> Tensor:
        """Add this batch's gradients. Returns this rank's share of the loss: its sum over tokens / num_valid_tokens.

        `num_valid_tokens` counts the targets of the whole optimizer step, over all ranks and accumulated batches.
        Shares add up over the `loss` mesh and over `pp` (0 but on the last stage); tp ranks hold the same share.
        """
        return self._runner.forward_backward(*self._take_shard(batch), num_valid_tokens)

    def forward_loss(self, batch: Batch) -> Tensor:
        """This rank's share of the summed loss, not divided; no gradients."""
        loss = self._runner.forward_loss(*self._take_shard(batch))
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # no backward follows that would free what "never" keeps gathered
        return loss

    def sum_tied_gradients(self) -> None:
        """Give both copies of an embedding that is tied across stages the whole gradient; once, before clipping."""
        self._tied.sum_gradients()

    def tied_copies(self) -> list[nn.Parameter]:
        """Parameters here that an earlier stage holds too: a norm over all ranks must leave them out."""
        return self._tied.copies

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """FQN → parameter. A tied output in a stage of its own goes by the embedding's FQN, as on disk."""
        return self._parameters

    def state_dict(self) -> dict[str, Tensor]:
        """FQN → live tensor (a DTensor where it is sharded): loading fills it in place."""
        return {fqn: parameter.detach() for fqn, parameter in self._parameters.items()}

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set the first weights: the same for a seed in any layout, and those that `titan seed` writes."""
        weights = InitialWeights(ModelInfo(self.family, self.args), seed=seed)
        native = {p.fqn: p for p in get_family(self.family).parameters(self.args)}
        for fqn, parameter in self._parameters.items():
            box = local_box(native[fqn], self.meshes.dims, dist.get_rank())
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            assert tuple(local.shape) == (box.sizes if box else (0, *local.shape[1:])), (fqn, local.shape, box)
            if box is not None:
                for part, values in weights.blocks(fqn, box):
                    local[part.slices_within(box)] = torch.from_numpy(values).to(local)


def _native_name(module_name: str, args: ModelArgs) -> str:
    return "tok_embeddings.weight" if args.tied and module_name == "output.weight" else module_name


def build(config: Config, args: ModelArgs, dims: MeshShape, meshes: Meshes, device: torch.device) -> TrainModel:
    """The model as this rank trains it, in real memory on `device`, its values not yet set.

    Raises ConfigError with every problem of the layout.
    """
    check_layout(config, args, dims)
    family = get_trainer_family(config.model.name)
    parameters = get_family(config.model.name).parameters(args)
    split = split_model(config.parallelism, args.num_layers, dims.pp)
    pp_rank = meshes["pp"].get_local_rank()
    parts = []
    for stage in split.stages_of(pp_rank):
        part = build_part(config, family, args, parameters, split.modules[stage])
        parallelize(part, config, family, parameters, meshes)
        part.to_empty(device=device)
        part.tie()
        parts.append(part)

    loss_parallel = dims.tp > 1 and not config.parallelism.disable_loss_parallel
    loss_sum = (
        partial(sharded_cross_entropy_sum, group=meshes["tp"].get_group()) if loss_parallel else cross_entropy_sum
    )
    if dims.pp == 1:
        runner: Runner = WholeModel(parts[0], loss_sum)
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
                num_columns=args.vocab_size // (dims.tp if loss_parallel else 1),
                dtype=getattr(torch, config.training.mixed_precision_param),
            ),
            num_microbatches=config.training.local_batch_size // size,
            loss_sum=loss_sum,
            device=device,
        )
    return TrainModel(
        family=config.model.name,
        args=args,
        meshes=meshes,
        parts=parts,
        runner=runner,
        take_shard=_shard_taker(meshes, device),
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
    """Context → tensor → activation checkpointing → FSDP: each wraps what the one before made."""
    dims, parallelism, training = meshes.dims, config.parallelism, config.training
    if dims.cp > 1:
        apply_cp(part, meshes["cp"].get_group())
    if dims.tp > 1:
        plan = family.tensor_plan(parameters)
        apply_tp(part, meshes["tp"], plan, loss_parallel=not parallelism.disable_loss_parallel)
    apply_activation_checkpoint(part, config.activation_checkpoint)
    # Mixed precision is FSDP's, so FSDP also wraps what it does not shard: else TP-only and PP-only runs would compute
    # in another dtype than the same job on other degrees.
    if dims.fsdp > 1 or dims.dp_replicate > 1 or training.mixed_precision_param != training.dtype:
        reshard, reshard_last = reshard_policy(parallelism.fsdp_reshard_after_forward, pipelined=dims.pp > 1)
        apply_fsdp(
            part,
            meshes.fsdp,
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            reshard_after_forward=reshard,
            reshard_last=reshard_last,
        )


def _shard_taker(meshes: Meshes, device: torch.device) -> Callable[[Batch], tuple[Tensor, Tensor, Tensor]]:
    """Batch → this context rank's tokens, targets and positions, on the device."""
    cp, cp_rank = meshes.dims.cp, meshes["cp"].get_local_rank()

    def whole(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(batch.tokens.shape[1], device=device)
        # contiguous: pipeline stages announce their inputs' strides
        return batch.tokens.to(device).contiguous(), batch.targets.to(device), positions

    def head_and_tail(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        positions = head_tail_positions(batch.tokens.shape[1], cp_rank, cp, device)
        return batch.tokens.to(device)[:, positions], batch.targets.to(device)[:, positions], positions

    return whole if cp == 1 else head_and_tail
