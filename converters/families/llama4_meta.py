"""Llama 4 in Meta's original releases: names, the tensors that its files fuse or flatten, and params.json.

Meta's code takes the files' tensors apart as it loads them (llama-models, models/llama4: the load hooks of model.py,
moe.py and ffn.py). The naming has the names that they have afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.args import DecoderArgs
from converters.families.foreign import StoredTensor
from converters.families.llama import META as LLAMA_META
from converters.families.llama4 import Llama4Args
from converters.families.llama4_config import STEP
from converters.families.meta_params import META_LIMITS, ffn_hidden
from converters.families.model_numbers import check_numbers, limits_of
from converters.families.rope import RopeScaling, describe_rope
from converters.families.rules import OTHER_MEDIUM, Drop, Rule, Transposed, Zeros

_L = "layers.{n}."
_FEED = _L + "feed_forward."
_STATISTICS = "a statistic of training, which Meta's code does not load"
_VISION = OTHER_MEDIUM + "which the text model computes without; Hugging Face's folders can be kept whole"
META = replace(
    LLAMA_META,
    rules=(
        *LLAMA_META.rules,
        Rule(_L + "moe.router.gate.weight", _FEED + "router_DE", Transposed()),
        *(Rule(f"{_L}moe.experts.{w}", f"{_FEED}experts.{w}", Transposed()) for w in ("w1", "w2", "w3")),
        *(Rule(f"{_L}moe.shared_experts.{w}.weight", f"{_FEED}shared_expert.{w}.weight") for w in ("w1", "w2", "w3")),
        Rule(_L + "moe.expert_bias", "", Zeros("published Llama 4 has no such offset")),
    ),
    drops=(
        *LLAMA_META.drops,
        Drop("freq_cis", "recomputed from rope_theta"),
        Drop(_FEED + "expert_activation_DE", _STATISTICS, is_of_rank=True),
        Drop(_FEED + "global_gate_stats_3E", _STATISTICS, is_of_rank=True),
        Drop(_FEED + "running_gate_stats_3E", _STATISTICS, is_of_rank=True),
        *(
            Drop(f"{_L}{module}._extra_state", "of float8 kernels, which Meta's code does not load", is_of_rank=True)
            for module in (
                *("attention.wqkv", "attention.wo", "feed_forward.mlp"),
                *("feed_forward.experts.mlp", "feed_forward.mlp_shared"),
            )
        ),
        Drop("vision_embeddings.{*}", _VISION, is_of_rank=True),
        Drop("vision_projection.{*}", _VISION, is_of_rank=True),
    ),
)


def stored_tensors(args: Llama4Args) -> list[StoredTensor]:
    """The tensors of the files that are other ones for Meta's code, of every layer."""
    stored = []
    for number in range(args.num_layers):
        layer, feed = f"layers.{number}.", f"layers.{number}.feed_forward."
        heads = {"wq": args.num_heads, "wk": args.num_kv_heads, "wv": args.num_kv_heads}
        stored += [
            StoredTensor(
                f"{layer}attention.wqkv.weight", {f"{layer}attention.{w}.weight": n for w, n in heads.items()}
            ),
            StoredTensor(f"{layer}attention.wqkv.layer_norm_weight", {f"{layer}attention_norm.weight": 1}),
        ]
        if number not in args.sparse_layers:
            stored += [
                StoredTensor(f"{feed}mlp.layer_norm_weight", {f"{layer}ffn_norm.weight": 1}),
                StoredTensor(f"{feed}mlp.fc1_weight", {f"{feed}w1.weight": 1, f"{feed}w3.weight": 1}),
                StoredTensor(f"{feed}mlp.fc2_weight", {f"{feed}w2.weight": 1}),
            ]
            continue
        shared = {"w1": "w_in_shared_FD", "w2": "w_out_shared_DF", "w3": "w_swiglu_FD"}
        flat = {"w1": "moe_w_in_eD_F", "w2": "moe_w_out_eF_D", "w3": "moe_w_swiglu_eD_F"}
        stored.append(StoredTensor(f"{feed}norm.weight", {f"{layer}ffn_norm.weight": 1}))
        stored += [
            StoredTensor(f"{feed}{stored_name}.weight", {f"{feed}shared_expert.{w}.weight": 1})
            for w, stored_name in shared.items()
        ]
        stored += [
            StoredTensor(f"{feed}experts.{stored_name}", {f"{feed}experts.{w}": 1}, stack=args.num_experts)
            for w, stored_name in flat.items()
        ]
    return stored


def args_from_meta_params(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DecoderArgs:
    """Numbers from params.json, whose missing ones are those of Meta's code. The context length is not in it.

    Raises CheckpointError and UnsupportedError as the reader of Llama 3's does.
    """
    experts = params.get("moe_args")
    needed = {"dim": params, "n_layers": params, "n_heads": params, "num_experts": experts}
    missing = [
        key for key, value in needed.items() if not isinstance(value, Mapping) or not isinstance(value.get(key), int)
    ]
    if missing:
        raise CheckpointError("params.json lacks numbers that define the model:" + list_offenders(missing))
    assert isinstance(experts, Mapping)
    length = params.get("floor_scale", 8192)  # 8192.0 in Meta's code
    if isinstance(length, float) and length == int(length):
        params, length = {**params, "floor_scale": int(length)}, int(length)
    for part, what in ((params, "params.json"), (experts, "params.json, moe_args,")):
        numbers = {k: v for k, v in part.items() if (k, v) != ("vocab_size", -1)}
        check_numbers(numbers, limits_of(Llama4Args) | META_LIMITS | {"interleave_moe_layer_step": STEP}, what=what)
    dim, heads, layers = params["dim"], params["n_heads"], params["n_layers"]
    refused = [f"{key} = {params[key]!r:.60}" for key in ("quantization_args", "lora_args") if params.get(key)]
    if params.get("head_dim") not in (None, dim // heads):
        refused.append(f"head_dim = {params['head_dim']!r}: Meta's code computes with dim / n_heads, {dim // heads}")
    if refused:
        raise UnsupportedError(
            "params.json describes a Llama 4 that is not covered:" + list_offenders(refused),
            hint="the releases in bfloat16 are covered",
        )
    interval, step = params.get("nope_layer_interval"), experts.get("interleave_moe_layer_step") or 1
    scaling = None
    if params.get("use_scaled_rope"):
        factor, high = params.get("rope_scaling_factor") or 16, params.get("rope_high_freq_factor") or 1
        scaling = RopeScaling(float(factor), 1.0, float(high), 8192)
    vocab_size = params.get("vocab_size", -1)
    tunes = bool(params.get("attn_temperature_tuning"))
    return Llama4Args(
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=params.get("n_kv_heads") or heads,
        head_dim=dim // heads,
        ffn_hidden=ffn_hidden(dim, multiple_of=_multiple_of(params), multiplier=params.get("ffn_dim_multiplier")),
        vocab_size=shapes.get("tok_embeddings.weight", (0,))[0] if vocab_size == -1 else vocab_size,
        norm_eps=float(params.get("norm_eps", 1e-5)),
        rope_theta=float(params.get("rope_theta", 500000)),
        rope_scaling=scaling,
        max_seq_len=params.get("max_seq_len") or 262144,
        tied=bool(shapes) and "output.weight" not in shapes,
        sparse_layers=tuple(range(step - 1, layers, step)),
        num_experts=experts["num_experts"],
        experts_per_token=experts.get("top_k", 1),
        expert_hidden=_expert_hidden(params, experts),
        layers_without_positions=tuple(range(interval - 1, layers, interval)) if interval else (),
        chunk=params.get("attention_chunk_size"),
        norms_qk=bool(params.get("use_qk_norm")),
        temperature=float(params.get("attn_scale", 0.1)) if tunes else None,
        temperature_length=length if tunes else 8192,
    )


def meta_params(args: Llama4Args) -> dict[str, Any]:
    """params.json's content. Meta's code computes widths, so numbers are chosen that result in them.

    Raises UnsupportedError, listing all reasons, if Meta's code would build another model.
    """
    step, interval = _step(args.sparse_layers, args.num_layers), _step(args.layers_without_positions, args.num_layers)
    problems = []
    if args.attention_bias or args.mlp_bias:
        problems.append("biases of linear layers")
    if args.head_dim * args.num_heads != args.dim:
        problems.append(f"head_dim {args.head_dim} with dim {args.dim} and {args.num_heads} heads: it is dim / n_heads")
    if not step:
        problems.append(
            f"experts in the layers {list(args.sparse_layers)}: they are in every so manyth, from the first"
        )
    if args.layers_without_positions and not interval:
        problems.append(f"layers without positions {list(args.layers_without_positions)}: it is every so manyth")
    scaling = args.rope_scaling
    if scaling is not None and not (
        isinstance(scaling, RopeScaling)
        and (scaling.low_freq_factor, scaling.original_max_position_embeddings) == (1.0, 8192)
    ):
        problems.append(f"{describe_rope(scaling)}: low_freq_factor is 1 and original_max_position_embeddings 8192")
    widths = _widths(args)
    if widths is None:
        problems.append(f"feed-forwards of {args.ffn_hidden} and experts of {args.expert_hidden} at dim {args.dim}")
    if problems:
        raise UnsupportedError("params.json of Llama 4 cannot express:" + list_offenders(problems))
    assert widths is not None
    moe = {"num_experts": args.num_experts, "top_k": args.experts_per_token, "interleave_moe_layer_step": step}
    tuned = {} if args.temperature is None else {"attn_scale": args.temperature, "floor_scale": args.temperature_length}
    scaled = {}
    if isinstance(scaling, RopeScaling):
        scaled = {"rope_scaling_factor": scaling.factor, "rope_high_freq_factor": scaling.high_freq_factor}
    return {
        "dim": args.dim,
        "n_layers": args.num_layers,
        "n_heads": args.num_heads,
        "n_kv_heads": args.num_kv_heads,
        "vocab_size": args.vocab_size,
        "norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "use_scaled_rope": scaling is not None,
        **scaled,
        "attention_chunk_size": args.chunk,
        "nope_layer_interval": interval if args.layers_without_positions else None,
        "use_qk_norm": args.norms_qk,
        "attn_temperature_tuning": args.temperature is not None,
        **tuned,
        **{key: value for key, value in widths.items() if key != "moe_args"},
        "moe_args": moe | widths["moe_args"],
    }


def _step(chosen: Sequence[int], num_layers: int) -> int | None:
    """The step by which the last of every so many layers is chosen; None if none are, or others."""
    step = chosen[0] + 1 if chosen else None
    return step if step and list(chosen) == list(range(step - 1, num_layers, step)) else None


def _multiple_of(params: Mapping[str, Any]) -> int:
    return int(params.get("multiple_of") or 256)


def _expert_hidden(params: Mapping[str, Any], experts: Mapping[str, Any]) -> int:
    """Meta's width of an expert (moe.py, MoE): 2/3 of ffn_exp · dim, scaled, shared by the experts of a token."""
    if not isinstance(params.get("ffn_exp"), int | float):
        raise CheckpointError("params.json lacks numbers that define the model:" + list_offenders(["ffn_exp"]))
    multiplier = params.get("ffn_dim_multiplier")
    hidden = int((1.0 if multiplier is None else multiplier) * int(2 * int(params["ffn_exp"] * params["dim"]) / 3))
    if experts.get("auto_scale_F", True):
        hidden = int(hidden / (experts.get("capacity_factor", 1.0) + 1))
    return hidden + -hidden % _multiple_of(params)


def _widths(args: Llama4Args) -> dict[str, Any] | None:
    """Numbers for which Meta's formulas give the two widths; None if none were found."""
    base, common = int(2 * int(4 * args.dim) / 3), gcd(args.ffn_hidden, args.expert_hidden)
    for multiple in (m for m in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1) if common % m == 0):
        for multiplier in (1.2, 1.3, 1.5, 1.0, args.ffn_hidden / base, (args.ffn_hidden + 0.5) / base):
            if ffn_hidden(args.dim, multiple_of=multiple, multiplier=multiplier) != args.ffn_hidden:
                continue
            found = {"multiple_of": multiple, "ffn_dim_multiplier": multiplier}
            exact = 1.5 * args.expert_hidden / multiplier / args.dim
            choices = [(4.0, True), *((exact + extra / args.dim, False) for extra in (0, 1, 2, 3))]
            for expansion, scales in choices:
                scaled = {"auto_scale_F": scales, "capacity_factor": 1.0}
                if _expert_hidden(found | {"ffn_exp": expansion, "dim": args.dim}, scaled) == args.expert_hidden:
                    return found | {"ffn_exp": expansion, "moe_args": scaled}
    return None
