"""The order in which a pipeline rank runs forwards and backwards. Torch-free; a test holds it equal to torch's."""

from dataclasses import dataclass
from typing import Literal

from converters.errors import UnsupportedError
from converters.layout import stages_of_rank


@dataclass(frozen=True, slots=True)
class Action:
    """One forward or (full) backward of a microbatch through a stage."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int


def actions_of_rank(schedule: str, *, pp_rank: int, pp: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What a rank does in a step, in time order. Raises UnsupportedError for a schedule that is not described here."""
    if schedule not in _ORDERS:
        raise UnsupportedError(
            f"no order of microbatches is known here for the pipeline schedule {schedule!r}",
            hint=f"covered: {', '.join(_ORDERS)}",
        )
    return _ORDERS[schedule](stages_of_rank(pp_rank, pp, num_stages), pp_rank, pp, num_microbatches)


def _gpipe(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards in the same order."""
    (stage,) = stages
    return [Action(kind, stage, mb) for kind in ("F", "B") for mb in range(num_microbatches)]


def _one_f_one_b(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """As many forwards as stages follow, this one included; then a backward before each further forward."""
    (stage,) = stages
    warmup = min(num_microbatches, pp - pp_rank)
    order = [Action("F", stage, mb) for mb in range(warmup)]
    for mb in range(num_microbatches):
        order.append(Action("B", stage, mb))
        if warmup + mb < num_microbatches:
            order.append(Action("F", stage, warmup + mb))
    return order


def _looped_bfs(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """Every microbatch through a stage before the next stage; backwards in mirror order."""
    forwards = [Action("F", stage, mb) for stage in stages for mb in range(num_microbatches)]
    return forwards + [Action("B", action.stage, action.microbatch) for action in reversed(forwards)]


def _interleaved(stages: list[int], pp_rank: int, pp: int, num_microbatches: int) -> list[Action]:
    """Interleaved 1F1B (arXiv 2104.04473): rounds of pp microbatches, stages in turn, a forward and then a backward."""
    rounds = max(1, num_microbatches // pp)
    assert num_microbatches % rounds == 0, "trainer/stages.py refuses such a config"
    per_round = num_microbatches // rounds
    num_actions = len(stages) * num_microbatches
    warmup = min((len(stages) - 1) * per_round + 2 * (pp - 1 - pp_rank), num_actions)
    forwards = _in_rounds("F", stages, per_round, num_actions)
    backwards = _in_rounds("B", stages[::-1], per_round, num_actions)
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[num_actions - warmup :]


def _in_rounds(kind: Literal["F", "B"], stages: list[int], per_round: int, num_actions: int) -> list[Action]:
    """The i-th action goes to the stage whose turn it is and takes that stage's next microbatch."""
    seen = dict.fromkeys(stages, 0)
    order = []
    for i in range(num_actions):
        stage = stages[(i // per_round) % len(stages)]
        order.append(Action(kind, stage, seen[stage]))
        seen[stage] += 1
    return order


_ORDERS = {"GPipe": _gpipe, "1F1B": _one_f_one_b, "Interleaved1F1B": _interleaved, "LoopedBFS": _looped_bfs}
