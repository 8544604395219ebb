"""DeepSeek V3 and V2: latent attention and experts in groups; their numbers, flavors and parameters."""

from dataclasses import dataclass, field
from typing import Any

from converters.families.args import BALANCE_RATE, ONLY_FOR_TRAINING, DecoderArgs
from converters.families.base import FlavorAttention
from converters.families.blocks import Block, Dense, Experts, Latent, Norm, rope_of
from converters.families.limits import FACTOR, FLAG, NUM_EXPERTS, SIZE, Limits, limited
from converters.families.parameters import Parameter, Role, layer_parameters, parameters_of
from converters.families.rope import YarnRope, yarn_magnitude

MTP_NORMS = ("enorm", "hnorm", "mtp_norm")  # of the next token's embedding, the last features, the result
SIGMOID, SOFTMAX = "sigmoid", "softmax"  # V3's score of an expert, and V2's
_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says: the published code passes none


@dataclass(frozen=True, slots=True)
class DeepSeekArgs(DecoderArgs):
    """The numbers of a DeepSeek V3 or V2. `head_dim` is that of q and k: features without rotation, then rotated ones.

    `ffn_hidden` is that of the dense layers, which are the first ones.
    """

    # Size of the latent that q is made of; 0: q is made of the input
    q_rank: int = field(default=0, metadata=limited(Limits(int, 0, 2**31 - 1), "q_lora_rank"))
    kv_rank: int = field(default=512, metadata=limited(SIZE, "kv_lora_rank"))
    rotary_dim: int = field(default=64, metadata=limited(SIZE, "qk_rope_head_dim"))
    value_dim: int = field(default=128, metadata=limited(SIZE, "v_head_dim"))
    num_dense_layers: int = field(default=1, metadata=limited(Limits(int, 0, 10_000), "first_k_dense_replace"))
    num_experts: int = field(default=64, metadata=limited(NUM_EXPERTS, "n_routed_experts", "num_local_experts"))
    experts_per_token: int = field(default=6, metadata=limited(NUM_EXPERTS, "num_experts_per_tok"))
    expert_hidden: int = field(default=1408, metadata=limited(SIZE, "moe_intermediate_size"))
    num_shared_experts: int = field(default=2, metadata=limited(NUM_EXPERTS, "n_shared_experts"))
    score: str = SIGMOID
    normalize_weights: bool = field(default=True, metadata=limited(FLAG, "norm_topk_prob"))
    route_scale: float = field(default=1.0, metadata=limited(FACTOR, "routed_scaling_factor"))
    num_groups: int = field(default=1, metadata=limited(NUM_EXPERTS, "n_group"))
    top_groups: int = field(default=1, metadata=limited(NUM_EXPERTS, "topk_group"))
    balance_rate: float = field(default=1e-3, metadata=BALANCE_RATE)
    # Layers behind the others that a checkpoint keeps, and the model does not compute (see converters.model.mtp)
    num_mtp_layers: int = field(
        default=0, metadata=ONLY_FOR_TRAINING | limited(Limits(int, 0, 100), "num_nextn_predict_layers")
    )


def block(args: DeepSeekArgs, layer: int) -> Block:
    """Latent attention everywhere; experts behind the dense layers.

    V3 rates a group of experts by the sum of its two best, V2 by its best one.
    """
    norm = Norm(args.norm_eps)
    attention = Latent(
        num_heads=args.num_heads,
        q_rank=args.q_rank,
        kv_rank=args.kv_rank,
        plain_dim=args.head_dim - args.rotary_dim,
        value_dim=args.value_dim,
        rope=rope_of(args, pairs=True, width=args.rotary_dim),
        norm=Norm(_LATENT_EPS),
        scale=softmax_scale(args),
    )
    if layer < args.num_dense_layers:
        return Block(attention, Dense(args.ffn_hidden, has_biases=args.mlp_bias), norm)
    experts = Experts(
        num=args.num_experts,
        top_k=args.experts_per_token,
        hidden=args.expert_hidden,
        normalize=args.normalize_weights,
        score=args.score,
        scale=args.route_scale,
        num_groups=args.num_groups,
        top_groups=args.top_groups,
        best_of_group=2 if args.score == SIGMOID else 1,
        shared_hidden=args.expert_hidden * args.num_shared_experts,
        balance_rate=args.balance_rate,
    )
    return Block(attention, experts, norm)


def softmax_scale(args: DecoderArgs) -> float:
    """The factor of the scores: 1 / √H, times YaRN's magnitude squared, at every length (DeepSeek's own inference)."""
    scaling, scale = args.rope_scaling, float(args.head_dim**-0.5)
    if not isinstance(scaling, YarnRope) or not scaling.mscale_all_dim:
        return scale
    return scale * yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


def parameters(args: DeepSeekArgs) -> list[Parameter]:
    """Every parameter, in torchtitan's names.

    Layers for multi-token prediction are like the one after the last, with norms of what they get, and a projection.
    """
    listed = parameters_of(block)(args)
    for k in range(args.num_mtp_layers):
        layer = f"mtp_layers.{k}"
        listed += layer_parameters(layer, args, block(args, args.num_layers + k))
        listed += [Parameter(f"{layer}.{name}.weight", (args.dim,), Role.NORM) for name in MTP_NORMS]
        listed.append(Parameter(f"{layer}.eh_proj.weight", (args.dim, 2 * args.dim), Role.MTP))
    return listed


def _args(dim: int, layers: int, heads: int, hidden: int, **rest: Any) -> DeepSeekArgs:
    """YaRN's `mscale_all_dim` is given: it scales the scores of attention, and cosine and sine stay as they are."""
    scaling = None
    if (magnitude := rest.pop("mscale", None)) is not None:
        scaling = YarnRope(40.0, rest.pop("original", 4096), mscale=magnitude, mscale_all_dim=magnitude)
    numbers: dict[str, Any] = {"head_dim": 192, "vocab_size": 102400, "norm_eps": 1e-6, "rope_theta": 1e4}
    numbers |= {"max_seq_len": 163840, "rope_scaling": scaling} | rest
    return DeepSeekArgs(dim, layers, heads, heads, ffn_hidden=hidden, **numbers)


_V2: dict[str, Any] = {"score": SOFTMAX, "normalize_weights": False}
_SMALL: dict[str, Any] = {
    "head_dim": 24,
    "rotary_dim": 8,
    "value_dim": 20,
    "kv_rank": 32,
    "num_experts": 12,
    "experts_per_token": 3,
    "expert_hidden": 96,
    "vocab_size": 2048,
    "max_seq_len": 1024,
    "original": 64,
}
_DEBUG = _args(
    256,
    6,
    16,
    1024,
    mscale=0.707,
    max_seq_len=16384,
    vocab_size=2048,
    num_experts=8,
    experts_per_token=3,
    expert_hidden=256,
    **_V2,
)
_GROUPS: dict[str, Any] = {"num_groups": 4, "top_groups": 2}
FLAVORS = {
    "debugmodel": _DEBUG,
    "debugmodel_flex_attn": _DEBUG,
    # small on purpose, for parity tests: every size differs from every other, and lengths beyond YaRN's original one
    "debug_v3": _args(
        128, 3, 4, 384, mscale=1.0, q_rank=48, num_shared_experts=1, route_scale=2.5, **_GROUPS, **_SMALL
    ),
    "debug_v2": _args(128, 3, 4, 384, mscale=0.707, q_rank=48, route_scale=16.0, **_GROUPS, **_SMALL, **_V2),
    "debug_v2_lite": _args(128, 3, 4, 384, mscale=0.707, **_SMALL, **_V2),
    "16B": _args(2048, 27, 16, 10944, mscale=0.707, **_V2),  # DeepSeek V2 Lite
    "236B": _args(
        5120,
        60,
        128,
        12288,
        mscale=1.0,
        q_rank=1536,
        num_experts=160,
        expert_hidden=1536,
        num_groups=8,
        top_groups=3,
        route_scale=16.0,
        **_V2,
    ),
    "671B": _args(
        7168,
        61,
        128,
        18432,
        mscale=1.0,
        vocab_size=129280,
        q_rank=1536,
        num_dense_layers=3,
        num_experts=256,
        experts_per_token=8,
        expert_hidden=2048,
        num_shared_experts=1,
        num_groups=8,
        top_groups=4,
        route_scale=2.5,
    ),
    "Moonlight-16B-A3B": _args(
        2048,
        27,
        16,
        11264,
        vocab_size=163840,
        norm_eps=1e-5,
        rope_theta=5e4,
        max_seq_len=8192,
        route_scale=2.446,
    ),
    "Kimi-K2": _args(
        7168,
        61,
        64,
        18432,
        vocab_size=163840,
        rope_theta=5e4,
        rope_scaling=YarnRope(32.0, 4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
        max_seq_len=131072,
        q_rank=1536,
        num_experts=384,
        experts_per_token=8,
        expert_hidden=2048,
        num_shared_experts=1,
        route_scale=2.827,
    ),
}
_BLOCK_CAUSAL = FlavorAttention("flex", "block_causal")
ATTENTION_OF = dict.fromkeys(("debugmodel_flex_attn", "16B", "236B", "671B"), _BLOCK_CAUSAL)
