"""What one pipeline rank holds at an instant of a step, in bytes by part.

How it changes is in passes.py and closed_form.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from converters.common.sizes import MIB
from converters.families.base import Parameter
from converters.layout.layout import local_box
from converters.layout.stages import module_of
from titan_tools.memory.constants import CUBLAS_HANDLES, PARTS
from titan_tools.memory.formula.activations import Activations, keeps_whole_block
from titan_tools.memory.formula.float8 import gathered_bytes
from titan_tools.memory.formula.loss import LossBytes
from titan_tools.memory.formula.run_shape import FP32, RunShape
from trainer.ranks.gpus import Gpu

Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, slots=True)
class FsdpGroup:
    """The parameters that FSDP gathers and reduces together. Elements, not bytes: the dtype varies within a step."""

    name: str
    local_sizes: tuple[int, ...]  # elements of this rank's shard of each parameter
    full_sizes: tuple[int, ...]  # gathered over FSDP, still sharded by TP
    is_kept: bool  # stays gathered from forward to backward

    @property
    def layer(self) -> int | None:
        """The number of the block; None for other groups."""
        return int(self.name.removeprefix("layers.")) if self.name.startswith("layers.") else None

    @property
    def full_elements(self) -> int:
        """Of all of its parameters, gathered."""
        return sum(self.full_sizes)

    @property
    def local_elements(self) -> int:
        """Of this rank's shards together."""
        return sum(self.local_sizes)


def groups_of_stage(run: RunShape, stage: int) -> list[FsdpGroup]:
    """The FSDP groups of a stage in forward order: tok_embeddings, each block, norm with output.

    As trainer/parallel/fsdp.py wraps them: a tied embedding shares one group with norm and output. Shards are those of
    the rank at coordinate 0 of each axis, which holds the largest part where a division leaves a remainder.
    """
    held = _parameters_by_module(run, stage)
    ends = [module for module in held if module in ("norm", "output")]
    if "tok_embeddings" in held and ends and run.args.tied:
        ends.insert(0, "tok_embeddings")
    members = [[module] for module in held if module not in ends] + ([ends] if ends else [])
    groups = []
    for group in members:
        parameters = [p for module in group for p in held[module]]
        groups.append(
            FsdpGroup(
                name="+".join(group),
                local_sizes=_sizes(run, parameters, fsdp=run.mesh.fsdp),
                full_sizes=_sizes(run, parameters, fsdp=1),
                is_kept=not (run.reshard_output if group is ends else run.reshard_after_forward),
            )
        )
    return groups


def _parameters_by_module(run: RunShape, stage: int) -> dict[str, list[Parameter]]:
    """A stage's modules in order with their parameters.

    A tied output has no parameter of its own, except a copy of the embedding's if another stage holds that.
    """
    wanted = run.stages[stage]
    held: dict[str, list[Parameter]] = {module: [] for module in wanted}
    for parameter in run.family.parameters(run.args):
        module = module_of(parameter.fqn)
        if run.args.tied and module == "tok_embeddings" and module not in wanted and "output" in wanted:
            module = "output"
        if module in held:
            held[module].append(parameter)
    return held


def _sizes(run: RunShape, parameters: Sequence[Parameter], *, fsdp: int) -> tuple[int, ...]:
    mesh = replace(run.mesh, pp=1, dp_replicate=1, dp_shard=fsdp, cp=1)
    boxes = (local_box(p, mesh, rank=0) for p in parameters)
    return tuple(box.num_elements for box in boxes if box)


@dataclass(frozen=True, slots=True)
class Instant:
    """An instant of the step and the bytes of each part of PARTS that is not zero."""

    when: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(slots=True)
class Rank:
    """What one rank holds as the step proceeds, in bytes."""

    run: RunShape
    groups: dict[int, list[FsdpGroup]]  # by stage
    sizes: Activations
    loss: LossBytes
    gpu: Gpu
    kept: dict[Key, int] = field(default_factory=dict)  # activations in flight
    kept_loss: dict[Key, int] = field(default_factory=dict)
    waiting: dict[Key, int] = field(default_factory=dict)  # gradients of activations, for those of weights
    of_inputs: dict[Key, int] = field(default_factory=dict)  # gradients of inputs, held until the step ends
    inputs: dict[Key, int] = field(default_factory=dict)  # received for a forward, where stages do not keep buffers
    output_gradients: dict[Key, int] = field(default_factory=dict)  # the same for a backward
    gathered: dict[str, int] = field(default_factory=dict)  # by group
    gathering: dict[str, int] = field(default_factory=dict)  # by group: flat all-gather results before they are copied
    shards: dict[str, int] = field(default_factory=dict)  # gradients by group, as the optimizer takes them
    added_up: dict[str, int] = field(default_factory=dict)  # unsharded gradients by group, of a pipeline's microbatches
    all_reduced: dict[str, int] = field(default_factory=dict)  # by group: fp32 shards that are not the gradients
    pending_reduce: int = 0  # the last reduce-scatter's input, held until the next one
    whole_gradients: int = 0  # of a group whose backward is not complete: the tied embedding's
    local_elements: int = field(init=False)  # of this rank's shards of all parameters

    def __post_init__(self) -> None:
        self.local_elements = sum(group.local_elements for group in self.all_groups())

    def instant(self, when: str, **parts: int) -> Instant:
        """An instant: its own parts in addition to what the rank holds."""
        local = 0 if self.run.is_offloaded else self.local_elements
        gradients = (self.shards, self.added_up, self.all_reduced)
        held = {
            "parameters": local * self.run.param_bytes,
            "gradients": sum(sum(sizes.values()) for sizes in gradients) + self.whole_gradients,
            "optimizer": local * self.run.state_bytes,
            "activations": sum(self.kept.values()),
            "recompute": sum(self.waiting.values()) + sum(self.of_inputs.values()),
            "logits_and_loss": sum(self.kept_loss.values()),
            "all_gather": sum(self.gathered.values()) + sum(self.gathering.values()),
            "reduce_scatter": self.pending_reduce,
            "pipeline_buffers": self._pipeline_buffers(),
            "workspaces": round(CUBLAS_HANDLES * self.gpu.cublas_mib * MIB),
        }
        total = {part: held.get(part, 0) + parts.get(part, 0) for part in PARTS}
        return Instant(when, {part: size for part, size in total.items() if size})

    def all_groups(self) -> list[FsdpGroup]:
        return [group for stage in self.groups.values() for group in stage]

    def _pipeline_buffers(self) -> int:
        """Torch's stages receive into one buffer per microbatch and direction, allocated once and kept.

        What a stage passes to the next one on the same rank replaces such a buffer until the next step. From 2.15 on,
        a buffer is there from when it is received until its backward is done.
        """
        if not self.run.keeps_buffers:
            return sum(self.inputs.values()) + sum(self.output_gradients.values())
        last = len(self.run.stages) - 1
        ends = sum((stage > 0) + (stage < last) for stage in self.groups)
        return ends * self.run.num_microbatches * self.sizes.stream

    def gathered_bytes(self, group: FsdpGroup) -> int:
        """Of a group's parameters as FSDP gathers them."""
        return gathered_bytes(self.run, group.name, group.full_elements)

    def whole_bytes(self, group: FsdpGroup) -> int:
        """Of a group's gradients before they are reduced, as backward leaves them under FSDP."""
        return group.full_elements * self.run.compute_bytes

    def as_left(self, group: FsdpGroup, num_bytes: int) -> int:
        """Of new gradients of a group as backward leaves them: as sums in fp32 if FSDP adds up at once."""
        starts_sum = self.run.sums_at_once and self.run.uses_fsdp and self.run.uses_pipeline
        return num_bytes * FP32 // self.run.gradient_bytes if starts_sum else num_bytes

    def casts(self, group: FsdpGroup) -> int:
        """Of the casts of a group's weights that its products keep; 0 under FSDP, which gathers them cast."""
        return group.full_elements * self.run.compute_bytes if self.run.casts_weights else 0

    def is_kept_whole(self, group: FsdpGroup) -> bool:
        """Whether a group is a block of which nothing is recomputed."""
        return group.layer is not None and keeps_whole_block(self.run, group.layer)

    def is_last(self, stage: int) -> bool:
        return stage == len(self.run.stages) - 1

    def adds_up(self, group: FsdpGroup) -> bool:
        """Whether a weight's new gradient is added to an earlier one at once; under FSDP if it needs no cast first."""
        if self.run.uses_copies:
            return group.name in self.shards and not self.run.compiles_model
        if self.run.uses_fsdp:
            return (self.run.sums_at_once or self.run.compute_bytes == FP32) and group.name in self.added_up
        return group.name in self.shards
