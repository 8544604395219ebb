"""Qwen 3, dense and mixture of experts: numbers, flavors, names without any permutation, and their config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError
from converters.families.args import BALANCE_RATE, OMITTED_AT_DEFAULT, DecoderArgs
from converters.families.base import Family, Naming
from converters.families.blocks import Block, Dense, Experts, GroupedQuery, Norm, rope_of
from converters.families.experts import HF_EXPERTS, HF_FUSED_EXPERTS, TITAN_EXPERTS, TITAN_NEWEST_EXPERTS
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
from converters.families.limits import FLAG, LAYERS, NUM_EXPERTS, SIZE, Limits, limited
from converters.families.llama import HF, TITAN_MODEL_PREFIX, TITAN_QKV_LINEAR, TORCHTUNE
from converters.families.parameters import parameters_of
from converters.families.rules import Rule


def _of_experts(default: Any, limits: Limits, *names: str) -> Any:
    """A field that files of dense models do not have."""
    return field(default=default, metadata=OMITTED_AT_DEFAULT | limited(limits, *names))


@dataclass(frozen=True, slots=True)
class Qwen3Args(DecoderArgs):
    """The numbers of a Qwen 3."""

    qk_norm: bool = True  # RMSNorm over head_dim on every head of q and k, before RoPE
    num_experts: int = _of_experts(0, Limits(int, 0, 65_536))  # 0: every layer is dense, and ffn_hidden wide
    experts_per_token: int = _of_experts(8, NUM_EXPERTS, "num_experts_per_tok")
    expert_hidden: int = _of_experts(768, SIZE, "moe_intermediate_size")
    normalize_weights: bool = _of_experts(True, FLAG, "norm_topk_prob")  # of the chosen experts, to a sum of 1
    sparse_step: int = _of_experts(1, Limits(int, 1, 10_000), "decoder_sparse_step")  # every so many have experts
    dense_layers: tuple[int, ...] = _of_experts((), LAYERS, "mlp_only_layers")  # and these never
    balance_rate: float = field(default=1e-3, metadata=BALANCE_RATE)


def block(args: Qwen3Args, layer: int) -> Block:
    """Norms of each head of q and k; experts in every `sparse_step`-th layer, but for `dense_layers`."""
    norm, bias = Norm(args.norm_eps), args.attention_bias
    attention = GroupedQuery(
        rope_of(args, pairs=False), qkv_bias=bias, out_bias=bias, qk_norm=norm if args.qk_norm else None
    )
    if not args.num_experts or layer in args.dense_layers or (layer + 1) % args.sparse_step:
        return Block(attention, Dense(args.ffn_hidden, has_biases=args.mlp_bias), norm)
    experts = Experts(
        num=args.num_experts,
        top_k=args.experts_per_token,
        hidden=args.expert_hidden,
        normalize=args.normalize_weights,
        balance_rate=args.balance_rate,
    )
    return Block(attention, experts, norm)


def _args(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, **rest: Any) -> Qwen3Args:
    """The head size is given: it is not dim / heads."""
    rest = {"vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 40960} | rest
    return Qwen3Args(dim, layers, heads, kv_heads, rest.pop("head_dim", 128), hidden, **rest)


FLAVORS = {
    "debugmodel": _args(256, 8, 16, 8, 3072, vocab_size=2048, max_seq_len=4096, tied=True),
    # small on purpose, for parity tests: grouped-query attention, heads wider than dim / heads; untied and tied
    "debug_gqa": _args(128, 4, 8, 4, 384, vocab_size=2048, head_dim=32),
    "debug_tied": _args(128, 4, 8, 4, 384, vocab_size=2048, head_dim=32, tied=True),
    "0.6B": _args(1024, 28, 16, 8, 3072, tied=True),
    "1.7B": _args(2048, 28, 16, 8, 6144, tied=True),
    "4B": _args(2560, 36, 32, 8, 9728, tied=True),
    "8B": _args(4096, 36, 32, 8, 12288),
    "14B": _args(5120, 40, 40, 8, 17408),
    "32B": _args(5120, 64, 64, 8, 25600),
    "debugmodel_moe": _args(
        256, 8, 16, 8, 3072, vocab_size=2048, max_seq_len=4096, num_experts=64, experts_per_token=8, expert_hidden=768
    ),
    # small on purpose, for parity tests: as many experts as make their order as strings wrong, and dense layers
    "debug_moe": _args(
        128, 4, 8, 4, 384, vocab_size=2048, head_dim=32, num_experts=12, experts_per_token=3, expert_hidden=96
    ),
    "debug_moe_mixed": _args(
        128,
        4,
        8,
        4,
        384,
        vocab_size=2048,
        head_dim=32,
        num_experts=12,
        experts_per_token=3,
        expert_hidden=128,
        sparse_step=2,
        dense_layers=(3,),
    ),
    "30B-A3B": _args(
        2048, 48, 32, 4, 6144, max_seq_len=262144, num_experts=128, experts_per_token=8, expert_hidden=768
    ),
    "235B-A22B": _args(
        4096, 94, 64, 4, 12288, rope_theta=5e6, num_experts=128, experts_per_token=8, expert_hidden=1536
    ),
}


def _as_they_are(naming: Naming, *, norms: tuple[str, str]) -> Naming:
    """Llama's names without permutations, because Qwen 3 rotates halves in both forms, and the norms of q and k."""
    rules = tuple(Rule(r.native, r.foreign) for r in naming.rules if not _is_feed_forward_bias(r.native))
    natives = ("layers.{n}.attention.q_norm.weight", "layers.{n}.attention.k_norm.weight")
    return Naming(naming.name, (*rules, *map(Rule, natives, norms)), naming.drops)


def _is_feed_forward_bias(fqn: str) -> bool:
    return ".feed_forward." in fqn and fqn.endswith(".bias")  # the class has none


_HF = _as_they_are(HF, norms=("model.layers.{n}.self_attn.q_norm.weight", "model.layers.{n}.self_attn.k_norm.weight"))
_PREFIXED = _as_they_are(
    TITAN_MODEL_PREFIX,
    norms=("model.layers.{n}.attention.q_norm.weight", "model.layers.{n}.attention.k_norm.weight"),
)
_NEWEST = _as_they_are(
    TITAN_QKV_LINEAR, norms=("layers.{n}.attention.q_norm.weight", "layers.{n}.attention.k_norm.weight")
)
NAMINGS = (
    replace(_HF, rules=(*_HF.rules, *HF_EXPERTS)),
    replace(_HF, name="hf_fused", rules=(*_HF.rules, *HF_FUSED_EXPERTS)),
    _as_they_are(TORCHTUNE, norms=("layers.{n}.attn.q_norm.scale", "layers.{n}.attn.k_norm.scale")),
    replace(
        _PREFIXED,
        rules=(*_PREFIXED.rules, *(replace(rule, foreign="model." + rule.foreign) for rule in TITAN_EXPERTS)),
    ),
    replace(_NEWEST, rules=(*_NEWEST.rules, *TITAN_NEWEST_EXPERTS)),
)

QWEN3_FIELDS: Fields = DECODER_FIELDS | dict.fromkeys(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), TRANSLATED
)
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
QWEN3_MOE_FIELDS: Fields = (
    DECODER_FIELDS
    | dict.fromkeys(("use_sliding_window", "sliding_window", *_EXPERT_FIELDS), TRANSLATED)
    | dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), TRANSLATED)
    | dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), NO_EFFECT)  # of a loss
)


_CONFIG = ConfigClass(
    called="Qwen 3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    head_dim=128,
    num_kv_heads=32,
    max_seq_len=32768,
    args_type=Qwen3Args,
    biases=("attention_bias",),
    fields=QWEN3_FIELDS,
    limits={"use_sliding_window": FLAG, "num_local_experts": NUM_EXPERTS},
)


_MOE_CONFIG = replace(
    _CONFIG,
    called="Qwen 3 MoE",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    head_dim=None,
    num_kv_heads=4,
    fields=QWEN3_MOE_FIELDS,
)


def _args_from_hf_config(config: Mapping[str, Any]) -> DecoderArgs:
    named = config.get("model_type") or next(iter(config.get("architectures") or ()), "")
    if named not in (_MOE_CONFIG.model_type, _MOE_CONFIG.architecture):
        return args_from_hf_config(config, _CONFIG, also_refused=_windows(config))
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    refused = [] if window is None else [f"use_sliding_window = true, sliding_window = {window!r}"]
    args = args_from_hf_config(config, _MOE_CONFIG, also_refused=refused)
    assert isinstance(args, Qwen3Args)
    return replace(args, **_expert_numbers(config))


def _expert_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of Qwen3MoeConfig, by the class's defaults if absent. transformers 5 writes num_local_experts."""
    if config.get("num_experts") == 0:
        raise UnsupportedError(
            "config.json describes a Qwen 3 MoE without experts", hint="dense ones are of type qwen3"
        )
    counts = {key: config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{key} {value}" for key, value in counts.items())
        raise CheckpointError(f"config.json has two numbers of experts: {found}", hint="correct the one that is wrong")

    def given(key: str, default: Any) -> Any:
        return default if config.get(key) is None else config[key]

    return {
        "num_experts": next(iter(counts.values()), 128),
        "experts_per_token": given("num_experts_per_tok", 8),
        "expert_hidden": given("moe_intermediate_size", 768),
        "normalize_weights": given("norm_topk_prob", False),
        "sparse_step": given("decoder_sparse_step", 1),
        "dense_layers": tuple(sorted(set(given("mlp_only_layers", ())))),
    }


def _windows(config: Mapping[str, Any]) -> list[str]:
    """What lets a layer see less than the whole sequence; a window that no layer uses is harmless."""
    if config.get("layer_types") is not None:
        return other_layer_types(config)
    first, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers")
    in_use = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    if in_use and not (isinstance(first, int) and isinstance(layers, int) and first >= layers):
        return [f"use_sliding_window = true, from layer {first} on"]
    return []


def _hf_config(args: Qwen3Args) -> dict[str, Any]:
    no_window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": args.num_layers}
    if not args.num_experts:
        return hf_config(args, _CONFIG) | no_window
    return (
        hf_config(args, _MOE_CONFIG)
        | no_window
        | {
            "num_experts": args.num_experts,
            "num_experts_per_tok": args.experts_per_token,
            "moe_intermediate_size": args.expert_hidden,
            "norm_topk_prob": args.normalize_weights,
            "decoder_sparse_step": args.sparse_step,
            "mlp_only_layers": list(args.dense_layers),
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    )


QWEN3 = Family(
    name="qwen3",
    flavors=FLAVORS,
    parameters=parameters_of(block),
    namings={naming.name: naming for naming in NAMINGS},
    args_from_hf_config=_args_from_hf_config,
    hf_config=_hf_config,
    hf_architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    hf_model_types=("qwen3", "qwen3_moe"),
    args_type=Qwen3Args,
    block=block,
    keep_float32=("layers.{n}.moe.expert_bias",),
)
