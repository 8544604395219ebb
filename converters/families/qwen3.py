"""Qwen 3, dense: numbers, flavors, names without any permutation, and the settings of config.json that are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converters.families.base import Family, ModelArgs, Naming, Parameter, Role
from converters.families.hf_config import (
    QWEN3_FIELDS,
    ConfigClass,
    args_from_hf_config,
    hf_config,
    other_layer_types,
)
from converters.families.llama import (
    HF,
    TITAN_MODEL_PREFIX,
    TITAN_QKV_LINEAR,
    TORCHTUNE,
    layer_parameters,
    list_parameters,
)
from converters.rules import Rule


@dataclass(frozen=True, slots=True)
class Qwen3Args(ModelArgs):
    """The numbers of a Qwen 3."""

    qk_norm: bool = True  # RMSNorm over head_dim on every head of q and k, before RoPE


def parameters(args: ModelArgs) -> list[Parameter]:
    """Llama's, and in each layer one norm for all heads of q and one for those of k, replicated under TP."""
    return list_parameters(args, _layer_parameters)


def _layer_parameters(layer: str, args: ModelArgs) -> list[Parameter]:
    assert isinstance(args, Qwen3Args)
    names = ("q_norm", "k_norm") if args.qk_norm else ()
    norms = [Parameter(f"{layer}.attention.{name}.weight", (args.head_dim,), Role.HEAD_NORM) for name in names]
    return layer_parameters(layer, args) + norms


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
}


def _as_they_are(naming: Naming, *, norms: tuple[str, str]) -> Naming:
    """Llama's names without permutations, because Qwen 3 rotates halves in both forms, and the norms of q and k."""
    rules = tuple(Rule(r.native, r.foreign) for r in naming.rules if not _is_feed_forward_bias(r.native))
    natives = ("layers.{n}.attention.q_norm.weight", "layers.{n}.attention.k_norm.weight")
    return Naming(naming.name, (*rules, *map(Rule, natives, norms)), naming.drops)


def _is_feed_forward_bias(fqn: str) -> bool:
    return ".feed_forward." in fqn and fqn.endswith(".bias")  # the class has none


NAMINGS = (
    _as_they_are(HF, norms=("model.layers.{n}.self_attn.q_norm.weight", "model.layers.{n}.self_attn.k_norm.weight")),
    _as_they_are(TORCHTUNE, norms=("layers.{n}.attn.q_norm.scale", "layers.{n}.attn.k_norm.scale")),
    _as_they_are(
        TITAN_MODEL_PREFIX,
        norms=("model.layers.{n}.attention.q_norm.weight", "model.layers.{n}.attention.k_norm.weight"),
    ),
    _as_they_are(TITAN_QKV_LINEAR, norms=("layers.{n}.attention.q_norm.weight", "layers.{n}.attention.k_norm.weight")),
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
)


def _args_from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    return args_from_hf_config(config, _CONFIG, also_refused=_windows(config))


def _windows(config: Mapping[str, Any]) -> list[str]:
    """What lets a layer see less than the whole sequence; a window that no layer uses is harmless."""
    if config.get("layer_types") is not None:
        return other_layer_types(config)
    first, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers")
    in_use = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    if in_use and not (isinstance(first, int) and isinstance(layers, int) and first >= layers):
        return [f"use_sliding_window = true, from layer {first} on"]
    return []


def _hf_config(args: ModelArgs) -> dict[str, Any]:
    no_window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": args.num_layers}
    return hf_config(args, _CONFIG) | no_window


QWEN3 = Family(
    name="qwen3",
    flavors=FLAVORS,
    parameters=parameters,
    namings={naming.name: naming for naming in NAMINGS},
    args_from_hf_config=_args_from_hf_config,
    hf_config=_hf_config,
    hf_architectures=("Qwen3ForCausalLM",),
    hf_model_types=("qwen3",),
    args_type=Qwen3Args,
)
