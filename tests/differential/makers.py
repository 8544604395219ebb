"""Tiny random models of every text decoder class that transformers registers."""

import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 96
MOST_PARAMETERS = 5_000_000
# The first pattern that matches a field's whole name gives its value, where the class's own value is a larger integer
SMALL = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r".*(_token_id|_token_index|_id)", 1),
        (r".*vocab_size.*|.*num_embeddings", VOCAB),
        (r"topk_group|first_k_dense_replace", 1),
        (r".*(num_experts_per_tok|moe_topk|top_k_experts|moe_k|num_activated_experts)|top_?k.*", 2),
        (r".*(num_group|n_group|num_codebooks|mtp.*|nextn.*)|n_groups|.*mamba_n_groups|ngroups", 1),
        (r".*experts.*", 4),
        (r".*(qk_rope|rope)_head_dim|rotary_dim|rotary_ndims|attention_head_dim|.*head_(size|dim)|d_kv", 8),
        (r".*(lora_rank|low_rank|low_rank_dim|_rank)", 16),
        (r".*(num|n)_(key_value|kv)_heads?|num_kv_heads|multi_query_group_num", 2),
        (r".*(attention_heads|num_heads|n_heads?|n_head)", 4),
        (r".*layers?|.*_depth|num_blocks", 4),
        (r".*(intermediate|ffn|ff)_?(size|dim|hidden|hidden_size)|.*_inner|.*ffn.*|.*intermediate.*|lru_width", 48),
        (r".*(d_state|state_size|conv_kernel|d_conv|chunk_size|block_size|window.*)", 8),
        (r".*(position|max_seq|n_positions|n_ctx|seq_len|max_source|context_length).*", 128),
        (r".*(hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_size|hidden_dim|.*_dim|dim)", 32),
    )
)
# What the patterns cannot know of one class
_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4}
OF_CLASS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14} | _VISION},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"num_hidden_layers": 2},
    "qwen4_exp_text": {"num_hidden_layers": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}


def registered_types() -> list[str]:
    """Model types whose models are causal language models, in transformers' own registry."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of that type with the fields of every size made small."""
    return _small(CONFIG_MAPPING[model_type], OF_CLASS.get(model_type, {}) | changes)


def _small(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    chosen = {}
    for name, default in _defaults(config_class).items():
        sub = config_class.sub_configs.get(name)
        if sub is not None and issubclass(sub, PreTrainedConfig):
            chosen[name] = _small(sub, changes.pop(name, {})).to_dict()
        elif isinstance(default, int) and not isinstance(default, bool):
            value = next((value for pattern, value in SMALL if pattern.fullmatch(name)), default)
            chosen[name] = min(default, value) if default >= 0 else default
    if "kv_lora_rank" in chosen and "num_attention_heads" in chosen:  # latent attention: each head has its own keys
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    return config_class(**chosen | changes)


def _defaults(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    assert is_dataclass(config_class)
    return {f.name: None if f.default is MISSING else f.default for f in fields(config_class)}


def tiny_model(config: PreTrainedConfig, *, seed: int = 0, std: float = 0.2) -> PreTrainedModel:
    """Make a model of `config` in which no parameter is zero or one, so that a wrong, missing or swapped one shows."""
    with torch.device("meta"):
        shape_only = AutoModelForCausalLM.from_config(config)
    size = sum(p.numel() for p in shape_only.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are not tiny")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_scale = parameter.ndim <= 1 and not name.endswith("bias")
                values = torch.randn(parameter.shape) * std + (1.0 if is_scale else 0.0)
                parameter.copy_(values.to(parameter.dtype))
    return model
