"""What trained a checkpoint: torchtitan v0.2.2's models compute otherwise than published ones of some families."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from converters.errors import ConfigError
from converters.families.base import YarnRope
from converters.families.registry import get_family
from converters.names import MODEL_INFO
from converters.weights import NativeWeights

TITAN = "titan"  # or anything else that computes the published model
_BEYOND_ORIGINAL: Mapping[str, bool] = {"torchtitan-0.2.2": False, "torchtitan-0.2.2-yarn": True}
TRAINED_BY = (TITAN, *_BEYOND_ORIGINAL)
_TORCHTITANS = ("native", "titan_qkv_linear")  # namings


def apply_trained_by(weights: NativeWeights, trained_by: str | None) -> tuple[NativeWeights, list[str]]:
    """The weights with the numbers that describe what was trained, and remarks.

    Without `trained_by` the numbers stay, and a remark says where it matters. Raises ConfigError where it does not.
    """
    family, info = get_family(weights.info.family), weights.info
    is_torchtitans = weights.catalog.container in ("dcp", "torch") and weights.naming in _TORCHTITANS
    is_foreign = is_torchtitans and not (weights.catalog.root / MODEL_INFO).is_file()
    deviate = family.as_torchtitan_trained
    if deviate is None or not is_foreign:
        if trained_by is None:
            return weights, []
        raise ConfigError(
            f"--trained-by {trained_by}: {weights.catalog.place} "
            + (
                "is not a checkpoint of torchtitan"
                if deviate
                else f"is a {family.name}, which torchtitan computes alike"
            ),
            hint="it is for torchtitan's checkpoints of families whose model it computes otherwise; leave it out",
        )
    if trained_by is None:
        summary = deviate(info.args, beyond_original=False).summary
        return weights, [
            "WARNING: if torchtitan v0.2.2 trained it, the model computed otherwise than the published one, which the "
            f"output describes ({summary}; see docs/training.md): say "
            f"--trained-by {', '.join(TRAINED_BY[1:])} or {TITAN}"
        ]
    if trained_by == TITAN:
        return weights, []
    trained = deviate(info.args, beyond_original=_BEYOND_ORIGINAL[trained_by])
    args = trained.args
    changed = [
        f"{f.name} {_shown(getattr(info.args, f.name))}, now {_shown(getattr(args, f.name))}"
        for f in fields(args)
        if getattr(args, f.name) != getattr(info.args, f.name)
    ]
    remarks = [f"--trained-by {trained_by}: {', '.join(changed)}"] if changed else []
    if trained.unsaid:
        remarks.append(
            f"--trained-by {trained_by}: not in the output, which has no field for it: {'; '.join(trained.unsaid)}"
        )
    return replace(weights, info=replace(info, args=args)), remarks


def _shown(value: Any) -> str:
    return f"yarn with an mscale of {value.mscale}" if isinstance(value, YarnRope) else str(value).lower()
