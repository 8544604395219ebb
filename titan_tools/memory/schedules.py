"""The order in which a pipeline rank runs forwards and backwards. Torch-free; a test compares it with torch's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from converters.errors import UnsupportedError
from converters.layout import stages_of_rank
from trainer.parallel.stages import V_SCHEDULES

_MOST_GATHERED = 3  # gathered stages of a rank: torch's `max_active_stages`, 2.11 to 2.13

Kind = Literal["F", "B", "I", "W", "gather", "reshard", "reduce"]


@dataclass(frozen=True, slots=True)
class Action:
    """An action of a rank on one of its stages.

    F, B: forward and full backward of a microbatch; I, W: backward's gradients of inputs, then those of weights. The
    others are FSDP's, for a stage as a whole: gather it, reshard it, reduce its gradients.
    """

    kind: Kind
    stage: int
    microbatch: int = -1  # -1: none


def actions_of_rank(schedule: str, *, pp_rank: int, pp: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What a rank computes in a step, in time order. Raises UnsupportedError for an unknown schedule."""
    if schedule not in _ORDERS:
        raise UnsupportedError(
            f"the order of microbatches in the pipeline schedule {schedule!r} is not known",
            hint=f"covered: {', '.join(_ORDERS)}",
        )
    stages = stages_of_rank(pp_rank, pp, num_stages, v_shaped=schedule in V_SCHEDULES)
    return _ORDERS[schedule](stages, pp_rank, pp, num_microbatches)


def with_sharding(actions: Sequence[Action], schedule: str) -> list[Action]:
    """The same with FSDP's actions on whole stages.

    A schedule of several stages per rank gathers the next stages and reshards others (torch's `_add_unshard_reshard`);
    with a single stage the layers do that themselves. Each stage is reduced after its last backward
    (`_add_reduce_grad`).
    """
    last = {action.stage: at for at, action in enumerate(actions) if action.kind in ("B", "W")}
    gathered: list[int] = []
    order: list[Action] = []
    for at, action in enumerate(actions):
        if schedule not in _OF_ONE_STAGE:
            wanted = list(dict.fromkeys(other.stage for other in actions[at:]))[:_MOST_GATHERED]
            order += [Action("reshard", stage) for stage in gathered if stage not in wanted]
            order += [Action("gather", stage) for stage in wanted if stage not in gathered]
            gathered = [s for s in gathered if s in wanted] + [s for s in wanted if s not in gathered]
        order.append(action)
        if last[action.stage] == at:
            order.append(Action("reduce", action.stage))
    return order + [Action("reshard", stage) for stage in gathered]


def _gpipe(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards in the same order."""
    (stage,) = stages
    return [Action(kind, stage, mb) for kind in ("F", "B") for mb in range(num_microbatches)]


def _one_f_one_b(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """As many forwards as there are stages from this one on; then a backward before each further forward."""
    (stage,) = stages
    warmup = min(num_microbatches, pp - pp_rank)
    order = [Action("F", stage, mb) for mb in range(warmup)]
    for mb in range(num_microbatches):
        order.append(Action("B", stage, mb))
        if warmup + mb < num_microbatches:
            order.append(Action("F", stage, warmup + mb))
    return order


def _looped_bfs(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """Every microbatch through a stage before the next stage; backwards in reverse order."""
    forwards = [Action("F", stage, mb) for stage in stages for mb in range(num_microbatches)]
    return forwards + [Action("B", action.stage, action.microbatch) for action in reversed(forwards)]


def _interleaved(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """Interleaved 1F1B (arXiv 2104.04473): rounds of pp microbatches, stages in turn, a forward and then a backward."""
    forwards, backwards, per_round = _in_rounds("B", stages, pp, num_microbatches)
    warmup = min((len(stages) - 1) * per_round + 2 * (pp - 1 - pp_rank), len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]


def _interleaved_zero_bubble(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """ZB1P (arXiv 2401.10241) over several stages: half the warm-up; weights follow their inputs `pp_rank` later."""
    forwards, backwards, per_round = _in_rounds("I", stages, pp, num_microbatches)
    warmup = min((len(stages) - 1) * per_round + pp - 1 - pp_rank, len(forwards))
    weights = [Action("W", action.stage, action.microbatch) for action in backwards]
    order = forwards[:warmup]
    for at, backward in enumerate(backwards):
        order += [*forwards[warmup + at : warmup + at + 1], backward]
        order += weights[at - pp_rank : at - pp_rank + 1] if at >= pp_rank else []
    return order + weights[max(len(weights) - pp_rank, 0) :]


def _in_rounds(
    backward: Literal["B", "I"], stages: list[int], pp: int, num_microbatches: int
) -> tuple[list[Action], list[Action], int]:
    """Forwards, backwards and the length of a round.

    The i-th action is on the next stage in turn, with that stage's next microbatch.
    """
    rounds = max(1, num_microbatches // pp)
    assert num_microbatches % rounds == 0, "trainer/stages.py refuses such a config"
    per_round = num_microbatches // rounds

    def in_turn(kind: Literal["F", "B", "I"], stages: list[int]) -> list[Action]:
        seen = dict.fromkeys(stages, 0)
        order = []
        for i in range(len(stages) * num_microbatches):
            stage = stages[(i // per_round) % len(stages)]
            order.append(Action(kind, stage, seen[stage]))
            seen[stage] += 1
        return order

    return in_turn("F", stages), in_turn(backward, stages[::-1]), per_round


def _zbv_zero_bubble(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """ZB-V (arXiv 2401.10241, section 6): down through a rank's first stage, back up through its second.

    The order is made for at least 2·pp − 1 microbatches; those that do not exist are left out.
    """
    down, up = stages
    laid_out = max(2 * pp - 1, num_microbatches)
    order: list[Action] = []
    done: Counter[tuple[str, int]] = Counter()

    def act(kinds: Sequence[Kind], stage: int) -> None:
        for kind in kinds:
            order.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (pp - pp_rank) - 1):
        act(["F"], down)
    for _ in range(pp_rank):
        act(["F"], up)
        act(["F"], down)
    for _ in range(pp - pp_rank):
        act(("F", "I", "W"), up)
    while done["F", up] < done["F", down] or done["F", down] < laid_out:
        if done["F", down] < laid_out:
            act(["F"], down)
        act(("I", "W"), down)
        act(("F", "I", "W"), up)
    for _ in range(pp_rank):
        act(["I"], down)
        act(["I"], up)
    for _ in range(pp - pp_rank):
        act(("I", "W"), down)
    for stage in (up, down):
        act(["W"] * (done["I", stage] - done["W", stage]), stage)
    return [action for action in order if action.microbatch < num_microbatches]


_ORDERS = {
    "GPipe": _gpipe,
    "1F1B": _one_f_one_b,
    "Interleaved1F1B": _interleaved,
    "LoopedBFS": _looped_bfs,
    "InterleavedZeroBubble": _interleaved_zero_bubble,
    "ZBVZeroBubble": _zbv_zero_bubble,
}
_OF_ONE_STAGE = ("GPipe", "1F1B")
