"""Pipeline parallelism: stages are the model with modules removed; torch's schedules run the microbatches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainer.batch import Inputs
from trainer.parallel.stages import StageSplit
from trainer.runner import as_loss_sum

if TYPE_CHECKING:
    from trainer.models.units import ModelPart


def keep_modules(model: "ModelPart", names: Sequence[str]) -> "ModelPart":
    """Remove from a model the units that a stage does not hold; the other FQNs do not change."""
    for unit in model.units():
        if unit.name not in names:
            owner, _, key = unit.name.rpartition(".")
            holder = model.get_submodule(owner)
            if isinstance(holder, nn.ModuleDict):
                del holder[key]
            else:
                setattr(holder, key, None)
    return model


@dataclass(frozen=True, slots=True)
class StageShapes:
    """Shapes between stages; the last one returns the summed loss."""

    x: Tensor  # of one microbatch, on the meta device: what the first stage gets
    hidden_like: Callable[[Tensor], Tensor]  # x → an empty tensor for what stages pass on, on the same device


_BY_SAMPLE = "by_sample_"  # before names of inputs, so that none is one that torch's schedules take themselves


class _Stage(PipelineStage):
    """torch's stage, whose inputs are named, and may be the same for all microbatches.

    Gradients of weights are accumulated in FSDP's reduce dtype also under a split backward.
    """

    shared: Mapping[str, Tensor] = {}

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        named = {name.removeprefix(_BY_SAMPLE): tensor for name, tensor in (kwargs or {}).items()} | dict(self.shared)
        return super().forward_one_chunk(fwd_chunk_id, args, named, save_forward_output)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if isinstance(self.submod, FSDPModule):
            # FSDP casts gradients when backward reaches a module's inputs; at a schedule's end, gradients of several
            # microbatches would be summed in the compute dtype before that.
            for state in fully_shard.state(self.submod)._state_ctx.all_states:  # type: ignore[attr-defined]
                for group in state._fsdp_param_groups:  # torch 2.13's name; older ones are refused (stages.py)
                    group.post_backward()


class Pipeline:
    """Runs batches through the stages of all ranks, of which this rank holds some."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        split: StageSplit,
        group: dist.ProcessGroup,
        *,
        schedule: str,
        shapes: StageShapes,
        num_microbatches: int,
        device: torch.device,
    ):
        self.parts = dict(zip(split.stages_of(dist.get_rank(group)), parts, strict=True))
        self.split, self.group, self.device = split, group, device
        self.shapes = shapes
        self.num_units: Tensor | float = 1.0
        self.holds_last = split.num_stages - 1 in self.parts
        self._stages = [self._make_stage(index, part) for index, part in self.parts.items()]
        schedule_class = get_schedule_class(schedule)
        self.schedule = schedule_class(
            self._stages if issubclass(schedule_class, PipelineScheduleMulti) else self._stages[0],
            n_microbatches=num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _make_stage(self, index: int, part: nn.Module) -> _Stage:
        # Given shapes avoid torch's shape inference, which runs the model and sends pickles between ranks.
        hidden = self.shapes.hidden_like(self.shapes.x).requires_grad_()
        is_last = index == self.split.num_stages - 1
        return _Stage(
            part,
            index,
            self.split.num_stages,
            self.device,
            input_args=self.shapes.x if index == 0 else hidden,
            output_args=torch.empty((), device="meta", requires_grad=True) if is_last else hidden,
            group=self.group,
        )

    def _loss(self, loss_sum: Tensor, unused: Tensor) -> Tensor:
        # Divided before backward; otherwise gradients would be thousands of times too large.
        return as_loss_sum(loss_sum) / self.num_units

    def forward_backward(self, inputs: Inputs, num_units: Tensor | float) -> Tensor:
        """Run all microbatches; returns the loss on ranks with the last stage, 0 elsewhere."""
        self.num_units = num_units
        losses: list[Tensor] = []
        for stage in self._stages:
            stage.shared = inputs.shared
        self.schedule.step(
            *((inputs.x,) if 0 in self.parts else ()),
            target=inputs.x if self.holds_last else None,  # with which torch calls `_loss`
            losses=losses if self.holds_last else None,
            **{f"{_BY_SAMPLE}{name}": tensor for name, tensor in inputs.by_sample.items()},
            return_outputs=False,
        )
        for stage in self._stages:
            stage.shared = {}  # nothing of a batch outlives it
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    @torch.no_grad()
    def forward_loss(self, inputs: Inputs) -> Tensor:
        """The summed loss of a batch on ranks with the last stage, 0 elsewhere; forward only, nothing is kept.

        All ranks compute one microbatch of a stage, then exchange results. What a rank sends and receives is one batch:
        NCCL would run single messages of a group one after the other, and a rank of several stages would wait for a
        microbatch to come back before it starts the next.
        """
        total = torch.zeros((), device=self.device)
        this_rank, ranks, last = dist.get_rank(self.group), self.split.ranks, self.split.num_stages - 1
        size = len(self.shapes.x)
        samples = torch.split(inputs.x, size)
        by_sample = {name: torch.split(tensor, size) for name, tensor in inputs.by_sample.items()}
        received = {(0, number): sample for number, sample in enumerate(samples)}  # by stage and microbatch
        for computed in forward_order(ranks, len(samples)):
            messages = []
            if this_rank in computed:
                stage, number = computed[this_rank]
                columns = {name: parts[number] for name, parts in by_sample.items()}
                result = self.parts[stage](received.pop(computed[this_rank]), **columns, **inputs.shared)
                if stage == last:
                    total += result
            for rank, (stage, number) in computed.items():
                if stage == last or this_rank not in (rank, ranks[stage + 1]):
                    continue
                following = stage + 1, number
                if rank == ranks[stage + 1]:
                    received[following] = result
                elif rank == this_rank:
                    messages.append(
                        dist.P2POp(dist.isend, result.contiguous(), group=self.group, group_peer=ranks[stage + 1])
                    )
                else:
                    received[following] = self.shapes.hidden_like(samples[number])
                    messages.append(dist.P2POp(dist.irecv, received[following], group=self.group, group_peer=rank))
            for sent in dist.batch_isend_irecv(messages) if messages else ():
                sent.wait()
        return total


def forward_order(ranks: Sequence[int], num_microbatches: int) -> Iterator[dict[int, tuple[int, int]]]:
    """The computations of the pipeline ranks at one time, forward only: {rank: (stage, microbatch)}, in time order.

    `ranks` are those of the stages. A stage can compute what the stage before it has computed earlier; of several, a
    rank takes the last stage, so that it works on while other ranks compute the stages between its own.
    """
    done = [0] * len(ranks)  # microbatches of each stage
    while done[-1] < num_microbatches:
        computed: dict[int, tuple[int, int]] = {}
        for stage in reversed(range(len(ranks))):
            if done[stage] < (done[stage - 1] if stage else num_microbatches):
                computed.setdefault(ranks[stage], (stage, done[stage]))
        for stage, _ in computed.values():
            done[stage] += 1
        yield computed
