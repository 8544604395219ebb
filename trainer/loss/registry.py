"""The losses: `chunked`, `plain`, and those that a user's module registers. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from converters.common.extensions import check_call, check_name
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Parallelism
from trainer.parallel.stages import SPLIT_BACKWARD_SCHEDULES

if TYPE_CHECKING:
    from torch import Tensor

CHUNKED, PLAIN = "chunked", "plain"
# Schedules that run all forward passes before the first backward: there the chunks are computed in backward
ALL_FORWARD_FIRST = ("GPipe", "LoopedBFS")


@dataclass(frozen=True, slots=True)
class RegisteredLoss:
    loss_sum: "Callable[..., Tensor]"
    takes_columns: bool


_REGISTERED: dict[str, RegisteredLoss] = {}


def register_loss(name: str, loss_sum: "Callable[..., Tensor]", *, takes_columns: bool = False) -> None:
    """Make `training.loss = name` compute `loss_sum(logits_BLV, targets_BL)`: the summed loss, fp32, of whole logits.

    It is a sum over tokens, without targets equal to `trainer.data.batch.IGNORED`; the trainer divides it by the valid
    tokens of the whole step. With `takes_columns` it also works with loss parallelism: it is called as
    `loss_sum(logits_BLV, targets_BL, group=group)`, the logits are this rank's even share of the vocabulary in rank
    order, and it returns the whole loss on every rank of `group`. Without tensor parallelism there is no `group`.
    """
    check_name("loss", name, loss_names())
    check_call(loss_sum, ("logits", "targets"), f"loss {name!r}", named=("group",) if takes_columns else ())
    _REGISTERED[name] = RegisteredLoss(loss_sum, takes_columns)


def get_loss(name: str) -> RegisteredLoss:
    return _REGISTERED[name]


def loss_names() -> tuple[str, ...]:
    return CHUNKED, PLAIN, *_REGISTERED


def num_loss_chunks(wanted: int, *, num_tokens: int, num_columns: int, is_compiled: bool) -> int:
    """The chunks of a forward pass; `wanted` = 0 chooses by the size of the logits [num_tokens, num_columns].

    As few as possible: each chunk computes a gradient of the output, and adds it up. Of 16,384 tokens and 128,256
    columns 2 chunks if the loss is compiled, else 8: at most 4 GiB and 1 GiB of logits if they were in fp32. A compiled
    loss, which has no fp32 logits, takes 4 to 6 bytes for each logit of a chunk, another one 12. Equal chunks of a
    multiple of 16 tokens, which float8 needs, if twice as many make that possible.
    """
    if wanted:
        return wanted
    most_tokens = max((4 if is_compiled else 1) * 2**30 // (4 * num_columns), 1)
    fewest = ceil(num_tokens / most_tokens)
    return next((n for n in range(fewest, 2 * fewest + 1) if num_tokens % (16 * n) == 0), fewest)


def is_loss_parallel(parallelism: Parallelism, dims: MeshShape) -> bool:
    """Whether the loss is computed on vocabulary shards."""
    return dims.tp > 1 and not parallelism.disable_loss_parallel


def loss_problems(
    name: str, dims: MeshShape, *, is_loss_parallel: bool, compiles_loss: bool, schedule: str
) -> list[str]:
    """An unknown loss, one that needs whole logits, or one that cannot be compiled under this pipeline schedule."""
    if name not in loss_names():
        return [
            f"training.loss = {name!r} does not exist; there are {', '.join(loss_names())},"
            " and what a module in experimental.custom_import registers"
        ]
    problems = []
    if is_loss_parallel and name in _REGISTERED and not _REGISTERED[name].takes_columns:
        problems.append(
            f"training.loss = {name!r} takes whole logits, but tensor parallelism leaves each of {dims.tp} ranks its"
            " share of the vocabulary; set parallelism.disable_loss_parallel, or register it with takes_columns"
        )
    if name != CHUNKED and compiles_loss and dims.pp > 1 and schedule in SPLIT_BACKWARD_SCHEDULES:
        problems.append(
            f"schedule {schedule} runs the loss's backward twice, which a compiled loss only supports if it is"
            f' {CHUNKED!r}; set training.loss = "{CHUNKED}", or compile.components = []'
        )
    return problems
