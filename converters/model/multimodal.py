"""Text models inside of multimodal checkpoints: their part of config.json, and the tensors and files beside them.

A family's `multimodal` names the class of transformers. The other tensors keep transformers' names in every format that
can hold them, and titan computes without them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.common.box import TensorInfo
from converters.common.errors import CheckpointError, ConfigError, list_offenders
from converters.common.fold import fold_texts
from converters.common.names import ASSETS_FOLDER
from converters.families.args import DecoderArgs
from converters.families.base import Family
from converters.families.foreign import Multimodal
from converters.families.registry import all_families
from converters.families.rules import OTHER_MEDIUM
from converters.store.local_files import is_file
from converters.views.expressions import Expression, Source
from converters.views.view import View

OUTER = "multimodal"  # the key of titan_model.json
_NUMBERED, _MOST_LAYERS = re.compile(r"(.*?\.)(\d+)(\..*)"), 10_000
EXTRA_REASON = OTHER_MEDIUM + "which the text model computes without; --keep-extra keeps it"
# What titan writes itself, or keeps among the text part's fields
_NOT_OUTER = {
    *("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings"),
    *("transformers_version", "_name_or_path", "quantization_config"),
}
_MOVED = ("dtype", "torch_dtype", "transformers_version", "quantization_config")  # into the text part's fields


def split_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a config.json's text model, and those around them, which are none in a text model's own file.

    Raises CheckpointError if the two contradict each other.
    """
    named = config.get("architectures") if isinstance(config.get("architectures"), list) else []
    for family in all_families().values():
        multimodal = family.multimodal
        if (
            multimodal is None
            or multimodal.text_key not in config
            or not {multimodal.model_type, multimodal.architecture}
            & {
                config.get("model_type") or "",
                *map(str, named or []),
            }
        ):
            continue
        text = config[multimodal.text_key]
        if not isinstance(text, Mapping):
            raise CheckpointError(f"config.json: {multimodal.text_key} is a {type(text).__name__}, not an object")
        tied = [part["tie_word_embeddings"] for part in (config, text) if part.get("tie_word_embeddings") is not None]
        if len(tied) == 2 and tied[0] != tied[1]:
            raise CheckpointError(
                f"config.json: tie_word_embeddings is {tied[0]!r}, and {tied[1]!r} in {multimodal.text_key}",
                hint="correct the one that is wrong",
            )
        inner = {key: config[key] for key in _MOVED if key in config} | dict(text)
        inner |= {"tie_word_embeddings": tied[0]} if tied else {}
        inner.setdefault("model_type", family.hf_model_types[0])
        inner.pop("architectures", None)
        return inner, {key: value for key, value in config.items() if key not in (*_NOT_OUTER, multimodal.text_key)}
    return dict(config), {}


def joined_config(
    text: Mapping[str, Any], outer: Mapping[str, Any], multimodal: Multimodal, args: DecoderArgs, *, dtype: str
) -> dict[str, Any]:
    """config.json of the multimodal class: the inverse of `split_config`."""
    inner = {key: value for key, value in text.items() if key != "architectures"}
    config = {
        "architectures": [multimodal.architecture],
        "model_type": multimodal.model_type,
        "tie_word_embeddings": args.tied,
    }
    return config | dict(outer) | {multimodal.text_key: inner, "dtype": dtype, "torch_dtype": dtype}


def find_files(folder: Path, multimodal: Multimodal) -> dict[str, Path]:
    """The small files of the class in a checkpoint's folder, by name."""
    places = (folder, folder / ASSETS_FOLDER)
    return {name: path for name in multimodal.files for place in reversed(places) if is_file(path := place / name)}


def with_extras(view: View, native: View, names: tuple[str, ...]) -> View:
    """A foreign view of `native` with its tensors beside the text model, under their names."""
    tensors: dict[str, TensorInfo] = {**view.tensors, **{name: native.tensors[name] for name in names}}
    expressions: dict[str, Expression] = {**view.expressions, **{name: Source(name) for name in names}}
    view.ledger.used |= {name: (name,) for name in names}
    return replace(view, tensors=tensors, expressions=expressions)


def require_extras(family: Family, outer: Mapping[str, Any], names: tuple[str, ...], *, where: object) -> None:
    """Raise ConfigError for a --keep-extra that has nothing to keep, or whose output could not be a whole again."""
    if family.multimodal is None or not names:
        raise ConfigError(
            f"--keep-extra: {where} holds only a text model",
            hint="leave it out"
            if family.multimodal is None
            else "leave it out, or name the multimodal checkpoint that training began with in --model-from",
        )
    if not outer:
        raise ConfigError(
            f"--keep-extra: no config.json of {family.multimodal.architecture} describes the {len(names):,} tensors "
            f"that {where} has beside the text model",
            hint=f"its {family.multimodal.text_key} alone describes the text model",
            tries=["--no-keep-extra"],
        )
    prefixes = [pattern.removesuffix("{*}") for pattern in family.multimodal.extras]
    lost = [f"tensors {prefix}*" for prefix in prefixes if not any(name.startswith(prefix) for name in names)]
    lost += _missing_layers(names)
    lost += [f"config.json's {key}" for key in family.multimodal.outer_keys if key not in outer]
    if lost:
        raise ConfigError(
            f"--keep-extra: {where} lacks parts of a {family.multimodal.architecture}:" + list_offenders(lost),
            hint="transformers would initialize them anew",
            tries=["--no-keep-extra"],
        )


def _missing_layers(names: Sequence[str]) -> list[str]:
    """Names that are missing if the layers of an encoder have the same tensors, and numbers from 0 on."""
    found: dict[str, dict[int, set[str]]] = {}  # in front of a number → number → what follows
    for name in names:
        if numbered := _NUMBERED.fullmatch(name):
            layer = found.setdefault(numbered[1], {}).setdefault(int(numbered[2]), set())
            layer.add(numbered[3])
    lost = []
    for prefix, layers in found.items():
        every = set().union(*layers.values())
        for number in range(min(max(layers) + 1, _MOST_LAYERS)):
            lost += [f"{prefix}{number}{rest}" for rest in sorted(every - layers.get(number, set()))]
    return fold_texts(lost)


def require_place(output: str, names: tuple[str, ...], *, keep_extra: bool | None) -> dict[str, str]:
    """Name → reason, of tensors that an output has no place for. Raises ConfigError if they were asked for."""
    if names and keep_extra:
        raise ConfigError(
            f"--keep-extra: {output} has no place for the {len(names):,} tensors beside the text model",
            hint="--to dcp, torch and hf keep them",
            tries=["--no-keep-extra"],
        )
    return dict.fromkeys(names, f"{OTHER_MEDIUM}for which {output} has no place")


def describe_extras(dropped: Mapping[str, str], tensors: Mapping[str, Any]) -> list[str]:
    """Remarks on the tensors of other media that a conversion leaves out, by reason. `tensors`: those with a size."""
    remarks = []
    for reason in dict.fromkeys(reason for reason in dropped.values() if reason.startswith(OTHER_MEDIUM)):
        names = [name for name, part in dropped.items() if part == reason]
        why = (
            "the text model computes the same; --keep-extra keeps them"
            if reason == EXTRA_REASON
            else reason.removeprefix(OTHER_MEDIUM)
        )
        remarks.append(f"{count_extras(names, tensors)} are left out: {why}")
    return remarks


def unread_remark(dropped: Mapping[str, str], tensors: Mapping[str, Any]) -> str | None:
    """A remark on the tensors of other media that training and inference do not read."""
    names = [name for name, reason in dropped.items() if reason.startswith(OTHER_MEDIUM)]
    return f"{count_extras(names, tensors)} are not read: the text model computes without them" if names else None


def count_extras(names: Sequence[str], tensors: Mapping[str, Any]) -> str:
    """Number, parts and size of tensors of other media. `tensors`: those with a size."""
    parts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    num_bytes = sum(tensors[name].num_bytes for name in names if name in tensors)
    size = f"; {num_bytes / 1e9:.2f} GB" if num_bytes else ""
    return f"{len(names):,} tensors of encoders of other media ({parts}{size})"
