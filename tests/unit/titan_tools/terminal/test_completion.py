"""`titan --install-completion` in bash, zsh and fish, and the answers that the installed scripts ask for."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from titan_tools import cli

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = {
    "bash": ".bash_completions/titan.sh",
    "zsh": ".zfunc/_titan",
    "fish": ".config/fish/completions/titan.fish",
}
# What each script sets for the command line `titan verify --acc`
REQUESTS = {
    "bash": {"COMP_WORDS": "titan verify --acc", "COMP_CWORD": "2"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "titan verify --acc"},
    "fish": {"_TYPER_COMPLETE_ARGS": "titan verify --acc", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.fixture
def environment(tmp_path):
    """A home folder of its own, and a `titan` on PATH."""
    program = tmp_path / "bin" / "titan"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m titan_tools "$@"\n')
    program.chmod(0o755)
    return os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


def run(command: list[str], environment: dict[str, str], **options: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", INSTALLED)
def test_completion_is_installed_for_the_current_shell_and_answers(shell, environment):
    # A bash of another name stands in for shells that this machine may not have: the parent's name decides.
    out = run(["bash", "-c", f"exec -a {shell} bash -c 'titan --install-completion; exit $?'"], environment)
    assert f"{shell} completion installed in" in out
    script = (Path(environment["HOME"]) / INSTALLED[shell]).read_text()
    assert f"_TITAN_COMPLETE=complete_{shell}" in script
    assert all(name in script for name in REQUESTS[shell])
    answer = run(["titan"], environment | REQUESTS[shell] | {"_TITAN_COMPLETE": f"complete_{shell}"})
    assert "--accept" in answer and "--quick" not in answer


def test_bash_completes_with_the_installed_script(environment):
    run(["bash", "-c", "titan --install-completion; exit $?"], environment)
    complete = "source ~/.bashrc; COMP_WORDS=(titan conv) COMP_CWORD=1; _titan_completion titan; echo ${COMPREPLY[@]}"
    assert run(["bash", "-c", complete], environment) == "convert\n"


@pytest.fixture
def answers(monkeypatch, capsys, tmp_path):
    """What bash is told for a command line that ends at the cursor."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    for name in ("meta-llama--Llama-3.2-1B", "Qwen--Qwen3-0.6B"):
        (cache / f"models--{name}").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))

    def ask(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setattr(sys, "argv", ["titan"])
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setenv("_TITAN_COMPLETE", "complete_bash")
        assert cli.run() == 0
        return capsys.readouterr().out.split()

    return ask


SCHEDULES = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("titan train debug --training.st", ["--training.steps"]),
        ("titan seed debug out --training.glob", ["--training.global_batch_size"]),
        ("titan config check debug --world", ["--world-size"]),
        ("titan train debug --parallelism.pipeline_parallel_schedule ", SCHEDULES),
        ("titan train debug --parallelism.pipeline_parallel_schedule = G", ["GPipe"]),
        ("titan estimate-memory debug --dry --training.dtype b", ["bfloat16"]),
        ("titan seed debug --training.dtype ", ["float32", "bfloat16"]),  # in the place of OUT
        ("titan train debug --compile.components ", ["model", "loss"]),
        ("titan train debug --compile.enable ", ["true", "false"]),
        ("titan train debug --training.steps ", []),
        ("titan train debug --model.name qw", ["qwen3"]),
        ("titan train debug --model.name qwen3 --model.flavor 1", ["1.7B", "14B"]),
        ("titan train llama3_8b --model.flavor 4", ["405B"]),
        ("titan train debug --checkpoint.initial_load_path meta", ["meta-llama/Llama-3.2-1B"]),
        ("titan config show deepseek", ["deepseek_v3_16b", "deepseek_v3_671b"]),
        ("titan estimate-memory debug --gpu h100", ["h100-80", "h100-96"]),
        ("titan estimate-memory debug --allocator ", ["classic", "expandable"]),
        ("titan convert auto a b --dtype float8", ["float8_e4m3fn", "float8_e5m2"]),
        ("titan reshard a b --optimizer-dtype b", ["bfloat16"]),
        ("titan convert auto a b --to to", ["torch", "torchtune"]),
        ("titan infer a --dtype f", ["float32", "float16"]),
        ("titan infer Qwen", ["Qwen/Qwen3-0.6B"]),
        ("titan diff a meta-llama/", ["meta-llama/Llama-3.2-1B"]),
        ("titan inspect a --model-from Q", ["Qwen/Qwen3-0.6B"]),
        ("titan inspect ", []),  # the shell completes files
        ("titan download a --assets ", ["tokenizer", "config", "index", "safetensors"]),
    ],
)
def test_values_are_completed(answers, line, expected):
    assert answers(line) == expected


def test_local_files_take_precedence(answers, tmp_path):
    (tmp_path / "Qwen").mkdir()
    assert answers("titan infer Qw") == []
    for name in ("debug_2.toml", "debug_notes.txt"):
        (tmp_path / name).touch()
    assert answers("titan train debug") == ["debug", "debug_2.toml"]
    assert answers("titan train mine") == []


def test_completion_loads_no_torch_and_is_quick(environment):
    line = {"COMP_WORDS": "titan train debug --parallelism.pipeline_parallel_schedule G", "COMP_CWORD": "4"}
    env = environment | line | {"_TITAN_COMPLETE": "complete_bash"}
    code = (
        "import sys, atexit; atexit.register(lambda: print(*{'torch', 'numpy', 'huggingface_hub'} & {*sys.modules})); "
    )
    code += "from titan_tools.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["GPipe"], done.stderr

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    secs = []
    for _ in range(3):
        start = spent()
        run(["titan"], env)
        secs.append(spent() - start)
    assert min(secs) <= 0.5  # 0.3 on an idle machine
