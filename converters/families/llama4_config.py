"""Read, check and write config.json of Llama 4's text model, the class Llama4TextConfig of transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.args import DecoderArgs
from converters.families.hf_config import (
    DECODER_FIELDS,
    NO_EFFECT,
    TRANSLATED,
    ConfigClass,
    Fields,
    args_from_hf_config,
    hf_config,
)
from converters.families.limits import SIZE, Limits
from converters.families.llama4 import Llama4Args
from converters.families.rope import RopeScaling, rope_type

LLAMA4_FIELDS: Fields = (
    DECODER_FIELDS
    | dict.fromkeys(("intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"), TRANSLATED)
    | dict.fromkeys(("moe_layers", "interleave_moe_layer_step", "use_qk_norm", "layer_types"), TRANSLATED)
    | dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "attention_chunk_size"), TRANSLATED)
    | dict.fromkeys(("attn_temperature_tuning", "attn_scale", "floor_scale"), TRANSLATED)
    | dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), NO_EFFECT)  # of a loss
    | {"router_jitter_noise": NO_EFFECT}  # the class does not read it
)
STEP = Limits(int, 1, 10_000)  # between layers
TEXT = ConfigClass(
    called="Llama 4",
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    max_seq_len=131072,
    head_dim=128,
    num_kv_heads=8,
    norm_eps=1e-5,
    rope_theta=500000.0,
    attention="full and chunked",
    args_type=Llama4Args,
    fields=LLAMA4_FIELDS,
    limits={"intermediate_size_mlp": SIZE, "interleave_moe_layer_step": STEP, "no_rope_layer_interval": STEP},
)
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
}


def args_of(config: Mapping[str, Any]) -> DecoderArgs:
    """args_from_hf_config for Llama 4."""
    if "head_dim" in config and config["head_dim"] is None and config.get("num_attention_heads"):
        config = {**config, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
    args = args_from_hf_config(config, TEXT, also_refused=_refused(config))
    assert isinstance(args, Llama4Args)
    if not isinstance(args.rope_scaling, RopeScaling | None):
        raise UnsupportedError(
            f"config.json describes a Llama 4 with RoPE of type {rope_type(args.rope_scaling)}",
            hint="published models have the types default and llama3, which are covered",
        )
    given = {key: config[key] for key in _DEFAULTS if config.get(key) is not None}
    found, layers = _DEFAULTS | given, args.num_layers
    rotates = _rotating(config, layers, interval=found["no_rope_layer_interval"])
    step, sparse = found["interleave_moe_layer_step"], config.get("moe_layers")
    tunes = bool(found["attn_temperature_tuning"])
    return replace(
        args,
        ffn_hidden=found["intermediate_size_mlp"],
        sparse_layers=tuple(range(step - 1, layers, step) if sparse is None else sorted(set(sparse))),
        num_experts=found["num_local_experts"],
        experts_per_token=found["num_experts_per_tok"],
        expert_hidden=config["intermediate_size"],
        layers_without_positions=tuple(layer for layer in range(layers) if not rotates[layer]),
        chunk=_chunk(config, rotates, found["attention_chunk_size"]),
        norms_qk=found["use_qk_norm"],
        temperature=float(found["attn_scale"]) if tunes else None,
        temperature_length=found["floor_scale"] if tunes else _DEFAULTS["floor_scale"],
    )


def config_of(args: Llama4Args) -> dict[str, Any]:
    """hf_config for Llama 4.

    transformers 5 fails without an attention_chunk_size. Where nothing is chunked it is the longest context, which says
    the same to readers that have no layer_types.
    """
    layers = range(args.num_layers)
    rotates = [layer not in args.layers_without_positions for layer in layers]
    is_chunked = args.chunk is not None
    return hf_config(args, TEXT) | {
        "intermediate_size": args.expert_hidden,
        "intermediate_size_mlp": args.ffn_hidden,
        "num_local_experts": args.num_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_layers": list(args.sparse_layers),
        "interleave_moe_layer_step": _step(args.sparse_layers, args.num_layers) or 1,
        "use_qk_norm": args.norms_qk,
        "no_rope_layers": [int(rotating) for rotating in rotates],
        "no_rope_layer_interval": _step(args.layers_without_positions, args.num_layers) or 4,
        "attention_chunk_size": args.chunk if is_chunked else args.max_seq_len,
        "layer_types": [_CHUNKED if rotating and is_chunked else _FULL for rotating in rotates],
        "attn_temperature_tuning": args.temperature is not None,
        "attn_scale": _DEFAULTS["attn_scale"] if args.temperature is None else args.temperature,
        "floor_scale": args.temperature_length,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    }


def _step(chosen: Sequence[int], num_layers: int) -> int | None:
    """The step by which the last of every so many layers is chosen; None if it is another choice."""
    step = chosen[0] + 1 if chosen else num_layers + 1
    return step if list(chosen) == list(range(step - 1, num_layers, step)) else None


def _rotating(config: Mapping[str, Any], layers: int, *, interval: int) -> list[bool]:
    """For each layer, whether it has rotary embeddings. In `no_rope_layers` 1 stands for a layer that does."""
    stated = config.get("no_rope_layers")
    if not stated:  # [], too, stands for the default
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    return [bool(number) for number in stated]


def _chunk(config: Mapping[str, Any], rotates: Sequence[bool], size: int) -> int | None:
    """Layers with rotation are chunked if their `layer_types`, or `attention_chunk_size` where there are none, say so.

    A null attention_chunk_size stands for none in transformers 4, and 5 fails.
    """
    kinds = config.get("layer_types")
    if "attention_chunk_size" in config and config["attention_chunk_size"] is None:
        return None
    if kinds is None:
        return size
    return size if any(kind == _CHUNKED for kind in kinds) else None


def _refused(config: Mapping[str, Any]) -> list[str]:
    """Settings that no Llama4Args says, and lists that are not of the model's layers."""
    layers, refused = config.get("num_hidden_layers"), []
    if not isinstance(layers, int):
        return []  # an error already
    rope, kinds = config.get("no_rope_layers"), config.get("layer_types")
    for key, value in (("no_rope_layers", rope or None), ("layer_types", kinds)):
        if value is not None and (not isinstance(value, list) or len(value) != layers):
            refused.append(f"{key} = {str(value)[:60]}: not a list of {layers} entries, one for each layer")
    tunes = config.get("attn_temperature_tuning", True)
    if not isinstance(tunes, int):  # published files have the number 4, whose truth value counts
        refused.append(f"attn_temperature_tuning = {tunes!r}")
    if config.get("use_qk_norm", True) is None:  # false in transformers 4, an error in 5
        refused.append("use_qk_norm = None")
    sparse = config.get("moe_layers")
    outside = [n for n in sparse if isinstance(n, int) and n >= layers] if isinstance(sparse, list) else []
    refused += [f"moe_layers names layer {n}, but there are only {layers} layers" for n in outside]
    if refused:
        return refused
    if rope and not all(number in (0, 1) for number in rope):
        return [f"no_rope_layers = {str(rope)[:60]}: not a list of 0 and 1"]
    interval = config.get("no_rope_layer_interval")
    if interval is not None and (not isinstance(interval, int) or interval < 1):
        return [f"no_rope_layer_interval = {interval!r}"]
    if kinds is None:
        return []
    unknown_kinds = sorted({str(kind) for kind in kinds} - {_CHUNKED, _FULL})
    if unknown_kinds:
        return [f"layer_types: {', '.join(unknown_kinds)}"]
    rotates = _rotating(config, layers, interval=interval or _DEFAULTS["no_rope_layer_interval"])
    of_rotating = {kind for kind, rotating in zip(kinds, rotates, strict=True) if rotating}
    if any(kind == _CHUNKED and not rotating for kind, rotating in zip(kinds, rotates, strict=True)):
        refused.append("layer_types: chunked_attention in layers whose entry in no_rope_layers is 0")
    if len(of_rotating) > 1:
        refused.append("layer_types: chunked_attention in some of the layers whose no_rope_layers is 1, but not in all")
    if _CHUNKED in of_rotating and "attention_chunk_size" in config and config["attention_chunk_size"] is None:
        raise CheckpointError(
            "config.json: layer_types has chunked_attention, and attention_chunk_size is null:"
            + list_offenders(["transformers cannot compute that"]),
            hint="full_attention stands for layers without chunks",
        )
    return refused
