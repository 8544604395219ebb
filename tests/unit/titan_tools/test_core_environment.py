"""requirements-core.txt: what runs without torch, in an environment that has no more than it says."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tiny_llama import write_llama

ROOT = Path(__file__).resolve().parents[3]
MOST_BYTES = 300_000_000
WITH_TORCH = [["train", "debug.toml"], ["infer", "hf", "--prompt", "a"], ["estimate-memory", "debug.toml"]]
COMMANDS = [
    ["--version"],
    ["models"],
    ["data", "prepare", "--out", "data", "--max-bytes", "500000"],
    ["config", "init", "debug", "debug.toml"],
    ["config", "show", "debug.toml"],
    ["config", "check", "debug.toml"],
    ["seed", "debug.toml", "seed"],
    ["convert", "hf-to-dcp", "hf", "dcp"],
    ["convert", "dcp-to-hf", "dcp", "again"],
    ["convert", "auto", "hf", "torch", "--to", "torch"],
    ["reshard", "dcp", "two", "--num-files", "2"],
    ["inspect", "dcp"],
    ["diff", "hf", "two"],
    ["verify", "two"],
    ["download", "--help"],
]


def test_versions_are_those_of_pyproject():
    core = [line for line in (ROOT / "requirements-core.txt").read_text().splitlines() if not line.startswith("#")]
    assert set(core) < set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


@pytest.mark.slow
def test_commands_run_without_torch(tmp_path):
    python, titan = (tmp_path / "environment/bin" / name for name in ("python", "titan"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True)

    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", source], check=True)
    assert run(sys.executable, "-m", "venv", tmp_path / "environment").returncode == 0
    for what in (["--no-deps", source], ["-r", source / "requirements-core.txt"]):
        done = run(python, "-m", "pip", "install", "--quiet", *what)
        assert done.returncode == 0, done.stderr
    packages = next((tmp_path / "environment").glob("lib/*/site-packages"))
    assert not (packages / "torch").exists()
    assert sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) < MOST_BYTES
    write_llama(tmp_path / "hf")
    for command in COMMANDS:
        done = run(titan, *command)
        assert done.returncode == 0, (command, done.stderr)
    for command in WITH_TORCH:
        done = run(titan, *command)
        error, tried = done.stderr.strip().splitlines()[-2:]
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert error.startswith("error: titan-tools needs torch>=") and error.endswith(": not installed")
        assert tried.startswith("try: ") and " -m pip install 'torch>=" in tried
