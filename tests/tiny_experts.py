"""Tiny random Qwen 3 MoE models as transformers writes them, and the same weights under native names.

Gates have a standard deviation of 1, so that the experts' order is no matter of rounding.
"""

from copy import deepcopy
from pathlib import Path
from types import MethodType

import torch
from torch import Tensor

from tests.hf_names import native_name
from tests.tiny_families import NUMBERS

EXPERTS = {  # as many that their order as strings is wrong, and one dense layer among others
    "num_hidden_layers": 3,
    "head_dim": 24,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
}


def write_experts(folder: Path, *, dtype=torch.float32, std=0.2, **numbers):
    """Write an HF folder and return its model; `numbers` are Qwen3MoeConfig's."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**deepcopy(NUMBERS | EXPERTS | numbers))).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = parameter.ndim == 1
                scale = 1.0 if name.endswith("mlp.gate.weight") else 0.2 if is_norm else std
                parameter.copy_(torch.randn_like(parameter) * scale + is_norm)
    model.to(dtype).save_pretrained(folder)
    model.set_experts_implementation("eager")  # torch's grouped product knows neither float64 nor rows of odd length
    return model


def write_native(folder: Path, model, *, biases: dict[int, Tensor] | None = None) -> None:
    """The model of `write_experts` as a DCP under native names; `biases`: layer → what its router adds to scores."""
    import torch.distributed.checkpoint as dcp

    folder.mkdir(parents=True, exist_ok=True)
    config, weights = model.config, {}
    for theirs, weight in model.state_dict().items():
        name, weight = native_name(theirs.replace(".mlp.gate.", ".moe.router.gate.")), weight.contiguous()
        if theirs.endswith("gate_up_proj"):
            layer = name.partition(".mlp.")[0]
            gate, up = weight.chunk(2, dim=1)
            weights |= {f"{layer}.moe.experts.w1": gate.contiguous(), f"{layer}.moe.experts.w3": up.contiguous()}
            number = int(layer.rpartition(".")[2])
            weights[f"{layer}.moe.expert_bias"] = (biases or {}).get(number, torch.zeros(config.num_experts))
        else:
            weights[name.replace(".mlp.experts.down_proj", ".moe.experts.w2")] = weight
    if config.tie_word_embeddings:
        weights.pop("output.weight", None)
    dcp.save(weights, checkpoint_id=str(folder), no_dist=True)
    config.save_pretrained(folder)


def add_biases(model, biases: dict[int, Tensor]) -> None:
    """Let transformers' routers choose by score + bias, as in arXiv 2408.15664; weights are those of the scores."""
    for number, bias in biases.items():
        router = model.model.layers[number].mlp.gate
        router.choice_bias, router.forward = bias, MethodType(_route, router)


def _route(router, hidden):
    scores = (hidden.reshape(-1, router.weight.shape[1]) @ router.weight.T).softmax(-1)
    ids = (scores + router.choice_bias).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return scores, weights, ids
