"""What one rank holds for good (parameter shards), and what FSDP gathers at a time: exact counts from the layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from converters.families.base import Parameter
from converters.layout import local_box, module_of
from titan_tools.memory.formula.run_shape import RunShape


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters that FSDP gathers and reduces together. Elements, not bytes: the dtype depends on the moment."""

    name: str
    local_sizes: tuple[int, ...]  # elements of this rank's shard of each parameter
    full_sizes: tuple[int, ...]  # gathered over FSDP, still cut by TP
    is_kept: bool  # stays gathered from forward to backward

    @property
    def layer(self) -> int | None:
        """The number of the block that it is."""
        return int(self.name.removeprefix("layers.")) if self.name.startswith("layers.") else None

    @property
    def full_elements(self) -> int:
        """Of all of its parameters, gathered."""
        return sum(self.full_sizes)

    @property
    def local_elements(self) -> int:
        """Of this rank's shards together."""
        return sum(self.local_sizes)


def groups_of_stage(run: RunShape, stage: int) -> list[Group]:
    """The FSDP groups of a stage in forward order: tok_embeddings, each block, norm with output.

    As trainer/parallel/fsdp.py wraps them: a tied embedding shares one group with norm and output. Shards are those of
    the rank at coordinate 0 of each axis, which holds the largest part where a division leaves a remainder.
    """
    held = _parameters_by_module(run, stage)
    modules = list(held)
    last_block = [m for m in modules if m.startswith("layers.")][-1:]
    ends = [m for m in ("norm", "output") if m in modules]
    if "tok_embeddings" in modules and ends and (run.traits.embeddings_with_root or run.args.tied):
        ends.insert(0, "tok_embeddings")
    members = [[m] for m in modules if m not in ends] + ([ends] if ends else [])
    groups = []
    for group in members:
        parameters = [p for m in group for p in held[m]]
        is_kept = not (run.reshard_output if group is ends else run.reshard_after_forward)
        groups.append(
            Group(
                name="+".join(group),
                local_sizes=_held(run, parameters, fsdp=run.mesh.fsdp),
                full_sizes=_held(run, parameters, fsdp=1),
                is_kept=is_kept or (run.traits.last_block_kept and group == last_block),
            )
        )
    return groups


def _parameters_by_module(run: RunShape, stage: int) -> dict[str, list[Parameter]]:
    """A stage's modules in order with their parameters.

    A tied output has none of its own beside the embedding, but a copy of the embedding's where that is another stage's.
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


def _held(run: RunShape, parameters: Sequence[Parameter], *, fsdp: int) -> tuple[int, ...]:
    mesh = replace(run.mesh, pp=1, dp_replicate=1, dp_shard=fsdp, cp=1)
    boxes = (local_box(p, mesh, rank=0) for p in parameters)
    return tuple(box.num_elements for box in boxes if box)
