"""Split a model into pipeline stages, assign them to ranks, and check schedules. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from converters.common.errors import ConfigError
from converters.families.parameters import is_block
from converters.layout.stages import ranks_of_stages, split_stages
from trainer.config.sections import Parallelism, Training

LOOPED_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # several stages per rank
V_SCHEDULES = ("ZBVZeroBubble",)  # two stages per rank, the second in reverse order
SPLIT_BACKWARD_SCHEDULES = (
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
)  # inputs' gradients first, weights' later
_ROUND_SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble")  # need equal rounds of microbatches


@dataclass(frozen=True, slots=True)
class StageSplit:
    """Names of the units of every stage, first to last, and the pipeline rank of each."""

    modules: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.modules)

    @property
    def first_and_last_on_one_rank(self) -> bool:
        """Whether one pipeline rank holds the first and the last stage."""
        return self.ranks[0] == self.ranks[-1]

    def stages_of(self, pp_rank: int) -> list[int]:
        return [stage for stage, rank in enumerate(self.ranks) if rank == pp_rank]


def schedule_of(parallelism: Parallelism, *, num_microbatches: int, pp: int) -> str:
    """The schedule that runs: GPipe for 1F1B with fewer microbatches than ranks, which torch's 1F1B does not take.

    Few ranks of it would begin a backward before the last forward.
    """
    schedule = parallelism.pipeline_parallel_schedule
    return "GPipe" if schedule == "1F1B" and num_microbatches < pp else schedule


def split_model(parallelism: Parallelism, units: Sequence[str], pp: int) -> StageSplit:
    """The stages of a model's `units` that the config sets. Raises ConfigError if they cannot be split this way."""
    explicit = parallelism.module_fqns_per_model_part
    modules: Sequence[Sequence[str]]
    if pp == 1:
        modules = split_stages(1, units)
    elif explicit is not None:
        modules = explicit
    else:
        modules = split_stages(
            _num_stages(parallelism, units, pp),
            units,
            first_less=parallelism.pipeline_parallel_first_stage_less_layers,
            last_less=parallelism.pipeline_parallel_last_stage_less_layers,
        )
    v_shaped = parallelism.pipeline_parallel_schedule in V_SCHEDULES
    return StageSplit(tuple(map(tuple, modules)), ranks_of_stages(len(modules), pp, v_shaped=v_shaped))


def _num_stages(parallelism: Parallelism, units: Sequence[str], pp: int) -> int:
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is None:
        return _default_num_stages(parallelism.pipeline_parallel_schedule, pp)
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    return ceil((_num_blocks(units) + first + last) / per_stage)


def _num_blocks(units: Sequence[str]) -> int:
    return sum(map(is_block, units))


def stage_problems(parallelism: Parallelism, training: Training, units: Sequence[str], pp: int) -> list[str]:
    """All problems of stages, schedule and microbatches."""
    return [
        *_split_problems(parallelism, units, pp),
        *_microbatch_problems(parallelism, training, pp),
        *_reshard_problems(parallelism),
    ]


def _split_problems(parallelism: Parallelism, units: Sequence[str], pp: int) -> list[str]:
    try:
        split = split_model(parallelism, units, pp)
    except ConfigError as error:
        return [f"{error.message} ({error.hint})"]
    problems = []
    if parallelism.module_fqns_per_model_part is not None:
        problems += _explicit_problems(split, units)
    schedule, num_stages = parallelism.pipeline_parallel_schedule, split.num_stages
    if not _supports(schedule, num_stages, pp):
        wanted = f"{2 * pp}, {3 * pp}, …" if schedule in LOOPED_SCHEDULES else f"{_default_num_stages(schedule, pp)}"
        text = f"schedule {schedule} on {pp} pipeline ranks needs {wanted} stages, the split has {num_stages}"
        problems.append(text + _nearest_layers_per_stage(parallelism, units, pp))
    return problems


def _supports(schedule: str, num_stages: int, pp: int) -> bool:
    if schedule in LOOPED_SCHEDULES:
        return num_stages % pp == 0 and num_stages > pp
    return num_stages == _default_num_stages(schedule, pp)


def _default_num_stages(schedule: str, pp: int) -> int:
    return 2 * pp if schedule in LOOPED_SCHEDULES + V_SCHEDULES else pp


def _nearest_layers_per_stage(parallelism: Parallelism, units: Sequence[str], pp: int) -> str:
    """The nearest layers per stage that give a number of stages that the schedule supports, as text."""
    wanted = parallelism.pipeline_parallel_layers_per_stage
    if wanted is None or parallelism.module_fqns_per_model_part is not None:
        return ""
    fitting = []
    for per_stage in range(1, 2 * _num_blocks(units)):
        changed = replace(parallelism, pipeline_parallel_layers_per_stage=per_stage)
        try:
            if _supports(parallelism.pipeline_parallel_schedule, split_model(changed, units, pp).num_stages, pp):
                fitting.append(per_stage)
        except ConfigError:
            continue  # more stages than layers
    near = [n for n in fitting if n < wanted][-1:] + [n for n in fitting if n > wanted][:1]
    return f"; pipeline_parallel_layers_per_stage = {' or '.join(map(str, near))} would work" if near else ""


def _explicit_problems(split: StageSplit, units: Sequence[str]) -> list[str]:
    wanted = list(units)
    given = [name for modules in split.modules for name in modules]
    if given == wanted:
        return []
    faults = {
        "unknown": [name for name in given if name not in wanted],
        "missing": [name for name in wanted if name not in given],
        "given twice": sorted({name for name in given if given.count(name) > 1}),
    }
    text = "; ".join(f"{what}: {', '.join(names)}" for what, names in faults.items() if names)
    return [f"parallelism.module_fqns_per_model_part: {text or 'modules are not in model order'}"]


def _microbatch_problems(parallelism: Parallelism, training: Training, pp: int) -> list[str]:
    size, batch = parallelism.pipeline_parallel_microbatch_size, training.local_batch_size
    if batch % size:
        sizes = [s for s in range(1, batch + 1) if batch % s == 0]
        return [
            f"parallelism.pipeline_parallel_microbatch_size = {size} does not divide"
            f" training.local_batch_size = {batch}; possible: {', '.join(map(str, sizes))}"
        ]
    count, schedule = batch // size, parallelism.pipeline_parallel_schedule
    if schedule in _ROUND_SCHEDULES and not _in_equal_rounds(count, pp):
        below = next(n for n in range(count, 0, -1) if _in_equal_rounds(n, pp))
        above = next(n for n in itertools.count(count) if _in_equal_rounds(n, pp))
        return [
            f"schedule {schedule} cannot divide {count} microbatches over {pp} ranks in equal rounds; {below} or"
            f" {above} would work: training.local_batch_size = {below * size} or {above * size}"
        ]
    return []


def _in_equal_rounds(count: int, pp: int) -> bool:
    """Whether torch supports this number of microbatches: rounds of equal size, at least pp."""
    return count % max(1, count // pp) == 0


def _reshard_problems(parallelism: Parallelism) -> list[str]:
    schedule, reshard = parallelism.pipeline_parallel_schedule, parallelism.fsdp_reshard_after_forward
    if schedule not in SPLIT_BACKWARD_SCHEDULES or reshard != "always":
        return []
    return [
        f"schedule {schedule} computes gradients of weights after later microbatches' forwards, where"
        ' parallelism.fsdp_reshard_after_forward = "always" has resharded them: those gradients would be lost; use'
        ' "default" or "never"'
    ]


def schedule_machine_problems(parallelism: Parallelism) -> list[str]:
    """Versions of torch that compute a split backward wrongly."""
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_degree == 1 or schedule not in SPLIT_BACKWARD_SCHEDULES:
        return []
    import torch

    version: Any = torch.__version__  # a TorchVersion, which compares with tuples
    if version >= (2, 13):
        return []
    return [
        f"schedule {schedule} needs torch 2.13, this is {version}: before, gradients of weights of an operation"
        " with several results are wrong (pytorch#170277), and those of weights used twice are counted twice"
        " (pytorch#180952); nearest: Interleaved1F1B"
    ]
