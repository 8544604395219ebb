"""README: every command of its blocks is run in order, and says what the page shows (slow set)."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fp8_folders import write_fp8
from tests.models.deepseek import write as write_deepseek
from tests.models.llama import write as write_llama
from tests.models.llama import write_tokenizer
from tests.unit.titan_tools.fake_hub import Hub

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
RUN_ELSEWHERE = {  # and where
    "./scripts/quickstart.sh": "test_quickstart.py",
    "./scripts/test.sh": "what runs this",
    "pip install .": "scripts/setup.sh",
    "pip install --no-deps . && pip install -r requirements-core.txt": "test_core_environment.py",
}
MOST_SECS = 1800


def commands() -> list[tuple[str, list[str]]]:
    """Every command of a block, and the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for kind, text in BLOCKS:
        for line in text.splitlines():
            if kind == "console" and not line.startswith("$ "):
                found[-1][1].append(line)
            else:
                found.append((line.removeprefix("$ ").partition(" #")[0].strip(), []))
    return found


def shape_of(line: str) -> str:
    """A line without its numbers and the width of its columns."""
    return re.sub(r"\s+", " ", re.sub(r"[\d.,:]+(e[+-]\d+)?", "#", line)).strip()


@pytest.fixture
def place(tmp_path):
    """A folder with what the page takes for granted, and a hub with the model that it downloads."""
    for name in ("my-model", "released"):
        write_llama(tmp_path / name)
        write_tokenizer(tmp_path / name)
    write_deepseek(tmp_path / "deepseek", dtype="bfloat16", n_routed_experts=64)
    write_fp8(tmp_path / "DeepSeek-V3", tmp_path / "deepseek")
    files = {path.name: path.read_bytes() for path in (tmp_path / "released").iterdir()}
    with Hub("meta-llama/Llama-3.2-1B", files, large={"model.safetensors"}) as hub:
        paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        of_hub = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        added = {"PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
        yield tmp_path, os.environ | of_hub | added


def test_every_block_has_commands():
    assert {kind for kind, _ in BLOCKS} == {"bash", "console"}
    assert len(commands()) > 25 and not [line for line, _ in commands() if "…" in line]


@pytest.mark.slow
@pytest.mark.timeout(MOST_SECS + 60)
def test_every_command_of_the_page_runs_and_says_what_it_shows(place):
    folder, environment = place
    missing, num_run = [], 0
    for line, shown in commands():
        if line in RUN_ELSEWHERE:
            continue
        assert shlex.split(line)[0] == "titan", line
        done = subprocess.run(
            [sys.executable, "-P", "-m", "titan_tools", *shlex.split(line)[1:]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=MOST_SECS,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        said = {shape_of(each) for each in (done.stdout + done.stderr).splitlines()}
        missing += [f"{line}: {each}" for each in shown if shape_of(each) not in said]
        num_run += 1
    assert missing == [] and num_run > 20
