"""Checkpoints of the largest open models in their real shapes: real headers over sparse files that take no room."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from converters.common.box import Box, TensorInfo, row_blocks
from converters.common.dtypes import itemsize
from converters.containers.dcp_write import plan_dcp
from converters.containers.safetensors_write import plan_safetensors
from converters.containers.target import Target
from converters.store.folder_output import FolderFiles

LLAMA_405B_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def llama_405b(prefix: str = "model.") -> dict[str, TensorInfo]:
    """Llama 3.1 405B as the Hub has it."""
    dim, ffn, vocab = 16384, 53248, 128256
    inside = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (1024, dim),
        "self_attn.v_proj": (1024, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
        "mlp.up_proj": (ffn, dim),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    shapes = {"model.embed_tokens.weight": (vocab, dim)}
    for n in range(126):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in inside.items()}
    shapes |= {"model.norm.weight": (dim,), "lm_head.weight": (vocab, dim)}
    return {name: TensorInfo("bfloat16", shape) for name, shape in shapes.items()}


def deepseek_v3() -> dict[str, TensorInfo]:
    """DeepSeek-V3 (671B): fp8 weights a scale for each block of 128 × 128, 61 layers, 58 of them with 256 experts."""
    dim, vocab, q_rank, kv_rank, heads = 7168, 129280, 1536, 512, 128
    tensors = {"model.embed_tokens.weight": TensorInfo("bfloat16", (vocab, dim))}

    def quantized(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = TensorInfo("float8_e4m3fn", (rows, columns))
        tensors[f"{name}.weight_scale_inv"] = TensorInfo("float32", (-(-rows // 128), -(-columns // 128)))

    def feed_forward(name: str, width: int) -> None:
        quantized(f"{name}.gate_proj", width, dim)
        quantized(f"{name}.up_proj", width, dim)
        quantized(f"{name}.down_proj", dim, width)

    for n in range(61):
        layer = f"model.layers.{n}"
        quantized(f"{layer}.self_attn.q_a_proj", q_rank, dim)
        quantized(f"{layer}.self_attn.q_b_proj", heads * 192, q_rank)
        quantized(f"{layer}.self_attn.kv_a_proj_with_mqa", kv_rank + 64, dim)
        quantized(f"{layer}.self_attn.kv_b_proj", heads * 256, kv_rank)
        quantized(f"{layer}.self_attn.o_proj", dim, heads * 128)
        for norm, size in (
            ("self_attn.q_a_layernorm", q_rank),
            ("self_attn.kv_a_layernorm", kv_rank),
            ("input_layernorm", dim),
            ("post_attention_layernorm", dim),
        ):
            tensors[f"{layer}.{norm}.weight"] = TensorInfo("bfloat16", (size,))
        if n < 3:
            feed_forward(f"{layer}.mlp", 18432)
            continue
        tensors[f"{layer}.mlp.gate.weight"] = TensorInfo("bfloat16", (256, dim))
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = TensorInfo("float32", (256,))
        feed_forward(f"{layer}.mlp.shared_experts", 2048)
        for expert in range(256):
            feed_forward(f"{layer}.mlp.experts.{expert}", 2048)
    tensors["model.norm.weight"] = TensorInfo("bfloat16", (dim,))
    tensors["lm_head.weight"] = TensorInfo("bfloat16", (vocab, dim))
    return tensors


def llama4(num_experts: int, step: int) -> dict[str, TensorInfo]:
    """Llama 4 Scout (16 experts, step 1) or Maverick (128, 2) as the Hub has them, and two other tensors."""
    dim, hidden, dense, vocab = 5120, 8192, 16384, 202048
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim), "lm_head.weight": (vocab, dim)}
    for n in range(48):
        layer = f"model.layers.{n}"
        for name, rows, columns in (("q", dim, dim), ("k", 1024, dim), ("v", 1024, dim), ("o", dim, dim)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (dim,)
        is_sparse = (n + 1) % step == 0
        feed, width = f"{layer}.feed_forward", hidden if is_sparse else dense
        swiglu = f"{feed}.shared_expert" if is_sparse else feed
        shapes |= {f"{swiglu}.{name}_proj.weight": (width, dim) for name in ("gate", "up")}
        shapes[f"{swiglu}.down_proj.weight"] = (dim, width)
        if is_sparse:
            shapes[f"{feed}.router.weight"] = (num_experts, dim)
            shapes[f"{feed}.experts.gate_up_proj"] = (num_experts, dim, 2 * hidden)
            shapes[f"{feed}.experts.down_proj"] = (num_experts, hidden, dim)
    shapes["model.norm.weight"] = (dim,)
    found = {f"language_model.{name}": TensorInfo("bfloat16", shape) for name, shape in shapes.items()}
    beside = {"vision_model.class_embedding": (1408,), "multi_modal_projector.linear_1.weight": (dim, 4096)}
    return found | {name: TensorInfo("bfloat16", shape) for name, shape in beside.items()}


def write_sparse_hf(
    folder: Path, tensors: Mapping[str, TensorInfo], *, shard_bytes: int, config: Mapping | None = None
) -> None:
    """Safetensors files with their index; only headers take room."""
    _write_sparse(folder, plan_safetensors(tensors, shard_bytes=shard_bytes))
    (folder / "config.json").write_text(json.dumps(config or {"architectures": ["DeepseekV3ForCausalLM"]}))


def write_sparse_dcp(
    folder: Path, tensors: Mapping[str, TensorInfo], *, chunk_bytes: int = 64 << 20, num_files: int = 64
) -> None:
    """A DCP folder of row blocks, dealt to the files in turn; only the shells of items take room."""
    files: dict[str, list[tuple[str, Box]]] = {f"__{rank}_0.distcp": [] for rank in range(num_files)}
    names, position = list(files), 0
    for fqn, info in tensors.items():
        for box in row_blocks(Box.whole(info.shape), itemsize(info.dtype), chunk_bytes):
            files[names[position % num_files]].append((fqn, box))
            position += 1
    _write_sparse(folder, plan_dcp(tensors, {name: boxes for name, boxes in files.items() if boxes}))


def _write_sparse(folder: Path, target: Target) -> None:
    folder.mkdir(parents=True)
    for name, size in target.file_bytes.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    target.finish(FolderFiles(folder), [0] * len(target.slots))  # a CRC32 of 0 means that there is none
    for name, data in target.other_files.items():
        (folder / name).write_bytes(data)


def num_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    return sum(prod(info.shape) * itemsize(info.dtype) for info in tensors.values())
