"""Tiny random GPT-OSS and Llama 4 of transformers, and their weights by native names, without the tables.

Windows, chunks and the temperature's length are shorter than the sequences of the tests.
"""

import numpy as np

_BOTH = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
OSS = _BOTH | {
    "intermediate_size": 96,
    "num_local_experts": 12,  # "10" could sort before "2"
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "rope_parameters": _YARN | {"beta_fast": 8.0, "beta_slow": 1.0, "truncate": False},
}
_LLAMA = _BOTH | {
    "intermediate_size": 96,
    "intermediate_size_mlp": 80,
    "num_local_experts": 12,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 12,
    "no_rope_layer_interval": 4,
    "floor_scale": 8,
    "attn_scale": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
NUMBERS = {
    "gpt_oss": OSS,
    "scout": _LLAMA | {"use_qk_norm": True, "interleave_moe_layer_step": 1},
    "maverick": _LLAMA | {"use_qk_norm": False, "interleave_moe_layer_step": 2, "num_experts_per_tok": 2},
}


def their_model(name: str, **numbers):
    """The model of transformers; every weight is random and large, the router decides with a wide margin."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig

    kinds = (GptOssConfig, GptOssForCausalLM) if name == "gpt_oss" else (Llama4TextConfig, Llama4ForCausalLM)
    config = kinds[0](**NUMBERS[name] | numbers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kinds[1](config).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                is_norm, std = "norm" in key, 1.0 if "router" in key or "sinks" in key else 0.2
                weight.copy_(torch.randn_like(weight) * std + is_norm)
    model.set_experts_implementation("eager")
    return model


def native_arrays(model) -> dict[str, np.ndarray]:
    """The weights of a model of transformers, by native names; a router's bias that balances is zero."""
    found: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if name.endswith("router.gate.weight"):
            found[name.replace("router.gate.weight", "expert_bias")] = np.zeros(len(values), np.float32)
        at = name.rpartition("experts.")[0] + "experts."
        if name.endswith("experts.gate_up_proj"):
            if model.config.model_type == "gpt_oss":
                found[at + "mlp1_weight"] = values.swapaxes(1, 2)
            else:
                found[at + "w1"], found[at + "w3"] = np.split(values.swapaxes(1, 2), 2, axis=1)
        elif name.endswith("experts.down_proj"):
            last = "mlp2_weight" if model.config.model_type == "gpt_oss" else "w2"
            found[at + last] = values.swapaxes(1, 2)
        else:
            found[name] = values
    return found


_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.sinks": "attention.sinks",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.router.": "moe.router.gate.",
    "mlp.experts.gate_up_proj_bias": "moe.experts.mlp1_bias",
    "mlp.experts.down_proj_bias": "moe.experts.mlp2_bias",
    "mlp.experts": "moe.experts",
    "feed_forward.router.": "moe.router.gate.",
    "feed_forward.experts": "moe.experts",
    "feed_forward.shared_expert.gate_proj": "moe.shared_experts.w1",
    "feed_forward.shared_expert.up_proj": "moe.shared_experts.w3",
    "feed_forward.shared_expert.down_proj": "moe.shared_experts.w2",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.up_proj": "feed_forward.w3",
    "feed_forward.down_proj": "feed_forward.w2",
}


def native_args(name: str, **numbers):
    """The numbers of such a model as titan has them."""
    from converters.families.base import YarnRope
    from converters.families.gpt_oss import GptOssArgs
    from converters.families.llama4 import Llama4Args

    n = NUMBERS[name] | numbers
    layers = n["num_hidden_layers"]
    both = {
        "dim": n["hidden_size"],
        "num_layers": layers,
        "num_heads": n["num_attention_heads"],
        "num_kv_heads": n["num_key_value_heads"],
        "head_dim": n["head_dim"],
        "vocab_size": n["vocab_size"],
        "max_seq_len": n["max_position_embeddings"],
        "rope_theta": n["rope_parameters"]["rope_theta"],
        "num_experts": n["num_local_experts"],
        "experts_per_token": n["num_experts_per_tok"],
    }
    if name == "gpt_oss":
        return GptOssArgs(
            **both,
            ffn_hidden=n["intermediate_size"],
            attention_bias=True,
            window=n["sliding_window"],
            window_layers=tuple(range(0, layers, 2)),
            rope_scaling=YarnRope(4.0, 16, beta_fast=8.0, beta_slow=1.0, truncate=False),
        )
    step, every = n["interleave_moe_layer_step"], n["no_rope_layer_interval"]
    return Llama4Args(
        **both,
        ffn_hidden=n["intermediate_size_mlp"],
        expert_hidden=n["intermediate_size"],
        sparse_layers=tuple(range(step - 1, layers, step)),
        layers_without_positions=tuple(range(every - 1, layers, every)),
        chunk=n["attention_chunk_size"],
        norms_qk=n["use_qk_norm"],
        temperature=n["attn_scale"],
        temperature_length=n["floor_scale"],
    )


class Arrays:
    """Weights in memory as a `TensorSource`."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        from converters.common.box import TensorInfo

        self.arrays = arrays
        self.tensors = {name: TensorInfo("float32", values.shape) for name, values in arrays.items()}

    def read(self, fqn, box):
        return np.ascontiguousarray(self.arrays[fqn][tuple(map(_slice, box.offsets, box.sizes))])


def _slice(offset: int, size: int) -> slice:
    return slice(offset, offset + size)


def load_native(model, name: str, *, tp=1, rank=0, dtype="float32", device="cpu", numbers=None, **options):
    """A rank's part of transformers' `model`, by native names, without a folder."""
    import torch

    from converters.model.model_info import ModelInfo
    from titan_tools.infer.model.load import load_model

    info = ModelInfo("gpt_oss" if name == "gpt_oss" else "llama4", native_args(name, **numbers or {}))
    return load_model(
        Arrays(native_arrays(model)),
        info,
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        tp=tp,
        rank=rank,
        **options,
    )
