"""GPT-OSS: attention with sinks and windows, and experts with biases; its numbers, flavors and parameters."""

from dataclasses import dataclass, field
from typing import Any

from converters.families.args import BALANCE_RATE, DecoderArgs
from converters.families.base import FlavorAttention
from converters.families.blocks import Block, Experts, GroupedQuery, Norm, rope_of
from converters.families.limits import LAYERS, LENGTH, NUM_EXPERTS, Limits, limited
from converters.families.parameters import parameters_of
from converters.families.rope import YarnRope


@dataclass(frozen=True, slots=True)
class GptOssArgs(DecoderArgs):
    """The numbers of a GPT-OSS. Every layer has experts, `ffn_hidden` wide."""

    window: int = field(default=128, metadata=limited(LENGTH))  # tokens that a layer in `window_layers` attends to
    window_layers: tuple[int, ...] = field(default=(), metadata=limited(LAYERS))
    num_experts: int = field(default=32, metadata=limited(NUM_EXPERTS, "num_local_experts"))
    experts_per_token: int = field(default=4, metadata=limited(NUM_EXPERTS, "num_experts_per_tok"))
    clamp: float = field(default=7.0, metadata=limited(Limits(float, 0, 1e9), "swiglu_limit"))  # see Experts
    balance_rate: float = field(default=1e-3, metadata=BALANCE_RATE)


def block(args: GptOssArgs, layer: int) -> Block:
    """Sinks everywhere, windows in `window_layers`.

    The weights are a softmax over the chosen experts' logits, which is that over all experts, divided by its sum.
    """
    attention = GroupedQuery(
        rope_of(args, pairs=False),
        qkv_bias=args.attention_bias,
        out_bias=args.attention_bias,
        window=args.window if layer in args.window_layers else None,
        has_sinks=True,
    )
    experts = Experts(
        num=args.num_experts,
        top_k=args.experts_per_token,
        hidden=args.ffn_hidden,
        balance_rate=args.balance_rate,
        has_biases=True,
        clamp=args.clamp,
        fused_rows=True,
    )
    return Block(attention, experts, Norm(args.norm_eps))


parameters = parameters_of(block)


def _args(dim: int, layers: int, experts: int, hidden: int = 2880, **rest: Any) -> GptOssArgs:
    """The head size is given: it is not dim / heads."""
    scaling = YarnRope(32.0, rest.pop("original", 4096), truncate=False)
    numbers: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "vocab_size": 201088}
    numbers |= {"rope_theta": 150000.0, "rope_scaling": scaling, "window_layers": tuple(range(0, layers, 2))} | rest
    return GptOssArgs(dim, layers, ffn_hidden=hidden, num_experts=experts, attention_bias=True, **numbers)


FLAVORS = {
    "debugmodel": _args(256, 4, 8),
    # small on purpose, for parity tests: more experts than have one digit, other sizes than dim, a short window, and
    # lengths beyond YaRN's original one
    "debug_window": _args(
        128,
        3,
        12,
        96,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=2048,
        window=8,
        max_seq_len=1024,
        original=64,
    ),
    "20b": _args(2880, 24, 32),
    "120b": _args(2880, 36, 128),
}
ATTENTION_OF = dict.fromkeys(("debugmodel", "20b", "120b"), FlavorAttention("flex"))
