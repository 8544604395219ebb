"""Whole commands on a GPU, and the tiny job that they run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from trainer.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[job]
dump_folder = "DUMP"
[model]
flavor = "debug_gqa"
hf_assets_path = "DATA"
[lr_scheduler]
warmup_steps = 2
total_steps = 3
[training]
dataset = "tokens"
dataset_path = "DATA"
local_batch_size = 2
seq_len = 32
steps = 3
mixed_precision_param = "float32"
[checkpoint]
enable = true
interval = 1
keep_latest_k = 0
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
"""


def titan(*arguments, on_cpu: bool = False) -> subprocess.CompletedProcess:
    """Run a command to its end; `on_cpu` hides the GPUs from it."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in ranks}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-P", "-m", "titan_tools", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def read_losses(dump: Path) -> dict[int, float]:
    records = map(json.loads, (dump / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def write_job(folder: Path) -> Path:
    """A token index and a config over it; the run's folder is `folder/whole`."""
    (folder / "text.txt").write_text("\n".join(f"line {n} of some text, and {n * n} is its square" for n in range(500)))
    prepare([folder / "text.txt"], folder / "data", vocab_size=290, held_out=0.1)
    config = folder / "job.toml"
    config.write_text(CONFIG.replace("DUMP", str(folder / "whole")).replace("DATA", str(folder / "data")))
    return config
