"""A tiny random Qwen 3 MoE as transformers itself writes it, also with a bias of its routers."""

from pathlib import Path
from types import MethodType

from tests.models.names import native_arrays

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


def write(folder: Path, *, dtype: str = "float32", **numbers):
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
