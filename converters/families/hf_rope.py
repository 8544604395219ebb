"""Read RoPE of a config.json as transformers 4 and 5 do, and write it so that both compute the same.

transformers 5 (modeling_rope_utils.py, convert_rope_params_to_dict and standardize_rope_params; checked with 5.23): a
`rope_scaling` that is not empty replaces `rope_parameters`; theta and partial_rotary_factor inside take precedence over
those outside, an `original_max_position_embeddings` outside over the one inside. transformers 4 (checked with 4.57)
reads `rope_scaling` and the `rope_theta` outside, and in `rope_scaling` prefers `type` to `rope_type`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.args import DecoderArgs
from converters.families.model_numbers import check_numbers, limits_of
from converters.families.rope import SCALINGS, DynamicRope, LinearRope, RopeScaling, Scaling, YarnRope, rope_type

DEFAULT_THETA = 10000.0  # of most classes, in both versions
_LIMITS = {name: limits for kind in SCALINGS.values() for name, limits in limits_of(kind).items()}
_LIMITS["rope_theta"] = limits_of(DecoderArgs)["rope_theta"]


@dataclass(frozen=True, slots=True)
class Rope:
    """The RoPE that a version of transformers computes."""

    theta: float
    scaling: Scaling | None

    def __str__(self) -> str:
        found = {} if self.scaling is None else rope_parameters(self.scaling)
        numbers = "".join(f", {key} {value}" for key, value in found.items() if key != "rope_type")
        return f"type {rope_type(self.scaling)}, theta {self.theta:,.10g}{numbers}"


def refused_rope(config: Mapping[str, Any]) -> list[str]:
    """The settings of a file's RoPE that are not covered. Raises CheckpointError if it has no numbers."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise CheckpointError(f"config.json: {key} is a {type(config[key]).__name__}, not an object")
        check_numbers(config.get(key) or {}, _LIMITS, what=f"config.json, {key},")
    rope = _used_by_transformers_5(config)
    refused = [f"RoPE parameters of {key} alone" for key, value in rope.items() if isinstance(value, Mapping)]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        refused.append(f"partial_rotary_factor = {partial!r}")
    kind = _type(rope)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        refused.append(f"RoPE of type {kind!r}; covered: {', '.join(_SCALINGS)}")
    return refused


def read_rope(config: Mapping[str, Any], *, max_positions: int, default_theta: float = DEFAULT_THETA) -> Rope:
    """Theta and scaling of a file without settings of `refused_rope`. Raises CheckpointError if a number is missing.

    Raises UnsupportedError if transformers 4 and 5 would compute different models, unless the file is for one of
    them.
    """
    five = _as_transformers_5(config, max_positions, default_theta)
    four = _as_transformers_4(config, max_positions, default_theta)
    if four is None or four == five or _is_for_transformers_5(config):
        return five
    raise UnsupportedError(
        "transformers 4 and 5 read different RoPEs from config.json:"
        + list_offenders([f"transformers 4: {four}", f"transformers 5: {five}", *_spelled(config)]),
        hint="keep one spelling: rope_parameters alone (transformers 5), or rope_scaling with type or rope_type, "
        "and rope_theta outside of it (both versions)",
    )


def rope_parameters(scaling: Scaling) -> dict[str, Any]:
    """The type and its numbers, defaults too, as published files state them: some readers do not know the defaults.

    vLLM looks up beta_fast and beta_slow of GPT-OSS by name. Left out is what has no number, and a `truncate` that is
    not false: only GPT-OSS's files state it (gpt_oss_config.py).
    """
    numbers = {f.name: getattr(scaling, f.name) for f in fields(scaling)}
    if numbers.get("truncate"):
        del numbers["truncate"]
    return {"rope_type": rope_type(scaling)} | {key: value for key, value in numbers.items() if value is not None}


def _used_by_transformers_5(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _as_transformers_5(config: Mapping[str, Any], max_positions: int, default_theta: float) -> Rope:
    rope = _used_by_transformers_5(config)
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    scaling = _SCALINGS[_type(rope)](rope, original or max_positions, max_positions)
    return Rope(float(rope.get("rope_theta") or config.get("rope_theta") or default_theta), scaling)


def _as_transformers_4(config: Mapping[str, Any], max_positions: int, default_theta: float) -> Rope | None:
    """None if transformers 4 fails."""
    rope = config.get("rope_scaling")
    theta = float(config.get("rope_theta") or default_theta)
    if rope is None:
        return Rope(theta, None)
    kind = rope.get("type", rope.get("rope_type"))
    original = rope.get("original_max_position_embeddings")
    if not isinstance(kind, str) or kind not in _SCALINGS or (kind == "llama3" and original is None):
        return None
    if kind != "default" and rope.get("factor") is None:
        return None
    try:
        return Rope(theta, _SCALINGS[kind](rope, original or max_positions, max_positions))
    except CheckpointError:
        return None


def _is_for_transformers_5(config: Mapping[str, Any]) -> bool:
    """Whether the version in the file, or its spelling, is that of transformers 5."""
    version = str(config.get("transformers_version", "")).partition(".")[0]
    if version.isdecimal() and int(version) >= 5:
        return True
    return bool(config.get("rope_parameters")) and not config.get("rope_theta") and not config.get("rope_scaling")


def _spelled(config: Mapping[str, Any]) -> list[str]:
    keys = ("rope_scaling", "rope_theta", "rope_parameters", "original_max_position_embeddings")
    return [f"{key} = {config[key]}" for key in keys if config.get(key) is not None]


def _none(rope: Mapping[str, Any], original: int, max_positions: int) -> None:
    return None


def _linear(rope: Mapping[str, Any], original: int, max_positions: int) -> LinearRope:
    _require(rope, "linear", "factor")
    return LinearRope(float(rope["factor"]))


def _dynamic(rope: Mapping[str, Any], original: int, max_positions: int) -> DynamicRope:
    _require(rope, "dynamic", "factor")
    return DynamicRope(float(rope["factor"]))


def _llama3(rope: Mapping[str, Any], original: int, max_positions: int) -> RopeScaling:
    _require(rope, "llama3", "factor", "low_freq_factor", "high_freq_factor")
    return RopeScaling(
        float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), int(original)
    )


def _yarn(rope: Mapping[str, Any], original: int, max_positions: int) -> YarnRope:
    """Zero and null stand for the defaults of beta_fast and beta_slow, and a null for `truncate = false`."""
    if "factor" not in rope:
        _require(rope, "yarn", "factor")
    factor = rope["factor"] if rope["factor"] is not None else max_positions / original
    numbers = {key: float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
    given = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]
    numbers |= {key: float(rope[key]) for key in given}
    return YarnRope(float(factor), int(original), truncate=bool(rope.get("truncate", True)), **numbers)


_SCALINGS = {"default": _none, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}


def _require(rope: Mapping[str, Any], kind: str, *keys: str) -> None:
    missing = [key for key in keys if rope.get(key) is None]
    if missing:
        raise CheckpointError(f"config.json lacks numbers of its RoPE of type {kind}:" + list_offenders(missing))
