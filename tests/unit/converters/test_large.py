"""Headers of the largest models there are: whole `titan` processes, their CPU seconds and peak memory."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.big_shapes import LLAMA_405B_CONFIG, deepseek_v3, llama_405b, write_sparse_dcp, write_sparse_hf
from tests.fp8_folders import CONFIG
from tests.unit.converters.families.test_deepseek_config import V3

# The peak as the kernel has it for the process's own memory: rusage would count the parent's from before the exec.
CHILD = """
import sys, os
from titan_tools.cli import run
code = run()
sys.stdout.flush()
peak_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, sum(os.times()[:2]), peak_kb, file=sys.stderr)
"""


def titan(*arguments) -> tuple[str, float, float]:
    """(stdout, CPU seconds, peak MB) of a whole process."""
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent.parent)
    code, secs, peak_kb = done.stderr.split()[-3:]
    assert code == "0", done.stderr
    return done.stdout, float(secs), int(peak_kb) * 1024 / 1e6


def test_inspect_of_405b(tmp_path):
    write_sparse_hf(tmp_path / "hf", llama_405b(), shard_bytes=4_800_000_000, config=LLAMA_405B_CONFIG)
    out, secs, peak_mb = titan("inspect", tmp_path / "hf")
    assert "405,853,388,800 parameters" in out and "191 files" in out and "layers.{0..125}" in out
    assert secs < 5 and peak_mb < 500


@pytest.mark.slow
@pytest.mark.parametrize("container", ["hf", "dcp"])
@pytest.mark.parametrize("model", ["405B", "671B"])
def test_inspect_and_quick_verify_of_the_largest(tmp_path, container, model):
    tensors = llama_405b() if model == "405B" else deepseek_v3()
    if container == "hf":
        config = LLAMA_405B_CONFIG if model == "405B" else V3 | {"quantization_config": CONFIG}
        write_sparse_hf(tmp_path / "x", tensors, shard_bytes=4_800_000_000, config=config)
    else:
        write_sparse_dcp(tmp_path / "x", tensors)
    for command in (("inspect",), ("inspect", "--json"), ("inspect", "--every"), ("verify", "--quick")):
        out, secs, peak_mb = titan(*command, tmp_path / "x")
        assert secs < 5 and peak_mb < 500, (command, secs, peak_mb)
    found = json.loads(titan("inspect", "--json", tmp_path / "x")[0])
    assert sum(line["num_tensors"] for line in found["lines"]) == len(tensors) == (1137 if model == "405B" else 90_427)
    if model == "671B":
        (experts,) = [line for line in found["lines"] if line["name"].endswith("experts.{0..255}.up_proj.weight")]
        assert experts["name"] == "model.layers.{3..60}.mlp.experts.{0..255}.up_proj.weight"
        assert (experts["num_tensors"], experts["dtype"]) == (58 * 256, "float8_e4m3fn")


@pytest.mark.slow
def test_200_000_chunks_as_torch_pickles_them(tmp_path):
    """1,000 tensors over 200 ranks, `.metadata` pickled by torch's own classes; the data are sparse files."""
    properties = TensorProperties(dtype=torch.bfloat16)
    entries, places, ranks, item = {}, {}, 200, 1577 + 4096
    for n in range(1000):
        fqn = f"layers.{n // 10}.block.{n % 10}.weight"
        chunks = [ChunkStorageMetadata(torch.Size([8 * r, 0]), torch.Size([8, 256])) for r in range(ranks)]
        entries[fqn] = TensorStorageMetadata(properties, torch.Size([8 * ranks, 256]), chunks)
        for r, chunk in enumerate(chunks):
            places[MetadataIndex(fqn, chunk.offsets, r)] = _StorageInfo(f"__{r}_0.distcp", n * item, item)
    metadata = Metadata(entries, {fqn: (fqn,) for fqn in entries}, places, StorageMeta(tmp_path), "1.0.0")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for r in range(ranks):
        with (tmp_path / f"__{r}_0.distcp").open("wb") as file:
            file.write(b"PK\x03\x04")
            file.truncate(1000 * item)
    out, secs, peak_mb = titan("inspect", tmp_path)
    assert "200,000 chunks" in out and "layers.{0..99}.block.{0..9}.weight" in out
    assert secs < 4 and peak_mb < 400, (secs, peak_mb)
