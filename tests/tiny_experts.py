"""A tiny random Qwen 3 MoE as transformers itself writes it, and its weights by native names, without the tables."""

from pathlib import Path
from types import MethodType

import numpy as np

NUMBERS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,  # of the dense layers
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 12,  # "10" could sort before "2"
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [2],
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def write_experts(folder: Path, *, dtype: str = "float32", **numbers):
    """Write an HF folder of one tensor per expert and return its model; `numbers` are Qwen3MoeConfig's.

    Every weight is random and large, so that none is like another; the router decides with a wide margin.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**NUMBERS | numbers)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm, std = parameter.ndim == 1, 1.0 if name.endswith("mlp.gate.weight") else 0.2
                parameter.copy_(torch.randn_like(parameter) * (0.2 if is_norm else std) + is_norm)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return model


def native_arrays(model) -> dict[str, np.ndarray]:
    """The weights of a model of transformers, by native names; a router's bias is zero."""
    found: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        parts = name.removeprefix("model.").split(".")
        if parts[-1] == "gate_up_proj":
            layer = ".".join(parts[:2])
            half = values.shape[1] // 2
            found[f"{layer}.moe.experts.w1"], found[f"{layer}.moe.experts.w3"] = values[:, :half], values[:, half:]
            found[f"{layer}.moe.expert_bias"] = np.zeros(len(values), np.float32)
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = values
    return found


def write_native(folder: Path, model, biases) -> None:
    """The model as a DCP under native names; `biases`: layer → a tensor that its router adds to scores, else zeros."""
    import torch
    import torch.distributed.checkpoint as dcp

    weights = {name: torch.tensor(values) for name, values in native_arrays(model).items()}
    weights |= {f"layers.{layer}.moe.expert_bias": bias for layer, bias in biases.items()}
    if model.config.tie_word_embeddings:
        del weights["output.weight"]
    dcp.save(weights, checkpoint_id=str(folder), no_dist=True)
    model.config.save_pretrained(folder)


def add_biases(model, biases) -> None:
    """Let transformers' routers choose by score + bias, as in arXiv 2408.15664; weights are those of the scores."""
    for layer, bias in biases.items():
        router = model.model.layers[layer].mlp.gate
        router.choice_bias, router.forward = bias, MethodType(_route, router)


def _route(router, hidden):
    scores = (hidden.reshape(-1, router.weight.shape[1]) @ router.weight.T).softmax(-1)
    ids = (scores + router.choice_bias).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return scores, weights, ids


_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.": "attention.",
    "mlp.experts.down_proj": "moe.experts.w2",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
