"""Llama 4: layers without positions, chunked attention, and experts whose input is scaled; numbers and parameters."""

from dataclasses import dataclass, field
from typing import Any

from converters.families.args import BALANCE_RATE, DecoderArgs
from converters.families.base import FlavorAttention
from converters.families.blocks import Block, Dense, Experts, GroupedQuery, Norm, Temperature, rope_of
from converters.families.limits import FLAG, LAYERS, LENGTH, NUM_EXPERTS, SIZE, Limits, limited
from converters.families.meta_params import ffn_hidden
from converters.families.parameters import parameters_of
from converters.families.rope import RopeScaling


@dataclass(frozen=True, slots=True)
class Llama4Args(DecoderArgs):
    """The numbers of a Llama 4's text model. `ffn_hidden` is that of the dense layers."""

    sparse_layers: tuple[int, ...] = field(default=(), metadata=limited(LAYERS, "moe_layers"))  # those with experts
    num_experts: int = field(default=16, metadata=limited(NUM_EXPERTS, "num_local_experts"))
    experts_per_token: int = field(default=1, metadata=limited(NUM_EXPERTS, "num_experts_per_tok"))
    expert_hidden: int = field(default=8192, metadata=limited(SIZE))  # of the shared expert, too
    # Layers with no rotation, which attend to the whole sequence
    layers_without_positions: tuple[int, ...] = field(default=(), metadata=limited(LAYERS))
    # See GroupedQuery; of the layers with rotation
    chunk: int | None = field(default=None, metadata=limited(LENGTH, "attention_chunk_size"))
    norms_qk: bool = field(default=False, metadata=limited(FLAG, "use_qk_norm"))  # of the layers with rotation
    # See Temperature; of the layers without rotation
    temperature: float | None = field(default=None, metadata=limited(Limits(float, 0, 1e9), "attn_scale"))
    temperature_length: int = field(default=8192, metadata=limited(LENGTH, "floor_scale"))
    balance_rate: float = field(default=1e-3, metadata=BALANCE_RATE)


def block(args: Llama4Args, layer: int) -> Block:
    """Rotation, chunks and norms in most layers, temperature in the others; experts in `sparse_layers`."""
    norm, bias = Norm(args.norm_eps), args.attention_bias
    if layer in args.layers_without_positions:
        temperature = None
        if args.temperature is not None:
            temperature = Temperature(args.temperature, args.temperature_length, first=1)
        attention = GroupedQuery(None, qkv_bias=bias, out_bias=bias, temperature=temperature)
    else:
        qk_norm = Norm(args.norm_eps, has_weight=False) if args.norms_qk else None
        attention = GroupedQuery(
            rope_of(args, pairs=True), qkv_bias=bias, out_bias=bias, qk_norm=qk_norm, chunk=args.chunk
        )
    if layer not in args.sparse_layers:
        return Block(attention, Dense(args.ffn_hidden, has_biases=args.mlp_bias), norm)
    experts = Experts(
        num=args.num_experts,
        top_k=args.experts_per_token,
        hidden=args.expert_hidden,
        normalize=False,
        score="sigmoid",
        shared_hidden=args.expert_hidden,
        balance_rate=args.balance_rate,
        scales_input=True,
        chooses_by_logits=True,
    )
    return Block(attention, experts, norm)


parameters = parameters_of(block)


def _args(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, *, step: int, **rest: Any) -> Llama4Args:
    """Experts in every `step`-th layer."""
    numbers: dict[str, Any] = {"vocab_size": 202048, "head_dim": dim // heads, "max_seq_len": 1048576}
    numbers |= {"sparse_layers": tuple(range(step - 1, layers, step))} | rest
    return Llama4Args(dim, layers, heads, kv_heads, ffn_hidden=hidden, **numbers)


def _in_turn(layers: int, *, chunk: int, norms_qk: bool) -> dict[str, Any]:
    """Every fourth layer without positions, and what belongs to it, as the published models have it."""
    return {
        "layers_without_positions": tuple(range(3, layers, 4)),
        "chunk": chunk,
        "norms_qk": norms_qk,
        "temperature": 0.1,
    }


_SCALING = RopeScaling(16.0, 1.0, 1.0, 8192)
_HIDDEN = ffn_hidden(5120, multiple_of=2048, multiplier=1.2)
_DEBUG: dict[str, Any] = {"step": 2, "vocab_size": 2048, "num_experts": 8, "expert_hidden": 512}
_DEBUG |= {"rope_scaling": _SCALING}
_SMALL: dict[str, Any] = {"vocab_size": 2048, "head_dim": 32, "num_experts": 12, "expert_hidden": 96}
_SMALL |= {"max_seq_len": 1024, "temperature_length": 16}
_SCOUT: dict[str, Any] = {"step": 1, "max_seq_len": 10485760, "rope_scaling": _SCALING}
_MAVERICK: dict[str, Any] = {"step": 2, "num_experts": 128}
# torchtitan's names: those without `irope` rotate in every layer and attend to all tokens
FLAVORS = {
    "debugmodel": _args(256, 6, 16, 16, ffn_hidden(256, multiple_of=256), **_DEBUG),
    "debugmodel_irope": _args(
        256, 6, 16, 16, ffn_hidden(256, multiple_of=256), **_DEBUG, **_in_turn(6, chunk=256, norms_qk=True)
    ),
    # small on purpose, for parity tests: every size differs from every other, chunks and the length of the temperature
    # are shorter than the sequences
    "debug_scout": _args(
        128, 5, 8, 4, 384, step=1, rope_scaling=_SCALING, **_SMALL, **_in_turn(5, chunk=24, norms_qk=True)
    ),
    "debug_maverick": _args(128, 5, 8, 4, 384, step=2, **_SMALL, **_in_turn(5, chunk=24, norms_qk=False)),
    "17bx16e": _args(5120, 48, 40, 8, _HIDDEN, **_SCOUT),
    "17bx16e_irope": _args(5120, 48, 40, 8, _HIDDEN, **_SCOUT, **_in_turn(48, chunk=8192, norms_qk=True)),  # Scout
    "17bx128e": _args(5120, 48, 40, 8, _HIDDEN, **_MAVERICK),
    "17bx128e_irope": _args(  # Maverick
        5120, 48, 40, 8, _HIDDEN, **_MAVERICK, **_in_turn(48, chunk=8192, norms_qk=False)
    ),
}
_BLOCK_CAUSAL = FlavorAttention("flex", "block_causal")
ATTENTION_OF = {name: _BLOCK_CAUSAL for name in FLAVORS if name.endswith("_irope")}
