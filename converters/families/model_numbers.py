"""Check the numbers of a model, under every name that config.json, params.json and titan_model.json give them."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from converters.common.errors import CheckpointError, list_offenders
from converters.families.base import (
    EXPERT_SCORES,
    DynamicRope,
    Experts,
    Family,
    Latent,
    ModelArgs,
    RopeScaling,
    YarnRope,
)

_LIMITS: dict[tuple[str, ...], tuple[type, float, float]] = {
    ("num_layers", "num_hidden_layers", "n_layers"): (int, 1, 10_000),
    ("dim", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden", "vocab_size"): (int, 1, 2**31 - 1),
    ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"): (int, 1, 2**31 - 1),
    ("n_heads", "n_kv_heads", "multiple_of"): (int, 1, 2**31 - 1),
    ("max_seq_len", "max_position_embeddings", "original_max_position_embeddings"): (int, 1, 2**53),
    ("norm_eps", "rms_norm_eps"): (float, 0, 1),
    ("rope_theta",): (float, 1, 1e15),
    ("factor", "low_freq_factor", "high_freq_factor"): (float, 1e-6, 1e9),
    ("rope_scaling_factor", "rope_high_freq_factor", "ffn_dim_multiplier"): (float, 1e-6, 1e9),
    ("attention_factor", "beta_fast", "beta_slow"): (float, 0, 1e9),
    ("mscale", "mscale_all_dim"): (float, -1e9, 1e9),
    ("tied", "tie_word_embeddings", "use_scaled_rope"): (bool, False, True),
    ("attention_bias", "mlp_bias", "truncate", "use_sliding_window"): (bool, False, True),
    ("num_experts",): (int, 0, 65_536),
    ("num_local_experts", "experts_per_token", "num_experts_per_tok"): (int, 1, 65_536),
    ("expert_hidden", "moe_intermediate_size"): (int, 1, 2**31 - 1),
    ("sparse_step", "decoder_sparse_step"): (int, 1, 10_000),
    ("interleave_moe_layer_step", "no_rope_layer_interval"): (int, 1, 10_000),
    ("intermediate_size_mlp",): (int, 1, 2**31 - 1),
    ("normalize_weights", "norm_topk_prob"): (bool, False, True),
    ("balance_rate",): (float, 0, 1),
    ("q_rank", "q_lora_rank"): (int, 0, 2**31 - 1),
    ("kv_rank", "kv_lora_rank", "value_dim", "v_head_dim"): (int, 1, 2**31 - 1),
    ("rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim"): (int, 1, 2**31 - 1),
    ("num_dense_layers", "first_k_dense_replace"): (int, 0, 10_000),
    ("num_shared_experts", "n_shared_experts", "n_routed_experts"): (int, 1, 65_536),
    ("num_groups", "top_groups", "n_group", "topk_group"): (int, 1, 65_536),
    ("route_scale", "routed_scaling_factor"): (float, 1e-6, 1e9),
    ("num_mtp_layers", "num_nextn_predict_layers"): (int, 0, 100),
    ("rope_interleave", "norms_qk", "use_qk_norm"): (bool, False, True),
    ("window", "chunk", "attention_chunk_size"): (int, 1, 2**53),
    ("temperature", "attn_scale", "clamp", "swiglu_limit"): (float, 0, 1e9),
    ("temperature_length", "floor_scale"): (int, 1, 2**53),
}
_LAYER_LISTS = (
    *("dense_layers", "mlp_only_layers", "moe_layers", "sparse_layers"),
    *("window_layers", "layers_without_positions"),
)
_MOST_EXPERTS = 1_000_000  # of all layers: no names are made for more, and no model has a tenth


def check_numbers(content: Mapping[str, Any], *, what: str) -> None:
    """Raise CheckpointError with every number of a file that is out of range. Absent and null ones are ignored."""
    problems = [
        f"{key} = {str(content[key])[:40]}: expected {_wanted(kind, low, high)}"
        for keys, (kind, low, high) in _LIMITS.items()
        for key in keys
        if content.get(key) is not None and not _fits(content[key], kind, low, high)
    ]
    problems += [
        f"{key} = {str(content[key])[:40]}: expected a list of layers, such as [0, 1]"
        for key in _LAYER_LISTS
        if content.get(key) is not None and not _is_layer_list(content[key])
    ]
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))


def check_args(args: ModelArgs, *, what: str) -> None:
    """Check the numbers read from a file, each alone and together."""
    check_numbers(asdict(args), what=what)
    numbers = asdict(args)
    problems = [f"{f.name} is null" for f in fields(ModelArgs) if numbers[f.name] is None and f.name != "rope_scaling"]
    own = fields(args)[len(fields(ModelArgs)) :]  # of a family's own args_type: of the type of their defaults
    problems += [
        f"{f.name} = {str(numbers[f.name])[:40]}: expected the type of {f.default!r}"
        for f in own
        if numbers[f.name] != f.default and not _is_like(numbers[f.name], f.default)
    ]
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))
    if args.head_dim % 2:
        problems.append(f"a head size of {args.head_dim}: RoPE rotates pairs, so it must be even")
    if args.num_heads % args.num_kv_heads:
        problems.append(f"{args.num_heads} attention heads cannot share {args.num_kv_heads} key/value heads evenly")
    if args.rope_scaling is not None:
        check_numbers(asdict(args.rope_scaling), what=f"{what}, rope_scaling,")
        problems += _scaling_problems(args)
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))


def check_blocks(family: Family, args: ModelArgs, *, what: str) -> None:
    """Raise CheckpointError if the layers that a family makes of numbers cannot be."""
    blocks = family.blocks(args)
    experts = [block.feed_forward for block in blocks if isinstance(block.feed_forward, Experts)]
    problems = [problem for one in dict.fromkeys(experts) for problem in _expert_problems(one)]
    for latent in dict.fromkeys(block.latent for block in blocks):
        problems += [] if latent is None else _latent_problems(latent)
    problems += family.problems(args)
    if (total := sum(one.num for one in experts)) > _MOST_EXPERTS:
        problems.append(f"{total:,} experts in {len(experts):,} layers; the most is {_MOST_EXPERTS:,}")
    for name in _LAYER_LISTS:
        outside = [layer for layer in getattr(args, name, ()) if layer >= args.num_layers]
        problems += [f"{name} names layer {layer}, but there are only {args.num_layers} layers" for layer in outside]
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))


def _expert_problems(one: Experts) -> list[str]:
    problems = []
    if not 1 <= one.top_k <= one.num:
        problems.append(f"{one.top_k} experts per token of {one.num}: expected 1 to {one.num}")
    if one.score not in EXPERT_SCORES:
        problems.append(f"a score {str(one.score)[:40]!r} of experts: expected {' or '.join(EXPERT_SCORES)}")
    if one.num % one.num_groups:
        problems.append(f"{one.num} experts cannot stand in {one.num_groups} groups of one size")
    elif not 1 <= one.top_groups <= one.num_groups:
        problems.append(f"{one.top_groups} groups of {one.num_groups} per token: expected 1 to {one.num_groups}")
    elif one.num_groups > 1:
        in_group = one.num // one.num_groups
        eligible = one.top_groups * in_group
        if one.best_of_group > in_group:
            problems.append(f"groups of {in_group} experts, which are rated by their {one.best_of_group} best")
        if one.top_k > eligible:
            problems.append(f"{one.top_k} experts per token, but {one.top_groups} groups have only {eligible}")
    return problems


def _latent_problems(attention: Latent) -> list[str]:
    if attention.rotary_dim % 2:
        return [f"{attention.rotary_dim} rotated features of a head: RoPE rotates pairs, so it must be even"]
    if attention.plain_dim < 1:
        return [f"{attention.rotary_dim} rotated features, which leave none of the head without a rotation"]
    return []


def _is_layer_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(layer) is int and layer >= 0 for layer in value)


def _scaling_problems(args: ModelArgs) -> list[str]:
    scaling = args.rope_scaling
    assert scaling is not None
    problems = [
        f"RoPE scaling whose {f.name} is null"
        for f in fields(scaling)
        if f.default is not None and getattr(scaling, f.name) is None
    ]
    if isinstance(scaling, RopeScaling) and not problems and scaling.low_freq_factor > scaling.high_freq_factor:
        problems.append("RoPE scaling whose low_freq_factor is above its high_freq_factor")
    if isinstance(scaling, YarnRope) and (args.rope_theta == 1 or not scaling.beta_fast or not scaling.beta_slow):
        problems.append("RoPE of type yarn with a theta of 1, or a beta_fast or beta_slow of 0")
    if isinstance(scaling, DynamicRope) and args.head_dim == 2:
        problems.append("RoPE of type dynamic with a head size of 2")
    return problems


def _is_like(value: Any, default: Any) -> bool:
    """Whether the types agree; an int is accepted for a float."""
    kind = type(default)
    return default is None or type(value) is kind or (kind is float and type(value) is int)


def _fits(value: Any, kind: type, low: float, high: float) -> bool:
    """Whether a value is in range. An int is accepted for a float, a bool for neither."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, kind)) and low <= value <= high  # type: ignore[operator]


def _wanted(kind: type, low: float, high: float) -> str:
    if kind is bool:
        return "true or false"
    return f"a whole number from {low} to {high:,}" if kind is int else f"a number from {low:g} to {high:g}"
