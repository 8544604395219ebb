"""A quarter of a gigabyte there and back: every byte, and never more in memory than a few blocks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from converters.copy import DEFAULT_WORKERS

ROOT = Path(__file__).resolve().parents[3]
MIB = 1024**2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# `titan` as it is started, and the kernel's account of the process when it is done
MEASURED = """
import atexit, pathlib, sys
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr))
from titan_tools.cli import main
main()
"""


def _shapes() -> dict[str, tuple[int, ...]]:
    dim, hidden = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv_dim = dim // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    inside = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_dim, dim),
        "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (hidden, dim),
        "mlp.up_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    shapes = {f"{name}.weight": (CONFIG["vocab_size"], dim) for name in ("model.embed_tokens", "lm_head")}
    for n in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in inside.items()}
    return shapes | {"model.norm.weight": (dim,)}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A folder of two file shards, random finite bits in every tensor."""
    folder = tmp_path_factory.mktemp("hf")
    random = np.random.default_rng(0)
    finite = np.uint16(0xBFFF)  # without the highest bit of the exponent
    tensors = {
        name: (random.integers(0, 2**16, shape, dtype=np.uint16) & finite).view(ml_dtypes.bfloat16)
        for name, shape in _shapes().items()
    }
    names, weight_map = list(tensors), {}
    for number, part in enumerate((names[:20], names[20:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert total > 230 * MIB
    return folder


def _convert(*arguments) -> int:
    """`titan convert ARGUMENTS…` in a process of its own; its peak memory in bytes, shared libraries included."""
    command = [sys.executable, "-c", MEASURED, "convert", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", done.stderr, re.MULTILINE)
    return int(peak) * 1024


def _tensors(folder):
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, opened.get_tensor(name)


@pytest.mark.slow
def test_there_and_back_in_little_memory(hf, tmp_path):
    limit = (128 + 16 * DEFAULT_WORKERS) * MIB
    assert _convert("hf-to-dcp", hf, tmp_path / "dcp") < limit
    assert _convert("dcp-to-hf", tmp_path / "dcp", tmp_path / "back", "--shard-size", "100MB") < limit
    assert len(list((tmp_path / "back").glob("*.safetensors"))) >= 3
    back = dict(_tensors(tmp_path / "back"))
    for name, tensor in _tensors(hf):
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert back.pop(name).view(dtype=torch.int16).equal(tensor.view(dtype=torch.int16))
    assert not back
