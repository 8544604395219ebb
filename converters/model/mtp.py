"""Layers for multi-token prediction: count them in a checkpoint, and leave them out.

They stand behind the layers of the model and predict tokens further ahead (arXiv 2412.19437, section 2.2). A model
computes the same without them; speculative decoding uses them. Natively they are `mtp_layers.0`, … as in torchtitan.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from converters.common.errors import CheckpointError, list_offenders
from converters.families.args import ModelArgs
from converters.families.base import Family, Naming
from converters.families.rules import Drop
from converters.views.compare import first_difference
from converters.views.view import View

MTP_REASON = "of a layer for multi-token prediction, which the model computes without; --mtp keep keeps it"
_NUMBER = "num_mtp_layers"  # in the args of families that have such layers


def num_mtp_layers(names: Container[str], family: Family, naming: Naming, args: ModelArgs) -> int:
    """Number of such layers in a checkpoint of these tensors; its config may state layers that are not there."""
    count = 0
    while hasattr(args, _NUMBER):
        wider = family.naming_for(naming, with_mtp(args, count + 1))
        first = next((rule.foreign for rule in wider.rules if rule.native == f"mtp_layers.{count}.eh_proj.weight"), "")
        if first not in names:
            break
        count += 1
    return count


def require_stated(found: int, stated: int, *, where: str) -> None:
    """Raise CheckpointError if a checkpoint has some of the layers that its description states, but not all."""
    if 0 < found < stated:
        raise CheckpointError(
            f"{where}: {found} of {stated} layers for multi-token prediction are there",
            hint="the others are missing, or config.json states too many",
            tries=["--mtp drop", "--allow-missing"],
        )


def with_mtp(args: ModelArgs, count: int) -> ModelArgs:
    """The numbers of the same model with so many of these layers."""
    changed: dict[str, Any] = {_NUMBER: count}
    return replace(args, **changed) if hasattr(args, _NUMBER) else args


def without_mtp(family: Family, naming: Naming, args: ModelArgs, count: int) -> Naming:
    """A naming that drops `count` layers; tensors of the model that they repeat stay known."""
    wider = family.naming_for(naming, with_mtp(args, count))
    names = [rule.foreign for rule in wider.rules if rule.native.startswith("mtp_layers.") and rule.foreign]
    drops = (*naming.drops, *(Drop(name, MTP_REASON) for name in names))
    return replace(naming, drops=drops, repeats=wider.repeats)


def check_repeats(view: View, *, kept: bool, where: str) -> list[str]:
    """Compare a layer's copies of the model's tensors with them: remarks on those that differ.

    Raises CheckpointError if the layers are `kept`: the native form has one tensor for both. Reads both.
    """
    problems = [
        f"{name} is not {first}: {problem}"
        for name, fqn in view.ledger.repeated.items()
        for first in view.ledger.used.get(fqn, ())
        if (problem := first_difference(view.source, first, name))
    ]
    if problems and kept:
        raise CheckpointError(
            f"{where}: layers for multi-token prediction have other weights than the model, where they "
            "should share its:" + list_offenders(problems),
            hint="titan's native form has one of each; leave the layers out",
            tries=["--mtp drop"],
        )
    return [f"{problem}; it is left out with its layer" for problem in problems]


def describe_mtp(count: int, dropped: Mapping[str, str]) -> str:
    """A remark on the layers that a conversion leaves out; "" if there are none."""
    num_dropped = sum(reason == MTP_REASON for reason in dropped.values())
    if not num_dropped:
        return ""
    layers = "the layer" if count == 1 else f"{count} layers"
    return (
        f"{layers} for multi-token prediction ({num_dropped:,} tensors) {'is' if count == 1 else 'are'} left out: the "
        "model computes the same; --mtp keep keeps what speculative decoding needs"
    )
