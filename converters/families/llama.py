"""Llama-like decoders: their parameters, the names that other formats give them, and LlamaForCausalLM's config.json."""

from collections.abc import Mapping
from typing import Any

from converters.families.args import DecoderArgs
from converters.families.base import Naming
from converters.families.blocks import dense_block
from converters.families.hf_config import (
    ConfigClass,
    args_from_hf_config,
    hf_config,
    other_layer_types,
)
from converters.families.parameters import parameters_of
from converters.families.rules import Drop, RopeHalves, Rule

parameters = parameters_of(dense_block)

_L = "layers.{n}."
_WITHIN_LAYER = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
_FEED_FORWARD = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
_NORMS = ("attention_norm", "ffn_norm")


def _with_biases(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A rule for each linear layer's bias behind those of the weights: the same rows in the same order."""
    has_bias = tuple(f"{_L}{module}.weight" for module in _WITHIN_LAYER + _FEED_FORWARD)
    biases = (
        Rule(r.native.replace(".weight", ".bias"), r.foreign.replace(".weight", ".bias"), r.op)
        for r in rules
        if r.native in has_bias
    )
    return (*rules, *biases)


HF = Naming(
    "hf",
    rules=_with_biases(
        (
            Rule("tok_embeddings.weight", "model.embed_tokens.weight"),
            Rule(_L + "attention.wq.weight", "model.layers.{n}.self_attn.q_proj.weight", RopeHalves()),
            Rule(_L + "attention.wk.weight", "model.layers.{n}.self_attn.k_proj.weight", RopeHalves()),
            Rule(_L + "attention.wv.weight", "model.layers.{n}.self_attn.v_proj.weight"),
            Rule(_L + "attention.wo.weight", "model.layers.{n}.self_attn.o_proj.weight"),
            Rule(_L + "feed_forward.w1.weight", "model.layers.{n}.mlp.gate_proj.weight"),
            Rule(_L + "feed_forward.w2.weight", "model.layers.{n}.mlp.down_proj.weight"),
            Rule(_L + "feed_forward.w3.weight", "model.layers.{n}.mlp.up_proj.weight"),
            Rule(_L + "attention_norm.weight", "model.layers.{n}.input_layernorm.weight"),
            Rule(_L + "ffn_norm.weight", "model.layers.{n}.post_attention_layernorm.weight"),
            Rule("norm.weight", "model.norm.weight"),
            Rule("output.weight", "lm_head.weight"),
        )
    ),
    drops=(
        Drop("model.layers.{n}.self_attn.rotary_emb.inv_freq", "recomputed from rope_theta; old files carry it"),
        Drop("model.rotary_emb.inv_freq", "recomputed from rope_theta"),
    ),
)

_UNCHANGED = tuple(
    Rule(f"{name}.weight", f"{name}.weight")
    for name in ("tok_embeddings", *(_L + w for w in _WITHIN_LAYER + _FEED_FORWARD + _NORMS), "norm", "output")
)
META = Naming(  # without biases, as Meta's code is. torchtune, too, wants a tied model's output.weight, and drops it
    "meta", rules=_UNCHANGED, drops=(Drop("rope.freqs", "recomputed from rope_theta"),), repeats_tied=True
)

TORCHTUNE = Naming(  # q and k in native row order; a tied model's output.weight must be absent
    "torchtune",
    rules=(
        Rule("tok_embeddings.weight", "tok_embeddings.weight"),
        Rule(_L + "attention.wq.weight", _L + "attn.q_proj.weight"),
        Rule(_L + "attention.wk.weight", _L + "attn.k_proj.weight"),
        Rule(_L + "attention.wv.weight", _L + "attn.v_proj.weight"),
        Rule(_L + "attention.wo.weight", _L + "attn.output_proj.weight"),
        Rule(_L + "feed_forward.w1.weight", _L + "mlp.w1.weight"),
        Rule(_L + "feed_forward.w2.weight", _L + "mlp.w2.weight"),
        Rule(_L + "feed_forward.w3.weight", _L + "mlp.w3.weight"),
        Rule(_L + "attention_norm.weight", _L + "sa_norm.scale"),
        Rule(_L + "ffn_norm.weight", _L + "mlp_norm.scale"),
        Rule("norm.weight", "norm.scale"),
        Rule("output.weight", "output.weight"),
    ),
)
TITAN_MODEL_PREFIX = Naming(  # torchtitan before its TOML-era flat layout
    "titan_model_prefix",
    rules=tuple(Rule(r.native, "model." + r.foreign) for r in _with_biases(_UNCHANGED)),
    drops=(Drop("model.freqs_cis", "recomputed from rope_theta"),),
)
TITAN_QKV_LINEAR = Naming(  # torchtitan's newest layout
    "titan_qkv_linear",
    rules=tuple(
        Rule(
            r.native,
            r.foreign.replace("attention.w", "attention.qkv_linear.w")
            if ".wo." not in r.foreign and "attention.w" in r.foreign
            else r.foreign.replace("output.weight", "lm_head.weight"),
        )
        for r in _with_biases(_UNCHANGED)
    ),
)

LLAMA_NAMINGS = {n.name: n for n in (HF, META, TORCHTUNE, TITAN_MODEL_PREFIX, TITAN_QKV_LINEAR)}

LLAMA = ConfigClass(
    "Llama",
    "LlamaForCausalLM",
    "llama",
    max_seq_len=2048,
    biases=("attention_bias", "mlp_bias"),
)


def llama_args_from_hf_config(config: Mapping[str, Any]) -> DecoderArgs:
    """args_from_hf_config for LlamaForCausalLM."""
    windows = other_layer_types(config)  # no fields of the class, but transformers' cache uses them in decoding
    if config.get("sliding_window") is not None:
        windows.append(f"sliding_window = {config['sliding_window']!r}")
    return args_from_hf_config(config, LLAMA, also_refused=windows)


def llama_hf_config(args: DecoderArgs) -> dict[str, Any]:
    """hf_config for LlamaForCausalLM."""
    return hf_config(args, LLAMA) | {"mlp_bias": args.mlp_bias, "pretraining_tp": 1}
