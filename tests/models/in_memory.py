"""Tiny random GPT-OSS and Llama 4 that inference loads from memory.

Windows, chunks and the temperature's length are shorter than the sequences of the tests.
"""

import numpy as np

from tests.models import gpt_oss, llama4
from tests.models.names import native_arrays

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


def make(name: str, **numbers):
    """The model of transformers: `name` of NUMBERS."""
    if name == "gpt_oss":
        model = gpt_oss.make(**NUMBERS[name] | numbers)
    else:
        model = llama4.make(name, **NUMBERS[name] | numbers)
    model.set_experts_implementation("eager")
    return model


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


def load_native(model, *, tp=1, rank=0, dtype="float32", device="cpu", **options):
    """A rank's part of transformers' `model`, by native names, without a folder."""
    import torch

    from converters.families.registry import read_hf_config
    from converters.model.model_info import ModelInfo
    from titan_tools.infer.model.load import load_model

    family, args = read_hf_config(model.config.to_dict())
    return load_model(
        Arrays(native_arrays(model)),
        ModelInfo(family.name, args),
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        tp=tp,
        rank=rank,
        **options,
    )
