"""Read, check and write config.json of GPT-OSS: of transformers, and of OpenAI's own release."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.args import DecoderArgs
from converters.families.gpt_oss import GptOssArgs
from converters.families.hf_config import (
    DECODER_FIELDS,
    NO_EFFECT,
    TRANSLATED,
    ConfigClass,
    Fields,
    args_from_hf_config,
    hf_config,
)
from converters.families.limits import FACTOR
from converters.families.model_numbers import check_numbers, limits_of
from converters.families.rope import YarnRope

GPT_OSS_FIELDS: Fields = (
    DECODER_FIELDS
    | dict.fromkeys(("num_local_experts", "num_experts_per_tok", "swiglu_limit"), TRANSLATED)
    | dict.fromkeys(("sliding_window", "layer_types"), TRANSLATED)
    | dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), NO_EFFECT)  # of a loss
    | {"swiglu_alpha": (1.702,)}
)
_CONFIG = ConfigClass(
    called="GPT-OSS",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    max_seq_len=131072,
    args_type=GptOssArgs,
    biases=("attention_bias",),
    attention="full and sliding",
    fields=GPT_OSS_FIELDS,
)
_THETA = 150000.0
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS: dict[str, Any] = {  # of the class, where they differ from Llama's
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_ALPHA = 1.702  # of the experts' sigmoid
_EXPERTS = ("num_local_experts", "num_experts")  # two names of one number; so are these:
_PER_TOKEN = ("num_experts_per_tok", "experts_per_token")


def args_of(config: Mapping[str, Any]) -> DecoderArgs:
    """args_from_hf_config for GPT-OSS."""
    check_numbers(config, limits_of(GptOssArgs), what="config.json")
    windows, refused = _window_layers(config)
    args = args_from_hf_config(_with_defaults(config), _CONFIG, also_refused=[*refused, *_rope_problems(config)])
    assert isinstance(args, GptOssArgs)
    window = config.get("sliding_window", 128)
    return replace(
        args,
        window=window or 128,  # of no layer where it is null
        window_layers=windows,
        num_experts=_one_of(config, _EXPERTS, 128),
        experts_per_token=_one_of(config, _PER_TOKEN, 4),
        clamp=float(7.0 if config.get("swiglu_limit") is None else config["swiglu_limit"]),
    )


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the class's values for absent and null fields, RoPE's included."""
    given = _DEFAULTS | {key: value for key, value in config.items() if value is not None}
    rope, scaling = given.get("rope_parameters"), given.get("rope_scaling")
    if rope is None and not scaling:
        return {"rope_theta": _THETA} | given | {"rope_scaling": _DEFAULT_ROPE}
    if scaling:  # transformers 4 reads theta outside of it, 5 prefers the one inside
        return {"rope_theta": _THETA} | given
    if isinstance(rope, Mapping) and "rope_theta" not in given:
        return given | {"rope_parameters": {"rope_theta": _THETA, **rope}}
    return given


def _window_layers(config: Mapping[str, Any]) -> tuple[tuple[int, ...], list[str]]:
    """The layers with a window, and what is refused; every other one by default, from the first on."""
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if not isinstance(layers, int):
        return (), []  # reported with the other numbers that are missing
    if kinds is None:
        kinds = [(_FULL, _WINDOWED)[layer % 2 == 0] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        return (), [f"layer_types = {str(kinds)[:60]}: not a list of {layers} entries, one for each layer"]
    refused = []
    if others := sorted({str(kind) for kind in kinds} - {_WINDOWED, _FULL}):
        refused.append(f"layer_types: {', '.join(others)}")
    windows = tuple(layer for layer, kind in enumerate(kinds) if kind == _WINDOWED)
    if windows and "sliding_window" in config and config["sliding_window"] is None:
        refused.append(f"sliding_window = null, with {len(windows)} layers of type {_WINDOWED}")
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        refused.append(f"sliding_window = {str(window)[:40]}: expected a whole number of tokens from 1 on, or null")
    if windows and window == 1:
        refused.append("sliding_window = 1: transformers' cache keeps all tokens then")
    return windows, refused


def _rope_problems(config: Mapping[str, Any]) -> list[str]:
    """What transformers 4 and 5 take for different RoPEs, and an original length that is stated twice and differs."""
    if "rope_scaling" in config and config["rope_scaling"] is None and config.get("rope_parameters") is None:
        return ["rope_scaling = null: transformers 4 takes it for no scaling, 5 for YaRN"]
    length, rope = config.get("initial_context_length"), config.get("rope_parameters") or config.get("rope_scaling")
    original = (rope if isinstance(rope, Mapping) else _DEFAULT_ROPE).get("original_max_position_embeddings", length)
    if length in (None, original):
        return []
    return [f"initial_context_length = {length!r}, but RoPE's original length is {original!r}"]


def _one_of(config: Mapping[str, Any], names: Sequence[str], default: int) -> int:
    given = {name: config[name] for name in names if config.get(name) is not None}
    if len(set(given.values())) > 1:
        found = ", ".join(f"{name} {value}" for name, value in given.items())
        raise CheckpointError(
            f"config.json has two values of one number: {found}", hint="correct the one that is wrong"
        )
    return int(next(iter(given.values()), default))


def config_of(args: GptOssArgs) -> dict[str, Any]:
    """hf_config for GPT-OSS, with OpenAI's names of numbers beside those of the class, as it is published."""
    scaling = args.rope_scaling
    length = (
        {"initial_context_length": scaling.original_max_position_embeddings} if isinstance(scaling, YarnRope) else {}
    )
    written = hf_config(args, _CONFIG)
    if isinstance(scaling, YarnRope):  # published files state it, and vLLM looks it up by name
        written["rope_scaling"] = written["rope_scaling"] | {"truncate": scaling.truncate}
        written["rope_parameters"] = written["rope_parameters"] | {"truncate": scaling.truncate}
    return (
        written
        | length
        | {
            "num_local_experts": args.num_experts,
            "num_experts_per_tok": args.experts_per_token,
            "experts_per_token": args.experts_per_token,
            "sliding_window": args.window,
            "layer_types": [_WINDOWED if layer in args.window_layers else _FULL for layer in range(args.num_layers)],
            "swiglu_limit": args.clamp,
            "swiglu_alpha": _ALPHA,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    )


# OpenAI's ModelConfig (gpt_oss/torch/model.py): the fields and their defaults
_RELEASE: dict[str, Any] = {
    "num_hidden_layers": 36,
    "num_experts": 128,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000.0,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}
_SAME = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "swiglu_limit", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window", "rope_theta"),
)


def from_release(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What OpenAI's config.json says, as transformers would; None for other files.

    Its code has the other numbers: windows in every other layer, an epsilon of 1e-5, experts in mxfp4. Raises
    UnsupportedError for a field that its class does not have, and CheckpointError for values that are no numbers.
    """
    if len({"num_experts", "experts_per_token", "initial_context_length"} & config.keys()) < 2:
        return None
    if config.keys() & {"model_type", "architectures"}:
        return None
    if unknown := [f"{key} = {config[key]!r:.60}" for key in config if key not in _RELEASE]:
        raise UnsupportedError("config.json has fields that OpenAI's class does not have:" + list_offenders(unknown))
    release = {**_RELEASE, **config}
    if wrong := [f"{key} = {value!r:.60}" for key, value in release.items() if not _is_like(value, _RELEASE[key])]:
        raise CheckpointError("config.json has values that OpenAI's class cannot compute with:" + list_offenders(wrong))
    check_numbers(release, limits_of(GptOssArgs) | {"rope_scaling_factor": FACTOR}, what="config.json")
    length, factor = release["initial_context_length"], release["rope_scaling_factor"]
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": release["rope_ntk_beta"],
        "beta_slow": release["rope_ntk_alpha"],
        "truncate": False,
        "original_max_position_embeddings": length,
    }
    return {
        "architectures": [_CONFIG.architecture],
        "model_type": _CONFIG.model_type,
        **{key: release[key] for key in _SAME},
        "num_local_experts": release["num_experts"],
        "num_experts_per_tok": release["experts_per_token"],
        "rope_parameters": {
            "rope_theta": release["rope_theta"],
            **(scaling if factor > 1 else {"rope_type": "default"}),
        },
        "rope_scaling": scaling if factor > 1 else None,
        "max_position_embeddings": int(length * factor),
        "quantization_config": {"quant_method": "mxfp4"},
    }


def _is_like(value: Any, default: float) -> bool:
    """Whether a value is a positive number, and an integer where the default is."""
    is_number = isinstance(value, int if isinstance(default, int) else int | float) and not isinstance(value, bool)
    return is_number and isfinite(value) and value > 0


def release_config(args: GptOssArgs) -> dict[str, Any]:
    """config.json of OpenAI's release. Raises UnsupportedError with every number that it cannot state."""
    scaling = args.rope_scaling if isinstance(args.rope_scaling, YarnRope) else None
    written = {
        "num_hidden_layers": args.num_layers,
        "num_experts": args.num_experts,
        "experts_per_token": args.experts_per_token,
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_hidden,
        "swiglu_limit": args.clamp,
        "head_dim": args.head_dim,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "sliding_window": args.window,
        "initial_context_length": scaling.original_max_position_embeddings if scaling else args.max_seq_len,
        "rope_theta": args.rope_theta,
        "rope_scaling_factor": scaling.factor if scaling else 1.0,
        "rope_ntk_alpha": scaling.beta_slow if scaling else 1.0,
        "rope_ntk_beta": scaling.beta_fast if scaling else 32.0,
    }
    config = from_release(written)
    assert config is not None
    said = args_of(config)
    assert isinstance(said, GptOssArgs)
    said = replace(said, balance_rate=args.balance_rate)
    unsaid = [
        f"{name}: {getattr(args, name)}"
        for name in args.__dataclass_fields__
        if getattr(args, name) != getattr(said, name)
    ]
    if unsaid:
        raise UnsupportedError("OpenAI's config.json cannot say these numbers of the model:" + list_offenders(unsaid))
    return written
