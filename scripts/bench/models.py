"""Make Hugging Face folders of a given size for the benches: real shapes, random finite bf16 values, no torch."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

LLAMA_1B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA_8B: Mapping[str, Any] = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "intermediate_size": 14336,
    "rope_scaling": {**LLAMA_1B["rope_scaling"], "factor": 8.0},
    "tie_word_embeddings": False,
}
# Not a published size: Qwen 3 1.7B's numbers with fewer layers, so that it has as many bytes as the Llama beside it
QWEN3_1B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
# Qwen 3 30B-A3B with half the experts, four layers and a small vocabulary: experts are most of what a step reads
QWEN3_MOE: Mapping[str, Any] = {
    **QWEN3_1B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# A quarter of Qwen 3 8B
QWEN3_WIDE: Mapping[str, Any] = {
    **QWEN3_1B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 9,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
# Seven layers of 30B-A3B: 8.9 GB, of which experts are 97 %
QWEN3_MOE_9GB: Mapping[str, Any] = {**QWEN3_MOE, "num_hidden_layers": 7, "num_experts": 128}
# DeepSeek V3's width and experts: one layer with 48 of them, 4.6 GB of bf16, half as much in fp8
WIDE_MOE: Mapping[str, Any] = {
    **QWEN3_MOE,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_experts": 48,
    "moe_intermediate_size": 2048,
    "vocab_size": 8192,
}
# DeepSeek V3's shapes, one dense layer and one of experts; a small vocabulary, because embeddings are never quantized
DEEPSEEK: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Two layers of GPT-OSS 20b: 3.2 GB of bf16, 0.9 GB in mxfp4
GPT_OSS: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
# A layer of Llama 4 Scout with half of its experts: 2.6 GB
LLAMA4: Mapping[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 1,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODELS = {"llama": LLAMA_1B, "qwen3": QWEN3_1B, "qwen3_moe": QWEN3_MOE_9GB}


def deepseek_of(num_bytes: float, *, element_bytes: int) -> Mapping[str, Any]:
    """DEEPSEEK with as many experts as a folder of at least `num_bytes` needs, a multiple of the 8 groups."""
    expert = 3 * DEEPSEEK["hidden_size"] * DEEPSEEK["moe_intermediate_size"] * element_bytes
    others = sum(map(prod, shapes_of({**DEEPSEEK, "n_routed_experts": 0}).values())) * element_bytes
    return {**DEEPSEEK, "n_routed_experts": 8 * max(2, -(-int(num_bytes - others) // (8 * expert)))}


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a decoder, dense or with experts in every layer, or of a DeepSeek."""
    if config["model_type"] == "deepseek_v3":
        return _shapes_of_deepseek(config)
    if config["model_type"] == "gpt_oss":
        return _shapes_of_gpt_oss(config)
    if config["model_type"] == "llama4_text":
        return _shapes_of_llama4(config)
    dim, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    feed_forward = _feed_forward("mlp", hidden, dim)
    if num_experts := config.get("num_experts"):
        feed_forward = {"mlp.gate": (num_experts, dim)}
        for e in range(num_experts):
            feed_forward |= _feed_forward(f"mlp.experts.{e}", config["moe_intermediate_size"], dim)
    inside = {
        "self_attn.q_proj": (q, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, q),
        **feed_forward,
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    if config["model_type"].startswith("qwen3"):
        inside |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], dim)}
    for n in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in inside.items()}
    shapes["model.norm.weight"] = (dim,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], dim)
    return shapes


def _shapes_of_deepseek(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, heads, width = config["hidden_size"], config["num_attention_heads"], config["moe_intermediate_size"]
    q, kv, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], dim)}
    for n in range(config["num_hidden_layers"]):
        inside = {
            "self_attn.q_a_proj": (q, dim),
            "self_attn.q_a_layernorm": (q,),
            "self_attn.q_b_proj": (heads * (nope + rope), q),
            "self_attn.kv_a_proj_with_mqa": (kv + rope, dim),  # 576 rows: its last block is partial
            "self_attn.kv_a_layernorm": (kv,),
            "self_attn.kv_b_proj": (heads * (nope + v), kv),
            "self_attn.o_proj": (dim, heads * v),
            "input_layernorm": (dim,),
            "post_attention_layernorm": (dim,),
        }
        if n < config["first_k_dense_replace"]:
            inside |= _feed_forward("mlp", config["intermediate_size"], dim)
        else:
            inside["mlp.gate"] = (config["n_routed_experts"], dim)
            inside |= _feed_forward("mlp.shared_experts", config["n_shared_experts"] * width, dim)
            for e in range(config["n_routed_experts"]):
                inside |= _feed_forward(f"mlp.experts.{e}", width, dim)
            shapes[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in inside.items()}
    return shapes | {"model.norm.weight": (dim,), "lm_head.weight": (config["vocab_size"], dim)}


def _shapes_of_gpt_oss(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, hidden, num = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    linear = {"q": (q, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, q)}
    inside: dict[str, tuple[int, ...]] = {"self_attn.sinks": (config["num_attention_heads"],)}
    for name, shape in linear.items():
        inside |= {f"self_attn.{name}_proj.weight": shape, f"self_attn.{name}_proj.bias": shape[:1]}
    inside |= {
        "mlp.router.weight": (num, dim),
        "mlp.router.bias": (num,),
        "mlp.experts.gate_up_proj": (num, dim, 2 * hidden),
        "mlp.experts.gate_up_proj_bias": (num, 2 * hidden),
        "mlp.experts.down_proj": (num, hidden, dim),
        "mlp.experts.down_proj_bias": (num, dim),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], dim)}
    for n in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in inside.items()}
    return shapes | {"model.norm.weight": (dim,), "lm_head.weight": (config["vocab_size"], dim)}


def _shapes_of_llama4(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """All layers have experts."""
    dim, hidden, num = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    linear = {"self_attn.q_proj": (q, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim)}
    linear |= {"self_attn.o_proj": (dim, q), "feed_forward.router": (num, dim)}
    linear |= _feed_forward("feed_forward.shared_expert", hidden, dim)
    norms = {f"{name}_layernorm.weight": (dim,) for name in ("input", "post_attention")}
    inside: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()} | norms
    inside["feed_forward.experts.gate_up_proj"] = (num, dim, 2 * hidden)
    inside["feed_forward.experts.down_proj"] = (num, hidden, dim)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], dim)}
    for n in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in inside.items()}
    return shapes | {"model.norm.weight": (dim,), "lm_head.weight": (config["vocab_size"], dim)}


def _feed_forward(name: str, hidden: int, dim: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.gate_proj": (hidden, dim), f"{name}.up_proj": (hidden, dim), f"{name}.down_proj": (dim, hidden)}


def write_model(folder: Path, config: Mapping[str, Any], *, sparse: bool = False, normal: bool = False) -> int:
    """Write config.json and one model.safetensors; its bytes. `sparse`: zeros that take no room on the disk.

    `normal`: values that a forward pass can be run with, 16 million of them over and over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes_of(config).items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    random = np.random.Generator(np.random.SFC64(0))
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        if sparse:
            file.truncate(8 + len(raw) + position)
            return path.stat().st_size
        if normal:
            values = random.standard_normal(1 << 24, dtype=np.float32) * np.float32(0.02)
            some = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # cut to bf16
            for start in range(0, position, len(some)):
                file.write(some[: position - start])
            return path.stat().st_size
        for start in range(0, position, 1 << 24):
            count = min(1 << 24, position - start) // 2
            bits = random.integers(0, 1 << 16, count, dtype=np.uint16)
            file.write((bits & np.uint16(0xBFFF)).tobytes())  # without the exponent's top bit nothing is infinite
    return path.stat().st_size


def write_fp8_model(folder: Path, config: Mapping[str, Any]) -> int:
    """Write config.json and one model.safetensors of random float8 codes and scales; its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}, indent=1))
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes_of(config).items():
        stays = len(shape) == 1 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))
        stored[name] = "BF16" if stays else "F8_E4M3", shape
        if not stays:
            stored[f"{name}_scale_inv"] = "F32", (-(-shape[0] // 128), -(-shape[1] // 128))
    random = np.random.Generator(np.random.SFC64(0))
    bits = random.integers(0, 1 << 16, 1 << 23, dtype=np.uint16)
    some = {  # 16 MiB each, over and over
        "F8_E4M3": (bits & np.uint16(0xBFBF)).tobytes(),  # without the exponent's top bit no code is NaN
        "BF16": (bits & np.uint16(0xBFFF)).tobytes(),
        "F32": (random.random(1 << 22, dtype=np.float32) * np.float32(1e-3) + np.float32(1e-5)).tobytes(),
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (kind, shape) in stored.items():
        size = {"F8_E4M3": 1, "BF16": 2, "F32": 4}[kind] * prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, (kind, _) in stored.items():
            start, end = header[name]["data_offsets"]
            for first in range(start, end, len(some[kind])):
                file.write(some[kind][: end - first])
    return path.stat().st_size
