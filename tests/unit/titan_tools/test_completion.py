"""`titan --install-completion` in bash, zsh and fish, and the answers that the installed scripts ask for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
