"""What one pipeline rank holds while a step goes on: an action at a time, the instants at which its peak can be.

An instant is a sum of named parts. What FSDP2, autograd and torch's pipeline stages keep at a moment is written here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from titan_tools.memory.constants import CUBLAS_HANDLES, MIB, Gpu
from titan_tools.memory.formula.activations import FP32, Activations, embedding_backward_bytes, keeps_whole_block
from titan_tools.memory.formula.holdings import Group
from titan_tools.memory.formula.loss import LossBytes, validation_loss_bytes
from titan_tools.memory.formula.optimizer import step_bytes
from titan_tools.memory.formula.run_shape import RunShape
from titan_tools.memory.parts import PARTS
from titan_tools.memory.schedules import Action


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
    """What one rank holds while the step goes on."""

    run: RunShape
    groups: dict[int, list[Group]]  # by stage
    sizes: Activations
    loss: LossBytes
    gpu: Gpu
    has_states: bool
    kept: dict[tuple[int, int], int] = field(default_factory=dict)  # activations by (stage, microbatch) in flight
    kept_loss: dict[tuple[int, int], int] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)  # bytes by group
    accumulated: dict[str, int] = field(default_factory=dict)  # gradients by group: shards; whole under a pipeline
    pending_reduce: int = 0  # the last reduce-scatter's input, held until the next one
    whole_gradients: int = 0  # of a group whose backward began and is not complete: the tied embedding's

    # --- what is always there

    def instant(self, when: str, **parts: int) -> Instant:
        """The moment's own parts on top of what the rank holds anyway."""
        local = 0 if self.run.is_offloaded else self._local_elements()
        held = {
            "parameters": local * self.run.param_bytes,
            "gradients": sum(self.accumulated.values()) + self.whole_gradients,
            "optimizer": local * self.run.state_bytes if self.has_states else 0,
            "activations": sum(self.kept.values()),
            "logits_and_loss": sum(self.kept_loss.values()),
            "all_gather": sum(self.gathered.values()),
            "reduce_scatter": self.pending_reduce,
            "pipeline_buffers": self._pipeline_buffers(),
            "workspaces": round(CUBLAS_HANDLES * self.gpu.cublas_mib * MIB),
        }
        total = {part: held.get(part, 0) + parts.get(part, 0) for part in PARTS}
        return Instant(when, {part: size for part, size in total.items() if size})

    def _local_elements(self) -> int:
        return sum(group.local_elements for stage in self.groups.values() for group in stage)

    def _pipeline_buffers(self) -> int:
        """Torch's stages receive into one buffer per microbatch and direction, made once and kept."""
        last = len(self.run.stages) - 1
        ends = sum((stage > 0) + (stage < last) for stage in self.groups)
        return ends * self.run.num_microbatches * self.sizes.stream

    # --- forward

    def forward(self, action: Action) -> Iterator[Instant]:
        """A microbatch goes through a stage: its activations stay, gathered parameters stay where FSDP keeps them."""
        run, groups = self.run, self.groups[action.stage]
        key = (action.stage, action.microbatch)
        self.kept[key] = self._kept_by_stage(action.stage)
        is_gathered_now = run.uses_fsdp and groups[-1].name not in self.gathered
        if run.uses_fsdp:
            self.gathered |= {g.name: g.full_elements * run.compute_bytes for g in groups if g.is_kept}
        if not self._is_last(action.stage):
            yield self.instant("end of forward")
            return
        self.kept[key] += self.sizes.hidden
        own = self.sizes.stream if run.mesh.tp > 1 else 0  # the normed stream before it was gathered
        gathered = 0
        if is_gathered_now and run.traits.loss_in_forward:  # and with it the flat result of the last all-gather
            is_early = "tok_embeddings" in groups[-1].name  # gathered with the embedding: the last one is a block's
            gathered = 0 if groups[-1].is_kept else groups[-1].full_elements * run.compute_bytes
            if run.mesh.fsdp > 1:
                gathered += groups[-2 if is_early else -1].full_elements * run.compute_bytes
        for when, size in self.loss.forward:
            yield self.instant(when, activations=own, logits_and_loss=size, all_gather=gathered)
        self.kept_loss[key] = self.loss.kept
        self.kept[key] -= 0 if self.loss.keeps_hidden else self.sizes.hidden

    def _kept_by_stage(self, stage: int) -> int:
        modules = self.run.stages[stage]
        stream = self.sizes.stream
        kept = self.sizes.turns + sum(self.sizes.kept[layer] for layer in _layers(modules))
        kept += self.sizes.final_norm if "norm" in modules else 0
        kept += sum(self._casts(g) for g in self.groups[stage] if self._is_kept_whole(g))
        if stage > 0:
            kept -= stream  # the first block's input is the receive buffer
        if not self._is_last(stage):
            kept += stream  # the stage's output, kept until its backward
        return kept

    def _casts(self, group: Group) -> int:
        """Bytes of the copies of a group's weights that its products keep in the compute dtype, if FSDP makes none."""
        return group.full_elements * self.run.compute_bytes if self.run.casts_weights else 0

    def _is_kept_whole(self, group: Group) -> bool:
        layer = _layer_of(group)
        return layer is not None and keeps_whole_block(self.run, layer)

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.run.stages) - 1

    # --- backward

    def backward(self, action: Action) -> Iterator[Instant]:
        """A microbatch goes back through a stage: loss, output, blocks from the last to the first, embedding."""
        groups, key = self.groups[action.stage], (action.stage, action.microbatch)
        if self._is_last(action.stage):
            yield from self._backward_of_loss(key, groups)
        blocks = [(position, _layer_of(group)) for position, group in enumerate(groups) if _layer_of(group) is not None]
        for position, layer in reversed(blocks):
            which = "the last" if layer == blocks[-1][1] else "the first" if layer == blocks[0][1] else "a middle"
            gathered = self._gathered_in_backward(groups, position)
            when = f"backward of {which} block"
            group, casts = groups[position], self._casts(groups[position])
            is_kept = self._is_kept_whole(group)
            for moment in self.sizes.backward[layer]:
                yield self.instant(
                    when,
                    activations=-moment.released,
                    recompute=moment.recompute + (0 if is_kept else casts),
                    gradients=moment.gradients,
                    all_gather=gathered,
                    workspaces=moment.workspaces,
                )
            self.kept[key] -= self.sizes.kept[layer] + (casts if is_kept else 0)
            yield self.instant(
                f"end of the backward of {which} block",
                recompute=2 * self.sizes.stream,  # its input and the gradient of that
                gradients=0 if self._adds_up(group) else group.full_elements * self.run.gradient_bytes,
                all_gather=gathered,
            )
            yield from self._reduce(group, "a block")
        self.kept.pop(key)
        for group in groups:
            if "tok_embeddings" in group.name:
                if self.run.mesh.tp > 1:
                    yield from self._backward_of_split_embedding(group)
                self.whole_gradients = 0
                yield from self._reduce(group, "the embedding")
        self.pending_reduce = 0  # FSDP2 waits for the last reduce-scatter at the end of each backward

    def _backward_of_split_embedding(self, group: Group) -> Iterator[Instant]:
        """Under TP the gradient of all ranks' stream is gathered and copied, without the tokens of other ranks' rows.

        The copy is there while the kernel sorts tokens.
        """
        whole, own = self.run.mesh.tp * self.sizes.stream, group.full_elements * self.run.gradient_bytes
        gathered = own if self.run.uses_fsdp and group.name not in self.gathered else 0
        yield self.instant("backward of the embedding", recompute=2 * whole, all_gather=gathered)
        yield self.instant(
            "backward of the embedding",
            gradients=own,
            recompute=whole,
            all_gather=gathered,
            workspaces=embedding_backward_bytes(self.run),
        )

    def _backward_of_loss(self, key: tuple[int, int], groups: list[Group]) -> Iterator[Instant]:
        """Cross entropy, then the output's products, whose gradients wait where the embedding shares the group."""
        run, ends = self.run, groups[-1]
        gathered = self._gathered_in_backward(groups, len(groups) - 1)
        del self.kept_loss[key]
        for when, size in self.loss.backward:
            yield self.instant(when, logits_and_loss=size, all_gather=gathered if run.loss_chunks else 0)
        self.whole_gradients = ends.full_elements * run.gradient_bytes
        yield self.instant("backward of the output", logits_and_loss=self.loss.output_backward, all_gather=gathered)
        self.kept[key] -= self.sizes.final_norm + (self.sizes.hidden if self.loss.keeps_hidden else 0)
        if "tok_embeddings" not in ends.name:
            self.whole_gradients = 0
            yield from self._reduce(ends, "the output")

    def _gathered_in_backward(self, groups: list[Group], position: int) -> int:
        """Besides what is kept: the group whose backward runs, and the flat all-gather result of the one before it.

        That only where there is something to gather: over one rank FSDP2 copies a group when its turn comes.
        """
        if not self.run.uses_fsdp:
            return 0
        first = max(position - 1, 0) if self.run.mesh.fsdp > 1 else position
        wanted = groups[first : position + 1]
        return sum(g.full_elements * self.run.compute_bytes for g in wanted if g.name not in self.gathered)

    def _reduce(self, group: Group, what: str) -> Iterator[Instant]:
        """A group's gradients are complete for this microbatch: reduced, or added up where that comes later."""
        run = self.run
        whole = group.full_elements * run.compute_bytes
        if not run.uses_fsdp:
            made = self._beside_the_embeddings(group) if "tok_embeddings" in group.name else 0
            self.accumulated[group.name] = group.full_elements * run.param_bytes
            yield self.instant(f"gradients of {what}", gradients=made)
        elif run.uses_pipeline:  # torch's stages reduce once, after the last microbatch: till then whole fp32 gradients
            is_embedding = group.name == "tok_embeddings" and group.name in self.accumulated
            made_within = embedding_backward_bytes(run) if is_embedding else 0  # a first sum comes after the kernel
            self.accumulated[group.name] = group.full_elements * FP32
            self.gathered[group.name] = whole
            yield self.instant(f"gradients of {what} added up", gradients=whole, workspaces=made_within)
        else:
            yield from self._reduce_scatter(group, what, whole=whole)

    def _beside_the_embeddings(self, group: Group) -> int:
        """Without FSDP: what the embedding's gradient is made from, by a cast or by the sum with a tied output's."""
        size = group.full_elements * self.run.param_bytes
        cast = group.full_elements * self.run.compute_bytes if self.run.casts_weights else 0
        return cast + size * (self.run.args.tied + self._adds_up(group))

    def _reduce_scatter(self, group: Group, what: str, *, whole: int) -> Iterator[Instant]:
        """FSDP2 lets go of the previous input just before it makes this one's; then `whole` gradients, for the result.

        Over one rank there is no collective: the result is filled with a scaled copy of the input.
        """
        self.pending_reduce = group.full_elements * FP32
        self.gathered.pop(group.name, None)
        yield self.instant(f"gradients of {what} reduced", gradients=whole)
        scaled = self.pending_reduce if self.run.mesh.fsdp == 1 else 0
        # foreach_reduce's loop over parameters, on several ranks, still names the last gradient: a block's is a norm's
        named_last = whole if self.run.mesh.fsdp > 1 and _layer_of(group) is None else 0
        made = group.local_elements * FP32 + named_last
        yield self.instant(f"gradients of {what} reduced", gradients=made, reduce_scatter=scaled)
        self.accumulated[group.name] = 0 if self.run.is_offloaded else group.local_elements * self.run.param_bytes

    def _adds_up(self, group: Group) -> bool:
        """Whether a weight's new gradient goes into one of an earlier pass at once, as it does without FSDP."""
        return not self.run.uses_fsdp and group.name in self.accumulated

    def reduce_after_pipeline(self) -> Iterator[Instant]:
        """The one reduction of a pipeline step: group by group, whole fp32 gradients become shards."""
        for group in (group for stage in self.groups.values() for group in stage):
            whole = self.accumulated.pop(group.name)
            yield from self._reduce_scatter(group, "the pipeline step", whole=whole)
        self.pending_reduce = 0

    # --- after backward

    def optimizer_step(self) -> Instant:
        """All gradients and, in step 1 too, all states, and what the step itself needs."""
        sizes = [size for stage in self.groups.values() for group in stage for size in group.local_sizes]
        return self.instant("optimizer step", optimizer=self._states() + step_bytes(self.run, sizes))

    def _states(self) -> int:
        """Optimizer states that this step made: none where they were there already."""
        is_made = not self.has_states and not self.run.is_offloaded
        return self._local_elements() * self.run.state_bytes if is_made else 0

    def validation(self) -> Instant:
        """A forward without gradients, after a step: gathered parameters and the loss of one batch."""
        run = self.run
        self.accumulated.clear()
        groups = [group.full_elements * run.compute_bytes for stage in self.groups.values() for group in stage]
        all_gather = 0 if not run.uses_fsdp else 3 * max(groups) if run.reshard_after_forward else sum(groups)
        loss = validation_loss_bytes(run) if self._is_last(max(self.groups)) else 0
        return self.instant("validation", logits_and_loss=loss, all_gather=all_gather, optimizer=self._states())


def _layers(modules: tuple[str, ...]) -> list[int]:
    return [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]


def _layer_of(group: Group) -> int | None:
    return int(group.name.removeprefix("layers.")) if group.name.startswith("layers.") else None
