"""The family of DeepSeek V3 and V2, and what shares their classes: names in every format."""

from dataclasses import replace

from converters.families.base import Family, Naming
from converters.families.deepseek_config import MODEL_TYPES, V2, V3, args_of, config_of, problems_of
from converters.families.deepseek_torchtitan import as_torchtitan_trained
from converters.families.deepseek_v3 import ATTENTION_OF, FLAVORS, MTP_NORMS, SOFTMAX, DeepSeekArgs, block, parameters
from converters.families.experts import (
    HF_EXPERTS,
    HF_FUSED_EXPERTS,
    NO_EXPERT_BIAS,
    TITAN_NEWEST_EXPERTS,
)
from converters.families.parameters import EMBEDDING, OUTPUT
from converters.families.rules import Drop, Rule, Stacked, Zeros

_L, _HF_L = "layers.{n}.", "model.layers.{n}."
_EXPERT_BIAS = _L + "moe.expert_bias"
# Rotated features are pairs in all of them, so that no row moves
_HF_COMMON = (
    Rule("tok_embeddings.weight", "model.embed_tokens.weight"),
    Rule(_L + "attention.wq.weight", _HF_L + "self_attn.q_proj.weight"),
    Rule(_L + "attention.wq_a.weight", _HF_L + "self_attn.q_a_proj.weight"),
    Rule(_L + "attention.q_norm.weight", _HF_L + "self_attn.q_a_layernorm.weight"),
    Rule(_L + "attention.wq_b.weight", _HF_L + "self_attn.q_b_proj.weight"),
    Rule(_L + "attention.wkv_a.weight", _HF_L + "self_attn.kv_a_proj_with_mqa.weight"),
    Rule(_L + "attention.kv_norm.weight", _HF_L + "self_attn.kv_a_layernorm.weight"),
    Rule(_L + "attention.wkv_b.weight", _HF_L + "self_attn.kv_b_proj.weight"),
    Rule(_L + "attention.wo.weight", _HF_L + "self_attn.o_proj.weight"),
    Rule(_L + "feed_forward.w1.weight", _HF_L + "mlp.gate_proj.weight"),
    Rule(_L + "feed_forward.w2.weight", _HF_L + "mlp.down_proj.weight"),
    Rule(_L + "feed_forward.w3.weight", _HF_L + "mlp.up_proj.weight"),
    *(
        Rule(f"{_L}moe.shared_experts.{ours}.weight", f"{_HF_L}mlp.shared_experts.{theirs}_proj.weight")
        for ours, theirs in {"w1": "gate", "w2": "down", "w3": "up"}.items()
    ),
    Rule(_L + "attention_norm.weight", _HF_L + "input_layernorm.weight"),
    Rule(_L + "ffn_norm.weight", _HF_L + "post_attention_layernorm.weight"),
    Rule("norm.weight", "model.norm.weight"),
    Rule("output.weight", "lm_head.weight"),
    Rule(_EXPERT_BIAS, _HF_L + "mlp.gate.e_score_correction_bias"),
)
_DROPS = (Drop(_HF_L + "self_attn.rotary_emb.inv_freq", "recomputed from rope_theta; old files carry it"),)


def _without_bias(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.native != _EXPERT_BIAS)


_HF = Naming("hf", (*_HF_COMMON, *_without_bias(HF_EXPERTS)), _DROPS, has_buffers=True)
_FUSED = Naming("hf_fused", (*_HF_COMMON, *_without_bias(HF_FUSED_EXPERTS)), _DROPS, has_buffers=True)
_DENSE_NATIVE = tuple(rule.native for rule in _without_bias(_HF_COMMON))
_NEWEST = Naming(  # torchtitan's newest layout
    "titan_qkv_linear",
    (
        *(Rule(name, "lm_head.weight" if name == "output.weight" else name) for name in _DENSE_NATIVE),
        *TITAN_NEWEST_EXPERTS,
    ),
)


def _own_name(native: str) -> str:
    """The name in the code that DeepSeek publishes with its models."""
    renamed = {"tok_embeddings.weight": "embed.weight", "output.weight": "head.weight"}.get(native, native)
    for ours, theirs in ((".attention.", ".attn."), (".feed_forward.", ".ffn."), (".moe.", ".ffn.")):
        renamed = renamed.replace(ours, theirs)
    return renamed.replace(".attention_norm.", ".attn_norm.")


_OWN = Naming(
    "deepseek",
    (
        *(Rule(name, _own_name(name)) for name in _DENSE_NATIVE),
        Rule(_L + "moe.router.gate.weight", _L + "ffn.gate.weight"),
        Rule(_EXPERT_BIAS, _L + "ffn.gate.bias"),
        *(Rule(f"{_L}moe.experts.{w}", f"{_L}ffn.experts.{{e}}.{w}.weight", Stacked()) for w in ("w1", "w2", "w3")),
    ),
    has_buffers=True,
)
_BY_LOSS = tuple(naming.name for naming in (_HF, _FUSED, _OWN))  # where V2, balanced by a loss, has no offset


def _naming_for(naming: Naming, args: DeepSeekArgs) -> Naming:
    """V2 has no name for the experts' offsets in the formats of its own code and transformers.

    Transformers numbers layers for multi-token prediction after the others; DeepSeek's own form leaves them out.
    """
    if args.score == SOFTMAX and naming.name in _BY_LOSS:
        naming = replace(naming, rules=(*_without_bias(naming.rules), Rule(_EXPERT_BIAS, "", Zeros(NO_EXPERT_BIAS))))
    if not args.num_mtp_layers or naming.name == _OWN.name:
        return naming
    is_hf = naming.name in (_HF.name, _FUSED.name)
    prefix = next(rule.foreign for rule in naming.rules if rule.native.startswith(_L)).partition(_L)[0]
    rules, repeats = list(naming.rules), []
    for k in range(args.num_mtp_layers):
        theirs = f"layers.{args.num_layers + k}." if is_hf else f"mtp_layers.{k}."
        for rule in naming.rules:
            if rule.native.startswith(_L):
                rules.append(
                    replace(rule, native=f"mtp_{_in(rule.native, k)}", foreign=rule.foreign.replace(_L, theirs))
                )
        for name in (*MTP_NORMS, "eh_proj"):
            called = "shared_head.norm" if is_hf and name == "mtp_norm" else name
            rules.append(Rule(f"mtp_layers.{k}.{name}.weight", f"{prefix}{theirs}{called}.weight"))
        if is_hf:
            repeats.append(Rule(EMBEDDING, f"{prefix}{theirs}embed_tokens.weight"))
            repeats.append(Rule(OUTPUT if not args.tied else EMBEDDING, f"{prefix}{theirs}shared_head.head.weight"))
    return replace(naming, rules=tuple(rules), repeats=tuple(repeats))


def _in(fqn: str, layer: int) -> str:
    return fqn.replace("{n}", str(layer))


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    flavors=FLAVORS,
    parameters=parameters,
    namings={naming.name: naming for naming in (_HF, _FUSED, _NEWEST, _OWN)},
    naming_for=_naming_for,
    problems=problems_of,
    as_torchtitan_trained=as_torchtitan_trained,
    args_from_hf_config=args_of,
    hf_config=config_of,
    hf_architectures=(V3.architecture, V2.architecture),
    hf_model_types=MODEL_TYPES,
    args_type=DeepSeekArgs,
    keep_float32=(_EXPERT_BIAS, "mtp_" + _EXPERT_BIAS),
    block=block,
    attention_of=ATTENTION_OF,
)
