"""Tiny checkpoints in every source format, with the same values on every machine and with every library version.

Values come from SHAKE-256 of the tensor's name. safetensors files, configs and tokenizers are spelled out here; torch
files and stock DCP folders are written by torch itself, because their values, not their bytes, are what is read.
"""

import base64
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.models.names import interleaved, native_name

Weights = dict[str, np.ndarray]  # by their Hugging Face names
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 302,  # 256 bytes and what Llama 3's special tokens need
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 260,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "bfloat16",
}
_TORCHTUNE = {
    "attention_norm.weight": "sa_norm.scale",
    "ffn_norm.weight": "mlp_norm.scale",
    "attention.wq": "attn.q_proj",
    "attention.wk": "attn.k_proj",
    "attention.wv": "attn.v_proj",
    "attention.wo": "attn.output_proj",
    "feed_forward": "mlp",
}
_ROW_PARALLEL = (".wo.weight", ".w2.weight")  # cut along dim 1 by Meta's shards


def values(name: str, shape: tuple[int, ...], *, around: float = 0.0) -> np.ndarray:
    """float32 with 15 random bits, between `around` ± 0.25: a cast to 16 bits rounds them."""
    drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(2 * prod(shape)), "<i2")
    return (drawn.astype(np.float32) / 2**17 + np.float32(around)).reshape(shape)


def weights_of(config: Mapping) -> Weights:
    """Every weight of the model that `config` describes, with the config's dtype."""
    dim, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (config["vocab_size"], dim)}
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (queries, dim),
            "self_attn.k_proj": (keys, dim),
            "self_attn.v_proj": (keys, dim),
            "self_attn.o_proj": (dim, queries),
            "mlp.gate_proj": (ffn, dim),
            "mlp.up_proj": (ffn, dim),
            "mlp.down_proj": (dim, ffn),
            "input_layernorm": (dim,),
            "post_attention_layernorm": (dim,),
        }
        if config["model_type"] == "qwen3":
            parts |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes["model.norm"] = (dim,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], dim)
    found = {f"{name}.weight": values(name, shape, around=len(shape) == 1) for name, shape in shapes.items()}
    if config["torch_dtype"] == "bfloat16":
        found = {name: array.astype(ml_dtypes.bfloat16) for name, array in found.items()}
    return found


def native(config: Mapping) -> Weights:
    """The same weights under their native names, with the rows of rotated projections in pairs."""
    heads = {"wq": config["num_attention_heads"], "wk": config["num_key_value_heads"]}
    found = {}
    for theirs, array in weights_of(config).items():
        name = native_name(theirs)
        rotated = heads.get(name.split(".")[-2]) if config["model_type"] == "llama" else None
        found[name] = interleaved(array, rotated) if rotated else array
    return found


def write_safetensors(path: Path, weights: Weights) -> None:
    names, header, position = {"float32": "F32", "bfloat16": "BF16"}, {"__metadata__": {"format": "pt"}}, 0
    for name, array in weights.items():
        end = position + array.nbytes
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in weights.values()))


def write_assets(folder: Path, config: Mapping) -> None:
    """config.json, generation_config.json and a tokenizer of the 256 bytes: a tiktoken file for Llama, else JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": 256, "eos_token_id": [257], "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if config["model_type"] == "llama":
        write_byte_ranks(folder)
    else:
        write_tokenizer_json(folder)


def write_byte_ranks(folder: Path) -> None:
    ranks = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tokenizer.model").write_text("".join(ranks))


def write_tokenizer_json(folder: Path) -> None:
    """Byte-level BPE without merges. Special tokens are 256 and 257; the first is before each text."""
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # GPT-2's letters for bytes: these stand for themselves
    letters = sorted([*map(chr, shown), *(chr(256 + n) for n in range(256 - len(shown)))])
    specials = ["<|begin_of_text|>", "<|end_of_text|>"]
    kept = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    first, text = {"SpecialToken": {"id": specials[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + n, "content": special, **kept} for n, special in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": by_letters,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {specials[0]: {"id": specials[0], "ids": [256], "tokens": [specials[0]]}},
        },
        "decoder": by_letters,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: number for number, letter in enumerate(letters)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": specials[0], "eos_token": specials[1]}))


def write_hf(folder: Path, config: Mapping, *, num_files: int = 1, weights: Weights | None = None) -> None:
    """As transformers writes it: one safetensors file, or several and their index."""
    write_assets(folder, config)
    weights = weights or weights_of(config)
    if num_files == 1:
        write_safetensors(folder / "model.safetensors", weights)
        return
    placed = {}
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(weights.items())[number::num_files])
        write_safetensors(folder / name, part)
        placed |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(a.nbytes for a in weights.values())}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _tensors(weights: Weights) -> dict:
    import torch

    def tensor(array: np.ndarray):
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    return {name: tensor(array) for name, array in weights.items()}


def write_bins(folder: Path, config: Mapping, *, num_files: int) -> None:
    """As transformers wrote weights before safetensors."""
    import torch

    write_assets(folder, config)
    weights, placed = _tensors(weights_of(config)), {}
    if num_files == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    for number in range(num_files):
        name = f"pytorch_model-{number + 1:05d}-of-{num_files:05d}.bin"
        part = dict(list(weights.items())[number::num_files])
        torch.save(part, folder / name)
        placed |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def write_meta(folder: Path, config: Mapping, *, num_shards: int) -> None:
    """As Meta releases Llama 3: consolidated.NN.pth, params.json, tokenizer.model."""
    import torch

    folder.mkdir(parents=True)
    for number in range(num_shards):
        shard = {
            name: array if array.ndim == 1 else np.split(array, num_shards, int(name.endswith(_ROW_PARALLEL)))[number]
            for name, array in native(config).items()
        }
        torch.save(_tensors(shard), folder / f"consolidated.{number:02d}.pth")
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "multiple_of": 8,
        "ffn_dim_multiplier": 0.9,
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_theta"],
        "use_scaled_rope": True,
    }
    (folder / "params.json").write_text(json.dumps(params))
    write_byte_ranks(folder)


def write_stock_dcp(folder: Path, config: Mapping, *, qkv_linear: bool = False) -> None:
    """As torchtitan saves: nothing says what model it is, and optimizer states stand next to the weights."""
    import torch
    import torch.distributed.checkpoint as dcp

    saved = {"train_state.step": torch.tensor(7)}
    for name, weight in _tensors(native(config)).items():
        if qkv_linear:
            name = name.replace("output.weight", "lm_head.weight")
            for w in "qkv":
                name = name.replace(f"attention.w{w}", f"attention.qkv_linear.w{w}")
        state = f"optimizer.state.{name}"
        moments = {f"{state}.exp_avg": weight.float() / 8, f"{state}.exp_avg_sq": weight.float().square()}
        saved |= {name: weight, f"{state}.step": torch.tensor(7.0), **moments}
    with warnings.catch_warnings(action="ignore"):  # that no process group is there
        dcp.save(saved, checkpoint_id=str(folder), no_dist=True)


def write_torch(path: Path, weights: Weights, *, under: str = "") -> None:
    """One torch file; `under`: the key of a training loop's dict that holds the weights."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(weights)
    torch.save({under: tensors, "epoch": 3} if under else tensors, path)


def torchtune_names(config: Mapping) -> Weights:
    found = {}
    for name, array in native(config).items():
        for ours, theirs in _TORCHTUNE.items():
            name = name.replace(ours, theirs)
        found["norm.scale" if name == "norm.weight" else name] = array
    return found


def _without(config: Mapping, name: str) -> Weights:
    return {other: array for other, array in weights_of(config).items() if other != name}


def _not_finite(config: Mapping) -> Weights:
    weights = weights_of(config)
    weights["model.norm.weight"] = np.array([np.nan, np.inf, *weights["model.norm.weight"][2:]], np.float32)
    return weights


def _biased() -> Weights:
    return weights_of(LLAMA) | {"model.layers.0.self_attn.q_proj.bias": values("bias", (16,))}


# What a user would name → how it is written. Names that end in a file's suffix are files.
SOURCES: dict[str, Callable[[Path], None]] = {
    "llama-hf": lambda p: write_hf(p, LLAMA),
    "llama-hf-3-files": lambda p: write_hf(p, LLAMA, num_files=3),
    "llama-bin": lambda p: write_bins(p, LLAMA, num_files=1),
    "llama-2-bins": lambda p: write_bins(p, LLAMA, num_files=2),
    "llama-meta": lambda p: write_meta(p, LLAMA, num_shards=1),
    "llama-meta-2-shards": lambda p: write_meta(p, LLAMA, num_shards=2),
    "llama-stock-dcp": lambda p: write_stock_dcp(p, LLAMA),
    "llama-qkv-dcp": lambda p: write_stock_dcp(p, LLAMA, qkv_linear=True),
    "llama-native.pt": lambda p: write_torch(p, native(LLAMA)),
    "llama-loop.pth": lambda p: write_torch(p, weights_of(LLAMA), under="model"),
    "llama-torchtune.pt": lambda p: write_torch(p, torchtune_names(LLAMA)),
    "llama-bf16-hf": lambda p: write_hf(p, LLAMA | {"torch_dtype": "bfloat16"}),
    "llama-tied-hf": lambda p: write_hf(p, LLAMA | {"tie_word_embeddings": True}),
    "qwen-hf": lambda p: write_hf(p, QWEN),
    "qwen-hf-2-files": lambda p: write_hf(p, QWEN, num_files=2),
    "qwen-bin": lambda p: write_bins(p, QWEN, num_files=1),
    "qwen-stock-dcp": lambda p: write_stock_dcp(p, QWEN),
    "qwen-native.pt": lambda p: write_torch(p, native(QWEN)),
}
BROKEN: dict[str, Callable[[Path], None]] = {
    "missing": lambda p: write_hf(p, LLAMA, weights=_without(LLAMA, "model.layers.1.mlp.up_proj.weight")),
    "extra": lambda p: write_hf(p, LLAMA, weights=weights_of(LLAMA) | {"adapter.weight": values("extra", (3, 5))}),
    "biased": lambda p: write_hf(p, LLAMA, weights=_biased()),
    "not-finite": lambda p: write_hf(p, LLAMA, weights=_not_finite(LLAMA)),
    "wrong-shape": lambda p: write_hf(p, LLAMA | {"intermediate_size": 48}, weights=weights_of(LLAMA)),
    "cut-off": lambda p: _cut_off(p),
    "empty": lambda p: p.mkdir(parents=True),
    "config-only": lambda p: write_assets(p, LLAMA),
}


def _cut_off(folder: Path) -> None:
    write_hf(folder, LLAMA)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def text(num_lines: int = 300) -> str:
    """Sentences of forty words in an order that SHAKE-256 draws: something that can be learnt."""
    drawn = hashlib.shake_256(b"text").digest(12 * num_lines)
    words = [f"word{byte % 40}" for byte in drawn]
    return "\n".join(" ".join(words[n : n + 12]) for n in range(0, len(words), 12)) + "\n"


def model_of(name: str) -> str | None:
    """The source that says what model `name` is; None where it says so itself."""
    if name.endswith((".pt", ".pth", "-stock-dcp", "-qkv-dcp")):
        return name.partition("-")[0] + "-hf"
    return None


def write_sources(place: Path) -> None:
    """All of them below `place`."""
    place.mkdir(parents=True)
    for name, write in (SOURCES | BROKEN).items():
        write(place / name)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (place / "chats.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (place / "text.txt").write_text(text())
    (place / "old.toml").write_text('[checkpoint]\nenable_checkpoint = true\n[model]\nflavor = "8B"\n')
    shutil.copytree(place / "llama-hf", place / "llama-flipped")  # one bit of one value differs
    file = place / "llama-flipped" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(raw)
