"""titan train --dry-run: one rank of any job, told in seconds, and every config error at once."""

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


def test_a_job_of_512_ranks_is_told_on_one(train, tmp_path):
    words = ("--parallelism.data_parallel_shard_degree=-1", "--world-size=512", "--rank=257", "--training.steps=3")
    done = train("debug", "--dry-run", *words, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 128, "cp": 1, "tp": 2}
    assert told["coordinates"] == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert told["stages"] == {"1": ["layers.2", "layers.3", "norm", "output"]} and told["num_stages"] == 2
    assert (told["samples_per_step"], told["tokens_per_step"], told["steps"]) == (512, 512 * 256, 3)
    traffic = {(t["axis"], t["kind"]): t["calls"] for t in told["collectives"]}
    assert traffic["fsdp", "reduce-scatter"] == 3  # two layers, and norm with output
    assert traffic["pp", "receive"] == traffic["pp", "send"] == told["num_microbatches"] == 2
    assert list(tmp_path.iterdir()) == []  # nothing is written, no data is needed


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
    assert any(line.split()[:3] == ["tp", "all-gather", "72"] for line in lines), done.stdout
    assert "left out: compile" in done.stderr and "estimate-memory" in done.stderr
    assert done.stderr.count("left out:") == 3


def test_every_error_is_told_at_once_and_without_torch(train):
    words = ("--training.seq_len=255", "--parallelism.pipeline_parallel_microbatch_size=3", "--world-size=6")
    done = train("debug", "--dry-run", *words)
    assert done.returncode == 2 and done.stdout == ""
    for told in ("there are 6", "training.seq_len = 255", "microbatch_size = 3"):
        assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["debug", "--dry-run", "--rank", "8"], "the job has ranks 0 to 7"),
        (["debug", "--world-size", "8"], "belong to --dry-run"),
        (["debug", "--dry-run", "--training.stepz", "3"], "did you mean `training.steps`?"),
    ],
)
def test_wrong_usage(train, arguments, told):
    done = train(*arguments)
    assert done.returncode == 2 and told in done.stderr


@pytest.mark.slow
def test_405b_on_512_ranks_takes_little(tmp_path):
    command = [sys.executable, "-P", "-m", "titan_tools", "train", "llama3_405b", "--dry-run", "--json"]
    command += ["--world-size", "512", "--rank", "511"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert told["rank_parameters"] == pytest.approx(405853388800 / 512, rel=2e-3)  # 128,256 rows are not even
    assert after.ru_utime - before.ru_utime < 60  # seconds of one core; about 20 on a quiet machine
    assert after.ru_maxrss < 1.5 * 2**20  # KiB
