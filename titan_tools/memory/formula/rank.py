"""What one pipeline rank holds at a moment of a step: the sum that every instant of the closed form is.

How it changes is written where it happens: forward.py, backward.py, split_backward.py, reduction.py and update.py.
"""

from dataclasses import dataclass, field

from titan_tools.memory.constants import CUBLAS_HANDLES, MIB, Gpu
from titan_tools.memory.formula.activations import Activations, keeps_whole_block
from titan_tools.memory.formula.float8 import gathered_bytes
from titan_tools.memory.formula.holdings import Group
from titan_tools.memory.formula.loss import LossBytes
from titan_tools.memory.formula.run_shape import FP32, RunShape
from titan_tools.memory.parts import PARTS

Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment of the step and the bytes of each part of PARTS that is not zero."""

    when: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(slots=True)
class Rank:
    """What one rank holds while the step goes on, in bytes."""

    run: RunShape
    groups: dict[int, list[Group]]  # by stage
    sizes: Activations
    loss: LossBytes
    gpu: Gpu
    has_states: bool
    kept: dict[Key, int] = field(default_factory=dict)  # activations in flight
    kept_loss: dict[Key, int] = field(default_factory=dict)
    waiting: dict[Key, int] = field(default_factory=dict)  # gradients of activations, for those of weights
    of_inputs: dict[Key, int] = field(default_factory=dict)  # a split backward's results, which torch names all step
    gathered: dict[str, int] = field(default_factory=dict)  # by group
    gathering: dict[str, int] = field(default_factory=dict)  # by group: flat, before they are copied out of it
    shards: dict[str, int] = field(default_factory=dict)  # gradients by group, as the optimizer takes them
    added_up: dict[str, int] = field(default_factory=dict)  # gradients by group: whole, of a pipeline's microbatches
    all_reduced: dict[str, int] = field(default_factory=dict)  # by group: fp32 shards that are not the gradients
    pending_reduce: int = 0  # the last reduce-scatter's input, held until the next one
    whole_gradients: int = 0  # of a group whose backward began and is not complete: the tied embedding's
    local_elements: int = field(init=False)  # of this rank's shards of all parameters

    def __post_init__(self) -> None:
        self.local_elements = sum(group.local_elements for group in self.all_groups())

    def instant(self, when: str, **parts: int) -> Instant:
        """The moment's own parts on top of what the rank holds anyway."""
        local = 0 if self.run.is_offloaded else self.local_elements
        gradients = (self.shards, self.added_up, self.all_reduced)
        held = {
            "parameters": local * self.run.param_bytes,
            "gradients": sum(sum(sizes.values()) for sizes in gradients) + self.whole_gradients,
            "optimizer": local * self.run.state_bytes if self.has_states else 0,
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

    def all_groups(self) -> list[Group]:
        return [group for stage in self.groups.values() for group in stage]

    def _pipeline_buffers(self) -> int:
        """Torch's stages receive into one buffer per microbatch and direction, made once and kept.

        What a stage hands to the next one on the same rank takes such a buffer's place, until the next step.
        """
        last = len(self.run.stages) - 1
        ends = sum((stage > 0) + (stage < last) for stage in self.groups)
        return ends * self.run.num_microbatches * self.sizes.stream

    def gathered_bytes(self, group: Group) -> int:
        """Of a group's parameters as FSDP gathers them."""
        return gathered_bytes(self.run, group.name, group.full_elements)

    def whole_bytes(self, group: Group) -> int:
        """Of a group's gradients before they are reduced, as backward leaves them under FSDP."""
        return group.full_elements * self.run.compute_bytes

    def casts(self, group: Group) -> int:
        """Bytes of the copies of a group's weights that its products keep in the compute dtype, if FSDP makes none."""
        return group.full_elements * self.run.compute_bytes if self.run.casts_weights else 0

    def is_kept_whole(self, group: Group) -> bool:
        """Whether a group is a block of which nothing is computed again."""
        return group.layer is not None and keeps_whole_block(self.run, group.layer)

    def is_last(self, stage: int) -> bool:
        return stage == len(self.run.stages) - 1

    def adds_up(self, group: Group) -> bool:
        """Whether a weight's new gradient goes into an earlier one at once: without FSDP, or what needs no cast."""
        if self.run.uses_fsdp:
            return self.run.compute_bytes == FP32 and group.name in self.added_up
        return group.name in self.shards
