"""Make Hugging Face folders of GPT-OSS's shapes in mxfp4, as published: random codes and finite values, no torch."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

GPT_OSS_20B: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_BLOCK = 32


def stored_of(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → safetensors' dtype and shape."""
    dim, hidden, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    linear = {"q_proj": (heads, dim), "k_proj": (kv, dim), "v_proj": (kv, dim), "o_proj": (dim, heads)}
    inside: dict[str, tuple[str, tuple[int, ...]]] = {"self_attn.sinks": ("BF16", (config["num_attention_heads"],))}
    for name, shape in {**{f"self_attn.{n}": s for n, s in linear.items()}, "mlp.router": (experts, dim)}.items():
        inside |= {f"{name}.weight": ("BF16", shape), f"{name}.bias": ("BF16", shape[:1])}
    for name, rows, columns in (("gate_up_proj", 2 * hidden, dim), ("down_proj", dim, hidden)):
        blocks = (experts, rows, columns // _BLOCK)
        inside |= {
            f"mlp.experts.{name}_blocks": ("U8", (*blocks, _BLOCK // 2)),
            f"mlp.experts.{name}_scales": ("U8", blocks),
            f"mlp.experts.{name}_bias": ("BF16", blocks[:2]),
        }
    inside |= {f"{name}.weight": ("BF16", (dim,)) for name in ("input_layernorm", "post_attention_layernorm")}
    stored = {"model.embed_tokens.weight": ("BF16", (config["vocab_size"], dim))}
    for n in range(config["num_hidden_layers"]):
        stored |= {f"model.layers.{n}.{name}": of for name, of in inside.items()}
    return stored | {"model.norm.weight": ("BF16", (dim,)), "lm_head.weight": ("BF16", (config["vocab_size"], dim))}


def write_gpt_oss(folder: Path, config: Mapping[str, Any]) -> int:
    """Write config.json and one model.safetensors; its bytes. 16 MiB of random values, over and over."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    random = np.random.Generator(np.random.SFC64(0))
    values = random.standard_normal(1 << 23, dtype=np.float32) * np.float32(0.02)
    some = {
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "codes": random.integers(0, 256, 1 << 24, dtype=np.uint8).tobytes(),
        "scales": random.integers(116, 121, 1 << 24, dtype=np.uint8).tobytes(),
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (kind, shape) in stored_of(config).items():
        size = {"BF16": 2, "U8": 1}[kind] * prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, (kind, _) in stored_of(config).items():
            start, end = header[name]["data_offsets"]
            of = some[kind if kind == "BF16" else "scales" if name.endswith("_scales") else "codes"]
            for first in range(start, end, len(of)):
                file.write(of[: end - first])
    return path.stat().st_size
