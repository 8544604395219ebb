"""Which parameter a block belongs to outside of the model: clipping and updates make tensors of parameters' own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor

from titan_tools.memory.trace.events import NO_LAYER, PER_PARAMETER, layer_of

if TYPE_CHECKING:
    from titan_tools.memory.trace.record.recorder import Recorder

PHASES = ("clip", "optimizer")  # in which tensors are made of parameters', gradients' and states'


def tell_owners(recorder: Recorder, args: Sequence[Any], made: Any) -> None:
    """What an operation has made of a parameter's tensor is its, too; of a list, each of each.

    What is stacked of many holds a number for each, and so does what is made of that element by element.
    """
    given = args[0] if args else None
    if isinstance(made, Tensor):
        if isinstance(given, Tensor):
            owner = _owner(recorder, given)
            if not owner.startswith(PER_PARAMETER) or made.numel() == given.numel():
                _own(recorder, made, owner)
        elif isinstance(given, (list, tuple)):
            _own(recorder, made, owner_of_list(recorder, given))
    elif isinstance(made, (list, tuple)) and isinstance(given, (list, tuple)) and len(made) == len(given):
        for one, source in zip(made, given, strict=True):
            if isinstance(one, Tensor) and isinstance(source, Tensor):
                _own(recorder, one, _owner(recorder, source))


def owner_of_list(recorder: Recorder, given: Sequence[Any]) -> str:
    """The owner of what holds as much for each tensor of an operation's list; "" where one has none."""
    owners = [_owner(recorder, one) for one in given if isinstance(one, Tensor)]
    return owner_of_many(owners, recorder.layers_of_parts) if owners and all(owners) else ""


def owner_of_many(fqns: Sequence[str], parts: Sequence[Set[int]]) -> str:
    """The owner of what holds a number for each: "*{outside of layers}+{per layer}"; "*" if layers have not as many.

    `parts`: the layers of each stage that the rank holds. Of the n-th one's alone: "*{outside}+{per layer}@{n}".
    """
    if any(fqn.startswith(PER_PARAMETER) for fqn in fqns):
        return PER_PARAMETER
    by_layer = Counter(map(layer_of, fqns))
    outside = by_layer.pop(NO_LAYER, 0)
    if not by_layer:
        return f"{PER_PARAMETER}{outside}+0"
    parts = [part for part in parts if part]
    if len(set(by_layer.values())) > 1:
        return PER_PARAMETER
    owner = f"{PER_PARAMETER}{outside}+{max(by_layer.values())}"
    if by_layer.keys() == set().union(*parts):
        return owner
    return f"{owner}@{parts.index(by_layer.keys())}" if by_layer.keys() in parts else PER_PARAMETER


def _owner(recorder: Recorder, tensor: Tensor) -> str:
    block = recorder.block_of(tensor)
    return block.owner if block else ""


def _own(recorder: Recorder, tensor: Tensor, owner: str) -> None:
    block = recorder.block_of(tensor)
    if block and not block.owner:
        block.owner = owner
