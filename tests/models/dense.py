"""Tiny random models of each family as transformers itself writes them, and a forward pass over native weights.

The forward pass is written from the papers, without a line of the packages under test, and knows RoPE both ways.
"""

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,  # torchtune's builders know no other
}
NUMBERS = {  # of all; grouped-query attention
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
# Eleven layers where "10" could sort before "2"
TINY = {
    "llama2": {"num_hidden_layers": 11, "rms_norm_eps": 1e-6},
    "llama2_theta": {"vocab_size": 32016, "hidden_size": 16, "rope_theta": 1e6, "num_hidden_layers": 1},  # Code Llama
    "llama3": {"rope_theta": 500000.0, "rope_scaling": SCALING},
    "llama3_tied": {"rope_theta": 500000.0, "tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 11, "head_dim": 24, "rope_theta": 5e6, "rms_norm_eps": 1e-6},
    "qwen3_tied": {"head_dim": 24, "rope_theta": 1e6, "tie_word_embeddings": True},
}


def family_of(name: str) -> str:
    return name.partition("_")[0]


def write(folder: Path, name: str, *, dtype: torch.dtype = torch.float32, numbers=None, std=0.2, **save):
    """Write an HF folder and return its model; `numbers` are the config's.

    Every weight is random and large, norms too: none is like another. `std`: of matrices; less for a wide model, whose
    attention would be so sharp that rounding decides.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    of_qwen = family_of(name) == "qwen3"
    numbers = deepcopy(NUMBERS | TINY[name] | (numbers or {}))  # transformers writes into RoPE's
    config = (Qwen3Config if of_qwen else LlamaConfig)(**numbers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (Qwen3ForCausalLM if of_qwen else LlamaForCausalLM)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                is_norm = parameter.ndim == 1
                parameter.copy_(torch.randn_like(parameter) * (0.2 if is_norm else std) + is_norm)
    model.to(dtype).save_pretrained(folder, **save)
    return model


def native_logits(weights: dict[str, Tensor], tokens: Tensor, args, *, halves: bool) -> Tensor:
    """Logits [L, V] of `tokens` [L] from weights under native names.

    `halves`: RoPE turns the pairs (i, i + h/2) of a head, else (2i, 2i + 1).
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + args.norm_eps).rsqrt() * weights[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:  # [N, L, H]
        a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
        a, b = a * cos - b * sin, b * cos + a * sin
        return torch.cat([a, b], -1) if halves else torch.stack([a, b], -1).flatten(-2)

    angles = torch.outer(torch.arange(len(tokens)), _frequencies(args))
    cos, sin = angles.cos(), angles.sin()
    x = embedding(tokens, weights["tok_embeddings.weight"])
    for n in range(args.num_layers):
        here = f"layers.{n}."
        h = norm(x, here + "attention_norm")
        q, k, v = (
            linear(h, weights[f"{here}attention.{w}.weight"]).unflatten(-1, (-1, args.head_dim)).transpose(0, 1)
            for w in ("wq", "wk", "wv")
        )
        if f"{here}attention.q_norm.weight" in weights:
            q, k = norm(q, here + "attention.q_norm"), norm(k, here + "attention.k_norm")
        shared = args.num_heads // args.num_kv_heads
        k, v = (t.repeat_interleave(shared, 0) for t in (turn(k), v))
        attended = scaled_dot_product_attention(turn(q), k, v, is_causal=True).transpose(0, 1).flatten(-2)
        x = x + linear(attended, weights[here + "attention.wo.weight"])
        h, w1, w2, w3 = (
            norm(x, here + "ffn_norm"),
            *(weights[f"{here}feed_forward.{w}.weight"] for w in ("w1", "w2", "w3")),
        )
        x = x + linear(silu(linear(h, w1)) * linear(h, w3), w2)
    return linear(norm(x, "norm"), weights.get("output.weight", weights["tok_embeddings.weight"]))


def _frequencies(args) -> Tensor:
    """RoPE's, and how Llama 3.1 stretches the slow ones (its report, and the model card's formula)."""
    frequencies = args.rope_theta ** -(torch.arange(0, args.head_dim, 2, dtype=torch.float64) / args.head_dim)
    if (scaling := args.rope_scaling) is None:
        return frequencies
    waves = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)  # turns within the first context
    smooth = ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)
