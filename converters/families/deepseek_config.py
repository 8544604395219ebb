"""Read, check and write config.json of DeepSeek V3 and V2, of two config classes of transformers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.args import DecoderArgs
from converters.families.deepseek_v3 import SIGMOID, SOFTMAX, DeepSeekArgs
from converters.families.hf_config import (
    DECODER_FIELDS,
    NO_EFFECT,
    TRANSLATED,
    ConfigClass,
    Fields,
    args_from_hf_config,
    hf_config,
    other_layer_types,
)
from converters.families.limits import FLAG, SIZE
from converters.families.rope import YarnRope, rope_type

# The classes replace head_dim by qk_rope_head_dim; rope_interleave False rotates halves, for which there are no weights
_FIELDS: Fields = (
    DECODER_FIELDS
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), TRANSLATED)
    | dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok"), TRANSLATED)
    | dict.fromkeys(("moe_intermediate_size", "first_k_dense_replace", "n_group", "topk_group"), TRANSLATED)
    | dict.fromkeys(("routed_scaling_factor", "norm_topk_prob"), TRANSLATED)
    | dict.fromkeys(("pretraining_tp", "output_router_logits"), NO_EFFECT)
    | {"head_dim": NO_EFFECT}
)
DEEPSEEK_V3_FIELDS: Fields = _FIELDS | {"rope_interleave": (True,), "num_mtp_layers": TRANSLATED}
DEEPSEEK_V2_FIELDS: Fields = _FIELDS | {
    "topk_method": ("greedy", "group_limited_greedy"),
    "norm_topk_prob": (False,),  # transformers does not read it, vLLM does
    "mlp_bias": TRANSLATED,
}
_LIMITS = {"qk_nope_head_dim": SIZE, "rope_interleave": FLAG}
V3 = ConfigClass(
    called="DeepSeek V3",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    max_seq_len=4096,
    args_type=DeepSeekArgs,
    fields=DEEPSEEK_V3_FIELDS,
    limits=_LIMITS,
)
V2 = ConfigClass(
    called="DeepSeek V2",
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    max_seq_len=2048,
    args_type=DeepSeekArgs,
    fields=DEEPSEEK_V2_FIELDS,
    limits=_LIMITS,
)
# Kimi K2's code is that of DeepSeek V3; transformers has no class of that name
MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")
_SHARED_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3_DEFAULTS = _SHARED_DEFAULTS | {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
_V2_DEFAULTS = _SHARED_DEFAULTS | {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": None,
    "topk_group": None,
}
# What null stands for; elsewhere for the default
_NULL = {"q_lora_rank": None, "norm_topk_prob": False, "n_group": None, "topk_group": None}
_GREEDY, _IN_GROUPS, _WITHOUT_LOSS = "greedy", "group_limited_greedy", "noaux_tc"  # values of topk_method
# Fields of the published configs that the classes of transformers do not have, and other readers use
_PUBLISHED_V3: dict[str, tuple[Any, ...]] = {
    "topk_method": (None, _WITHOUT_LOSS),
    "scoring_func": (None, SIGMOID),
    "moe_layer_freq": (None, 1),
}
_PUBLISHED_V2: dict[str, tuple[Any, ...]] = {"scoring_func": (None, SOFTMAX), "moe_layer_freq": (None, 1)}


def args_of(config: Mapping[str, Any]) -> DecoderArgs:
    """args_from_hf_config for DeepSeek V3, V2 and Kimi K2."""
    named = config.get("model_type") or next(iter(config.get("architectures") or ()), "")
    is_v2 = named in (V2.model_type, V2.architecture)
    of, defaults = (V2, _V2_DEFAULTS) if is_v2 else (V3, _V3_DEFAULTS)
    args = args_from_hf_config(config, of, also_refused=_refused(config, is_v2=is_v2))
    assert isinstance(args, DeepSeekArgs)
    if not isinstance(args.rope_scaling, YarnRope | None):
        raise UnsupportedError(
            f"config.json describes a {of.called} with RoPE of type {rope_type(args.rope_scaling)}",
            hint="published models have the types default and yarn, which are covered",
        )
    numbers = _numbers(config, defaults)
    groups = (numbers["n_group"], numbers["topk_group"])
    if is_v2 and (config.get("topk_method") or _GREEDY) == _GREEDY:
        groups = (1, 1)  # not used
    elif None in groups:
        raise CheckpointError(
            "config.json: n_group and topk_group are null, which the class cannot compute with",
            hint="1 stands for experts without groups",
        )
    return replace(
        args,
        num_kv_heads=args.num_heads,
        head_dim=numbers["qk_nope_head_dim"] + numbers["qk_rope_head_dim"],
        q_rank=numbers["q_lora_rank"] or 0,
        kv_rank=numbers["kv_lora_rank"],
        rotary_dim=numbers["qk_rope_head_dim"],
        value_dim=numbers["v_head_dim"],
        num_dense_layers=numbers["first_k_dense_replace"],
        num_experts=numbers["n_routed_experts"],
        experts_per_token=numbers["num_experts_per_tok"],
        expert_hidden=numbers["moe_intermediate_size"],
        num_shared_experts=numbers["n_shared_experts"],
        score=SOFTMAX if is_v2 else SIGMOID,
        normalize_weights=numbers["norm_topk_prob"],
        route_scale=float(numbers["routed_scaling_factor"]),
        num_groups=groups[0],
        top_groups=groups[1],
    )


def problems_of(args: DeepSeekArgs) -> list[str]:
    """Numbers that no class computes together."""
    problems = []
    if args.num_dense_layers > args.num_layers:
        problems.append(f"{args.num_dense_layers} dense layers, but there are only {args.num_layers} layers")
    if args.num_kv_heads != args.num_heads:
        problems.append(f"{args.num_kv_heads} key/value heads: latent attention has as many as heads, {args.num_heads}")
    if args.score == SOFTMAX and args.normalize_weights:
        problems.append("softmax scores whose weights are normalized: DeepSeek V2 does not normalize them")
    return problems


def _numbers(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `defaults`, with the class's value where one is absent or null."""
    counts = {
        key: config[key]
        for key in ("n_routed_experts", "num_local_experts", "num_experts")  # the last two: the classes' other names
        if config.get(key) is not None
    }
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key} {value}" for key, value in counts.items())
        raise CheckpointError(f"config.json has two numbers of experts: {listed}", hint="correct the one that is wrong")
    given = {key: config[key] for key in defaults if config.get(key) is not None}
    given |= {key: value for key, value in _NULL.items() if key in config and config[key] is None}
    found = {**defaults, **given, "n_routed_experts": next(iter(counts.values()), defaults["n_routed_experts"])}
    if found["num_experts_per_tok"] is None:
        raise CheckpointError(
            "config.json lacks numbers that define the model:" + list_offenders(["num_experts_per_tok"])
        )
    return found


def _refused(config: Mapping[str, Any], *, is_v2: bool) -> list[str]:
    """Settings that change the computation, beside those of ConfigClass.fields."""
    refused = [
        f"{key} = {config[key]!r}"
        for key, values in (_PUBLISHED_V2 if is_v2 else _PUBLISHED_V3).items()
        if config.get(key) not in values
    ]
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        refused.append(f"num_key_value_heads = {kv_heads!r}: of latent attention it is num_attention_heads, {heads}")
    refused += [
        f"{key} = null, for which the class computes something else"
        for key in ("rope_interleave", "topk_method")
        if key in config and config[key] is None and key in (V2 if is_v2 else V3).fields
    ]
    if config.get("sliding_window") is not None:
        refused.append(f"sliding_window = {config['sliding_window']!r}")
    refused += other_layer_types(config)
    refused += [
        f"{key} = {config[key]!r}: the sparse attention of DeepSeek V3.2"
        for key in ("index_n_heads", "index_head_dim", "index_topk")
        if config.get(key) is not None
    ]
    return refused


def config_of(args: DeepSeekArgs) -> dict[str, Any]:
    """hf_config for DeepSeek V3 and V2: the class whose experts are scored as these numbers say."""
    is_v2 = args.score == SOFTMAX
    written = hf_config(args, V2 if is_v2 else V3) | {
        "head_dim": args.rotary_dim,  # as transformers saves it
        "q_lora_rank": args.q_rank or None,
        "kv_lora_rank": args.kv_rank,
        "qk_nope_head_dim": args.head_dim - args.rotary_dim,
        "qk_rope_head_dim": args.rotary_dim,
        "v_head_dim": args.value_dim,
        "first_k_dense_replace": args.num_dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": args.num_experts,
        "n_shared_experts": args.num_shared_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_hidden,
        "norm_topk_prob": args.normalize_weights,
        "routed_scaling_factor": args.route_scale,
        "n_group": args.num_groups,
        "topk_group": args.top_groups,
        "scoring_func": args.score,
        "output_router_logits": False,
        "pretraining_tp": 1,
    }
    if written["rope_scaling"]:  # by this name, which DeepSeek's own code reads
        written["rope_scaling"] = {"type": written["rope_scaling"]["rope_type"], **written["rope_scaling"]}
    if is_v2:
        in_groups = args.num_groups > 1
        return written | {"topk_method": _IN_GROUPS if in_groups else _GREEDY, "mlp_bias": False}
    return written | {
        "topk_method": _WITHOUT_LOSS,
        "rope_interleave": True,
        "num_nextn_predict_layers": args.num_mtp_layers,
    }
