"""What trained a checkpoint: torchtitan v0.2.2's models compute otherwise than published ones of some families."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from converters.common.errors import ConfigError
from converters.common.names import MODEL_INFO
from converters.containers.registry import CONTAINERS
from converters.families.registry import get_family
from converters.families.rope import YarnRope
from converters.model.model_info import ModelInfo
from converters.source.weights import NativeWeights
from converters.views.catalog import Catalog

TITAN = "titan"  # or anything else that computes the published model
_BEYOND_ORIGINAL: Mapping[str, bool] = {"torchtitan-0.2.2": False, "torchtitan-0.2.2-yarn": True}
TRAINED_BY = (TITAN, *_BEYOND_ORIGINAL)
_TORCHTITANS = ("native", "titan_qkv_linear")  # namings


def foreign_remark(catalog: Catalog, naming: str, info: ModelInfo) -> str:
    """The warning of a command that computes with weights that torchtitan may have trained; "" for others."""
    advice = f"`titan convert --trained-by {TRAINED_BY[1]}` makes a checkpoint that describes what was trained"
    return _warning(info, which="titan computes", advice=advice) if _is_foreign(catalog, naming, info) else ""


def _warning(info: ModelInfo, *, which: str, advice: str) -> str:
    deviate = get_family(info.family).as_torchtitan_trained
    assert deviate is not None  # as of every foreign one
    try:
        summary = deviate(info.args, beyond_original=False).summary
    except ConfigError as error:  # the weights may be of another trainer
        summary = error.message
    return (
        f"WARNING: if torchtitan v0.2.2 trained it, the model computed otherwise than the published one, which {which} "
        f"({summary}; see docs/training.md): {advice}"
    )


def _that_apply(info: ModelInfo) -> list[str]:
    """The values of --trained-by for torchtitan's training of such a model; all if it computes none of its numbers."""
    deviate = get_family(info.family).as_torchtitan_trained
    assert deviate is not None  # as of every foreign one
    applying = []
    for name, beyond_original in _BEYOND_ORIGINAL.items():
        try:
            deviate(info.args, beyond_original=beyond_original)
        except ConfigError:
            continue
        applying.append(name)
    return applying or [*_BEYOND_ORIGINAL]


def _is_foreign(catalog: Catalog, naming: str, info: ModelInfo) -> bool:
    """Whether nothing describes weights of torchtitan's names, of a family that torchtitan computes otherwise."""
    is_torchtitans = CONTAINERS[catalog.container].keeps_sections and naming in _TORCHTITANS
    deviates = get_family(info.family).as_torchtitan_trained is not None
    return deviates and is_torchtitans and MODEL_INFO not in catalog.store.names()


def apply_trained_by(weights: NativeWeights, trained_by: str | None) -> tuple[NativeWeights, list[str]]:
    """The weights with the numbers that describe what was trained, and remarks.

    Without `trained_by` the numbers stay, and a remark says where it matters. Raises ConfigError if it does not.
    """
    family, info = get_family(weights.info.family), weights.info
    is_foreign = _is_foreign(weights.catalog, weights.naming, info)
    deviate = family.as_torchtitan_trained
    if trained_by is None and not is_foreign:
        return weights, []
    if trained_by is None:
        advice = f"say --trained-by {', '.join(_that_apply(info))} or {TITAN}"
        return weights, [_warning(info, which="the output describes", advice=advice)]
    if deviate is None or not is_foreign:
        raise ConfigError(
            f"--trained-by {trained_by}: {weights.catalog.place} "
            + (
                "is not a checkpoint of torchtitan"
                if deviate
                else f"is a {family.name}, which torchtitan computes alike"
            ),
            hint="it is for torchtitan's checkpoints of families whose model it computes otherwise; leave it out",
        )
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
