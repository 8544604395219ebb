"""A tiny Llama and a tiny Qwen 3 in the ways that folders are written and configs are spelled: titan reads them all."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.differential.compare import REFUSED, SAME, assert_same_or_refused, outcome_of
from tests.differential.makers import tiny_config, tiny_model
from tests.differential.sampling import chosen

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 32}
MODELS = {
    "llama": {"rope_parameters": _LLAMA3 | {"rope_theta": 500000.0}, "head_dim": 8, "num_key_value_heads": 2},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "head_dim": 8},
}
# config.json as transformers 4.57.6 writes it for the same models
_BOTH_4 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.6",
    "use_cache": True,
    "vocab_size": 96,
}
CONFIG_4 = {
    "llama": _BOTH_4
    | {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": _LLAMA3,
        "rope_theta": 500000.0,
    },
    "qwen3": _BOTH_4
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}


def _edited(folder: Path, edit: Callable[[dict], dict]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def _without(key: str, folder: Path, model_type: str) -> None:
    _edited(folder, lambda config: {name: value for name, value in config.items() if name != key})


def _least(folder: Path, model_type: str) -> None:
    """Only what the class has no default for."""
    kept = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += (
        "intermediate_size",
        "vocab_size",
        "head_dim",
        "rope_parameters",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    _edited(folder, lambda config: {name: config[name] for name in kept})


def _transformers_4(folder: Path, model_type: str, **changes) -> None:
    _edited(folder, lambda config: CONFIG_4[model_type] | changes)


def _transformers_before_4_43(folder: Path, model_type: str) -> None:
    """With the dtype under its older name; and Llama's had no head_dim."""
    newer = ("dtype", "head_dim") if model_type == "llama" else ("dtype",)
    old = {key: value for key, value in CONFIG_4[model_type].items() if key not in newer}
    _edited(folder, lambda config: old | {"torch_dtype": "float32", "transformers_version": "4.37.0"})


def _in_dtype(dtype: torch.dtype, folder: Path, model_type: str) -> None:
    model = tiny_model(tiny_config(model_type, **MODELS[model_type])).to(dtype)
    shutil.rmtree(folder)
    model.save_pretrained(folder)


def _sharded(folder: Path, model_type: str) -> None:
    model = tiny_model(tiny_config(model_type, **MODELS[model_type]))
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def _own_format(folder: Path, model_type: str) -> None:
    model = tiny_model(tiny_config(model_type, **MODELS[model_type]))
    shutil.rmtree(folder)
    model.save_pretrained(folder, save_original_format=False)


def _bin(num_files: int, folder: Path, model_type: str) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    index = {}
    for number in range(num_files):
        name = f"pytorch_model-{number + 1:05d}-of-{num_files:05d}.bin"
        part = dict(list(weights.items())[number::num_files])
        torch.save(part, folder / name)
        index |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    (folder / "pytorch_model.bin.index.json").write_text(text)


def _body_alone(folder: Path, model_type: str) -> None:
    """As AutoModel saves it, without a head."""
    model = tiny_model(tiny_config(model_type, **MODELS[model_type]))
    shutil.rmtree(folder)
    model.model.save_pretrained(folder)


def _with_rotary_buffers(folder: Path, model_type: str) -> None:
    """As transformers before 4.31 saved them; it is not read any more."""
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


VARIANTS = {
    "as it is": lambda folder, model_type: None,
    "no architectures": partial(_without, "architectures"),
    "no dtype": partial(_without, "dtype"),
    "no transformers_version": partial(_without, "transformers_version"),
    "the least": _least,
    "transformers 4": _transformers_4,
    "transformers 4, float theta as an integer": partial(_transformers_4, rope_theta=500000),
    "transformers 4, before 4.43": _transformers_before_4_43,
    "bfloat16": partial(_in_dtype, torch.bfloat16),
    "float16": partial(_in_dtype, torch.float16),
    "sharded": _sharded,
    "transformers 5's own names": _own_format,
    "one .bin": partial(_bin, 1),
    "three .bin": partial(_bin, 3),
    "the body alone": _body_alone,
    "with rotary buffers": _with_rotary_buffers,
}
WITHOUT_REFERENCE = {"the body alone"}
SAMPLE = [
    ("llama", "no architectures"),
    ("llama", "transformers 4"),
    ("qwen3", "transformers 4"),
    ("llama", "bfloat16"),
]


@pytest.mark.parametrize(("model_type", "variant"), chosen([(m, v) for m in MODELS for v in VARIANTS], SAMPLE))
def test_variant(model_type, variant, tmp_path, count):
    src = tmp_path / "src"
    tiny_model(tiny_config(model_type, **MODELS[model_type])).save_pretrained(src)
    VARIANTS[variant](src, model_type)
    outcome = outcome_of(src, tmp_path / "scratch", names={"architectures", "model_type"}, accepted=True)
    count("variants of a folder", outcome.kind)
    assert_same_or_refused(outcome, allowed=[REFUSED if variant in WITHOUT_REFERENCE else SAME])
