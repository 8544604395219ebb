"""The scripts for those who type them: run_train.sh as it is, the Slurm one with stand-ins for Slurm's commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.runs import make_data, read_losses

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
RUN_TRAIN, SLURM = SCRIPTS / "run_train.sh", SCRIPTS / "multinode_trainer.slurm"

# Runs the command for each task, as srun does, and gives the highest exit code; or the one that STAND_IN_CODE says.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
command = sys.argv[1:]
assert command.pop(0) == "--kill-on-bad-exit=1"
tasks = int(os.environ["SLURM_NTASKS"])
if code := os.environ.get("STAND_IN_CODE"):
    sys.exit(int(code))
places = [{{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}} for n in range(tasks)]
ranks = [subprocess.Popen(command, env=os.environ | place) for place in places]
sys.exit(max(rank.wait() for rank in ranks))
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(tmp_path):
    """Run a script in a folder of its own, with Slurm's commands from here and titan from the tested environment."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def script(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        paths = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        added = {"PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TITAN_ENVIRONMENT": sys.prefix}
        return subprocess.run(
            ["bash", path, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=clean | added | environment,
            timeout=240,
        )

    return script


def few_steps(data: Path, dump: Path) -> list[str]:
    degrees = ("data_parallel_shard", "tensor_parallel", "pipeline_parallel")
    return [
        *(f"--parallelism.{name}_degree={degree}" for name, degree in zip(degrees, (2, 1, 1), strict=True)),
        *("--training.steps=3", "--training.seq_len=32", "--training.local_batch_size=2", "--metrics.log_freq=1"),
        *("--validation.no_enable", "--metrics.no_enable_tensorboard", "--checkpoint.no_enable"),
        *(f"--training.dataset_path={data}", f"--job.dump_folder={dump}", "--job.save_config_file=config.json"),
    ]


@pytest.mark.parametrize("script", [*SCRIPTS.glob("*.sh"), SLURM], ids=lambda path: path.name)
def test_bash_reads_it(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_run_train_gives_titans_exit_code_and_knows_torchtitans_dry_run(run):
    assert run(RUN_TRAIN, "--training.stepz", "3").returncode == 2
    assert run(RUN_TRAIN, COMM_MODE="local_tensor").returncode == 2
    known = {"TRAIN_FILE": "torchtitan.train", "TORCHFT_LIGHTHOUSE": "http://localhost:29510"}
    done = run(RUN_TRAIN, "--rank", "5", COMM_MODE="fake_backend", NGPU="8", **known)
    assert done.returncode == 0 and "on 8 ranks" in done.stdout and "rank 5" in done.stdout
    assert "TRAIN_FILE" not in done.stderr
    assert done.stderr.count("note: TORCHFT_LIGHTHOUSE is not read") == 1


def test_variables_that_have_no_meaning_here_are_said(run):
    done = run(RUN_TRAIN, TRAIN_FILE="my.train")
    assert done.returncode == 2 and "error: TRAIN_FILE=my.train names another training program" in done.stderr


PROBE = """
import os
with open(f"allocator_of_{os.environ.get('RANK', 'launcher')}", "w") as file:
    file.write(str([os.environ.get(f"PYTORCH_{name}ALLOC_CONF") for name in ("", "CUDA_")]))
"""


@pytest.mark.slow
def test_run_train_trains_on_as_many_ranks_as_asked_for(run, data, tmp_path):
    """LOG_RANK and the allocator's settings reach the ranks."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "mine.toml").write_bytes((ROOT / "trainer/config/presets/debug.toml").read_bytes())
    steps = [*few_steps(data, tmp_path / "run"), "--experimental.custom_import=probe.py"]
    done = run(RUN_TRAIN, *steps, CONFIG_FILE="./mine.toml", NGPU="2", LOG_RANK="0,1")
    assert done.returncode == 0, done.stderr
    assert "model        llama3 debug_gqa, 1,311,872 parameters\nmesh         2 ranks on the CPU" in done.stderr
    lines = [line.split()[:4] for line in done.stdout.splitlines()]
    assert sorted(lines) == [["[rank", f"{rank}]", "step", step] for rank in (0, 1) for step in "123"]
    assert len(read_losses(tmp_path / "run")) == 3  # by rank 0 alone
    assert (tmp_path / "allocator_of_1").read_text() == "['expandable_segments:True', None]"
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["origins"]["training.steps"] == "command line"
    assert saved["origins"]["optimizer.lr"].startswith("mine.toml:")

    done = run(RUN_TRAIN, *steps, NGPU="2", LOG_RANK="2")
    assert done.returncode == 2 and "the ranks are 0 to 1" in done.stderr and "try: LOG_RANK=0" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("PYTORCH_ALLOC_CONF", ""), ("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")]
)
def test_slurm_ranks_have_the_allocator_that_is_asked_for(run, data, tmp_path, name, value):
    (tmp_path / "probe.py").write_text(PROBE)
    steps = ["debug", *few_steps(data, tmp_path / "run"), "--experimental.custom_import=probe.py"]
    assert run(SLURM, *steps, **slurm_of(tmp_path)).returncode == 0
    assert (tmp_path / "allocator_of_1").read_text() == "['expandable_segments:True', None]"
    assert run(SLURM, *steps, **slurm_of(tmp_path), **{name: value}).returncode == 0
    found = [value if name == asked else None for asked in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    assert (tmp_path / "allocator_of_1").read_text() == str(found)


def slurm_of(tmp_path: Path, **more: str) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "MASTER_PORT": "29731"}
    return job | {"REQUEUED": str(tmp_path / "requeued")} | more


@pytest.mark.slow
def test_a_slurm_job_trains_with_a_rank_for_each_task(run, data, tmp_path):
    done = run(SLURM, "debug", *few_steps(data, tmp_path / "run"), **slurm_of(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mesh         2 ranks on the CPU") == 1 and len(read_losses(tmp_path / "run")) == 3
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("code", "requeued"), [(75, "123\n"), (4, None), (0, None)])
def test_a_slurm_job_that_saved_on_request_queues_again(run, tmp_path, code, requeued):
    done = run(SLURM, **slurm_of(tmp_path, STAND_IN_CODE=str(code), CONFIG_FILE="debug"))
    assert done.returncode == code
    output = (tmp_path / "requeued").read_text() if (tmp_path / "requeued").exists() else None
    assert output == requeued


def test_a_slurm_job_without_a_config_says_so(run, tmp_path):
    done = run(SLURM, **slurm_of(tmp_path))
    assert done.returncode != 0 and "CONFIG_FILE" in done.stderr


def test_the_signal_reaches_the_ranks_in_time():
    """--signal without B: goes to the steps' tasks, not to the batch shell; and srun's tasks are titan itself."""
    text = SLURM.read_text()
    assert "#SBATCH --signal=USR1@180\n" in text and "#SBATCH --requeue\n" in text
    assert "exec titan train" in text
