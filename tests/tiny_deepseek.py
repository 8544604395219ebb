"""Tiny random DeepSeek V3 and V2 as transformers itself writes them, and their weights by native names."""

from pathlib import Path

import numpy as np

_BOTH = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,  # of the dense layer
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 12,  # "10" could sort before "2"
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "attn_implementation": "eager",
}
NUMBERS = {  # model → numbers of its config
    "v3": _BOTH | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
    "v2": _BOTH | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "v2_lite": _BOTH | {"q_lora_rank": None, "n_group": None, "topk_group": None},
    # without groups and with a q that is made of the input: Moonlight; a theta and a scale of Kimi's
    "moonlight": _BOTH
    | {"n_shared_experts": 2, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "num_mtp_layers": 0, "rms_norm_eps": 1e-5},
}


def write_deepseek(folder: Path, name: str = "v3", *, dtype: str = "float32", **numbers):
    """Write an HF folder and return its model; `numbers` are the config's.

    Every weight is random and large, so that none is like another; the router decides with a wide margin.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    v2 = name.startswith("v2")
    config = (DeepseekV2Config if v2 else DeepseekV3Config)(**NUMBERS[name] | numbers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (DeepseekV2ForCausalLM if v2 else DeepseekV3ForCausalLM)(config).eval()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                is_norm = tensor.ndim == 1 and "correction" not in key
                std = 1.0 if ".mlp.gate." in key else 0.2
                tensor.copy_(torch.randn_like(tensor) * (0.2 if is_norm else std) + is_norm)
    biases = {key: tensor.clone() for key, tensor in model.state_dict().items() if "correction" in key}
    model.to(getattr(torch, dtype))
    for key, bias in biases.items():  # stays float32, as in the published files
        model.get_submodule(key.rpartition(".")[0]).e_score_correction_bias = bias
    model.save_pretrained(folder)
    return model


def native_arrays(model) -> dict[str, np.ndarray]:
    """The weights of a model of transformers, by native names; V2's routers have a bias of zero."""
    found: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        layer = ".".join(name.removeprefix("model.").split(".")[:2])
        if name.endswith("gate_up_proj"):
            half = values.shape[1] // 2
            found[f"{layer}.moe.experts.w1"], found[f"{layer}.moe.experts.w3"] = values[:, :half], values[:, half:]
            found.setdefault(f"{layer}.moe.expert_bias", np.zeros(len(values), np.float32))
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = values
    return found


_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "mlp.experts.down_proj": "moe.experts.w2",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
