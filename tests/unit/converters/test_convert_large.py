"""Large checkpoints: every byte arrives, and no more is in memory than a few blocks, whatever the model's size.

Peaks are the kernel's: RssAnon, which leaves out page cache and mapped libraries. The limit is RLIMIT_DATA: it counts
memory that a process may write for itself alone, used or not; RLIMIT_AS would count numpy's libraries, too, and the
room that threads reserve without using it.
"""

import json
import re
import resource
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from converters.engine.copy import DEFAULT_WORKERS

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


# Llama 3.2 1B's numbers, with an output of its own: 3.0 GB in bf16
LARGE = {
    **CONFIG,
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LIMIT = 256 * MIB


def _sparse(path: Path, tensors: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file of bf16 zeros that takes no room on the disk."""
    header, position = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + 2 * prod(shape)]}
        position += 2 * prod(shape)
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
    return path


def _peak(*command: object) -> int:
    """Run a process that may hold 256 MiB; the most anonymous memory it was seen with, in bytes."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)),
    )
    most = 0
    while process.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        most = max(most, int(found[1]) * 1024 if found else 0)
        time.sleep(0.005)
    assert process.returncode == 0, process.stderr.read()
    return most


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """3 GB of zeros as HF, and as DCP cut for two meshes."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps(LARGE))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules[__name__], "CONFIG", LARGE)
        file = _sparse(folder / "hf/model.safetensors", _shapes())
    assert file.stat().st_size > 2.5e9
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_c22_three_gigabytes_pass_under_a_quarter(large, tmp_path, workers):
    """There with q and k permuted and cut along both dims for a mesh, and back."""
    titan = ("-P", "-m", "titan_tools")
    options = ("--workers", workers)
    allowed = (128 + 16 * workers) * MIB
    mesh = ("--for-mesh", "dp_shard=4,tp=8")
    assert _peak(*titan, "convert", "hf-to-dcp", large / "hf", tmp_path / "dcp", *mesh, *options) <= allowed
    assert _peak(*titan, "convert", "dcp-to-hf", tmp_path / "dcp", tmp_path / "back", *options) <= allowed


@pytest.mark.slow
def test_c22_casts_other_formats_reshard_and_verify_pass_too(large, tmp_path):
    titan = ("-P", "-m", "titan_tools")
    allowed = (128 + 16 * DEFAULT_WORKERS) * MIB
    wide, cut, meta = tmp_path / "wide", tmp_path / "cut", tmp_path / "meta"
    assert _peak(*titan, "convert", "hf-to-dcp", large / "hf", wide, "--dtype", "float32") <= allowed
    assert _peak(*titan, "reshard", wide, cut, "--for-mesh", "dp_shard=2,tp=4", "--dtype", "bfloat16") <= allowed
    assert _peak(*titan, "convert", "dcp-to-meta", cut, meta) <= allowed
    assert _peak(*titan, "convert", "meta-to-dcp", meta, tmp_path / "dcp") <= allowed
    assert _peak(*titan, "verify", cut) <= (128 + 16 * 4) * MIB  # which reads files with four threads


COPY = """
import sys
from pathlib import Path
from converters.conversion.execute import execute
from converters.conversion.records import Plan, Run
from converters.containers.dcp_write import plan_dcp
from converters.layout.layout import boxes_for_any_mesh
from converters.source.open import open_checkpoint
from converters.engine.read import CatalogReader

with CatalogReader(open_checkpoint(Path(sys.argv[1]))) as reader:
    target = plan_dcp(reader.tensors, boxes_for_any_mesh(reader.tensors, file_bytes=5 * 10**9))
    execute(Path(sys.argv[2]), Plan(reader, target), Run(workers=2))
"""


@pytest.mark.slow
def test_c22_long_rows_and_vectors_are_read_in_parts(tmp_path):
    """Each of them larger than the limit: a row of 600 MB, a vector of 400 MB, a matrix as wide as a vocabulary."""
    shapes = {"rows": (2, 300_000_000), "vector": (200_000_000,), "wide": (1000, 256_000)}
    source = _sparse(tmp_path / "model.safetensors", shapes)
    assert (
        _peak("-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})" + COPY, source, tmp_path / "out")
        <= (128 + 16 * 2) * MIB
    )
