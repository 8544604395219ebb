"""titan train --dry-run: one rank of any job, in seconds, and every config error at once."""

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def train(titan, tmp_path, monkeypatch):
    """`titan train` in the test's folder."""
    monkeypatch.chdir(tmp_path)
    return partial(titan, "train")


def test_a_job_of_512_ranks_is_reported_on_one(train, tmp_path):
    words = ("--parallelism.data_parallel_shard_degree=-1", "--world-size=512", "--rank=257", "--training.steps=3")
    words += ("--training.global_batch_size=512",)
    done = train("debug", "--dry-run", *words, "--json")
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout)
    assert message["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 128, "cp": 1, "tp": 2, "ep": 1, "etp": 1}
    assert message["coordinates"] == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1, "ep": 0, "etp": 1}
    assert message["stages"] == {"1": ["layers.2", "layers.3", "norm", "output"]} and message["num_stages"] == 2
    assert (message["samples_per_step"], message["tokens_per_step"], message["steps"]) == (512, 512 * 256, 3)
    traffic = {(t["axis"], t["kind"]): t["calls"] for t in message["collectives"]}
    shared = {"all ranks": [], "pp": ["pp"], "fsdp": ["fsdp", "batch"], "tp": ["tp"]}
    assert message["communicators"] == shared
    assert traffic["fsdp", "reduce-scatter"] == 3  # two layers, and norm with output
    assert traffic["pp", "receive"] == traffic["pp", "send"] == message["num_microbatches"] == 2
    assert list(tmp_path.iterdir()) == []  # nothing is written, no data is needed
    assert "building rank 257 and running a step …" in done.stderr


def test_what_is_printed_for_people_also_of_what_only_a_gpu_can_run(train):
    words = ("--parallelism.enable_async_tensor_parallel", "--training.enable_cpu_offload")
    words += ("--profiling.enable_memory_snapshot", "--compile.enable", "--training.global_batch_size", "32")
    done = train("debug", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "llama3 debug_gqa, 1,311,872 parameters, on 8 ranks"
    assert "rank 0        pp 0 of 2, dp_shard 0 of 2, tp 0 of 2" in lines
    assert "stage         0 of 2: tok_embeddings, layers.{0..1}" in lines
    assert "step          32 samples, 8,192 tokens; 4 forward and backward passes; 2 microbatches each" in lines
    assert "4 communicators: all ranks, pp, fsdp = batch, tp" in lines
    assert any(line.split()[:3] == ["tp", "all-gather", "72"] for line in lines), done.stdout
    assert "left out: compile" in done.stderr and "estimate-memory" in done.stderr
    assert done.stderr.count("left out:") == 3


def test_the_page_says_what_is_counted_of_experts_and_documents(train):
    words = ("--model.name=qwen3", "--model.flavor=debug_moe", "--training.document_mask=offsets")
    done = train("debug", "--dry-run", *words, "--parallelism.expert_parallel_degree=2")
    assert done.returncode == 0, done.stderr
    assert any(line.split()[:2] == ["ep", "all-to-all"] for line in done.stdout.splitlines()), done.stdout
    assert "sizes of all-to-all: what this rank sends" in done.stderr
    assert "activations are not counted: titan estimate-memory" in done.stderr  # which describes both


def test_every_error_is_reported_at_once_and_without_torch(train):
    words = ("--training.seq_len=255", "--parallelism.pipeline_parallel_microbatch_size=3", "--world-size=6")
    done = train("debug", "--dry-run", *words)
    assert done.returncode == 2 and done.stdout == ""
    for message in ("there are 6", "training.seq_len = 255", "microbatch_size = 3"):
        assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["debug", "--dry-run", "--rank", "8"], "the job has ranks 0 to 7"),
        (["debug", "--world-size", "8"], "belong to --dry-run"),
        (["debug", "--dry-run", "--training.stepz", "3"], "did you mean `training.steps`?"),
    ],
)
def test_wrong_usage(train, arguments, message):
    done = train(*arguments)
    assert done.returncode == 2 and message in done.stderr


# The kernel's peak of the process itself: rusage counts also that of its parent, from before the exec
CHILD = """
import sys
from titan_tools.cli import run
run()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""


@pytest.mark.slow
def test_405b_on_512_ranks_takes_little(tmp_path):
    command = [sys.executable, "-P", "-c", CHILD, "train", "llama3_405b", "--dry-run", "--json"]
    command += ["--world-size", "512", "--rank", "511"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    message = json.loads(done.stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert message["rank_parameters"] == pytest.approx(405853388800 / 512, rel=2e-3)  # 128,256 rows are not even
    assert after.ru_utime - before.ru_utime < 60  # seconds of one core; about 20 on a quiet machine
    assert int(done.stderr.split()[-1]) < 1.5 * 2**20  # KiB
