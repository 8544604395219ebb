"""What is installed: requirements-core.txt, in an environment that has no more than it says, and the sdist's files."""

import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.models.llama import write as write_llama

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


class Environment:
    """A clone of the last commit, and an environment beside it."""

    def __init__(self, folder: Path):
        self.folder, self.source = folder, folder / "source"
        self.python, self.titan = (folder / "environment/bin" / name for name in ("python", "titan"))
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", self.source], check=True)
        subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run([*map(str, command)], cwd=self.folder, env=own, capture_output=True, text=True)

    def install(self, *what: object) -> None:
        done = self.run(self.python, "-m", "pip", "install", "--quiet", *what)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_sdist_has_what_the_repository_has(tmp_path):
    environment = Environment(tmp_path)
    environment.install("build")
    done = environment.run(environment.python, "-m", "build", "--sdist", "--outdir", tmp_path, environment.source)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = environment.run("git", "-C", environment.source, "ls-files").stdout.split()
    assert [name for name in tracked if not name.startswith(".") and name not in packed] == []


@pytest.mark.slow
def test_commands_run_without_torch(tmp_path):
    environment = Environment(tmp_path)
    run, titan = environment.run, environment.titan
    environment.install("--no-deps", environment.source)
    environment.install("-r", environment.source / "requirements-core.txt")
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
