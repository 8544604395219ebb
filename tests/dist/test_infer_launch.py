"""`titan infer --tp 2` starts its own ranks: same output as one rank, and no rank outlives another (I8)."""

import json
import sys
import time
from functools import partial

import pytest

from tests.tiny_llama import write_llama
from titan_tools import cli, launch
from titan_tools.infer import run as infer_run

ARGUMENTS = (
    "--prompt",
    "-- def main(",
    "--max-new-tokens",
    "24",
    "--temperature",
    "0.9",
    "--top-k",
    "40",
    "--seed",
    "5",
)
DYING_RANK = """
import os, signal, sys, time
from titan_tools.infer import generate
from titan_tools.cli import main

choose = generate.choose

def dying(logits, sampling, seats, **more):
    if os.environ["RANK"] == "1" and seats[0].position == 18:
        open(sys.argv[0] + ".died", "w").write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return choose(logits, sampling, seats, **more)

generate.choose = dying
main()
"""


@pytest.fixture
def titan(monkeypatch, capfd):
    """`titan("infer", …)` → exit code, stdout, stderr, those of started ranks included."""
    # what a launch sets in the environment is taken back; what makes a rank of this process must not be there
    for name in (
        "OMP_NUM_THREADS",
        "TITAN_LAUNCH",
        "PYTHONPATH",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "RANK",
        "WORLD_SIZE",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["titan", *map(str, arguments)])
        code = cli.run()
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return run


def test_two_ranks_print_what_one_prints(titan, tmp_path):
    write_llama(tmp_path)
    one, two = (titan("infer", tmp_path, *ARGUMENTS, "--json", *tp) for tp in ((), ("--tp", "2")))
    assert one[0] == two[0] == 0, two[2]
    assert json.loads(one[1])["results"] == json.loads(two[1])["results"]
    assert json.loads(two[1])["stats"]["tp"] == 2


def test_a_rank_that_dies_ends_the_others(titan, tmp_path, monkeypatch):
    write_llama(tmp_path)
    program = tmp_path / "rank.py"
    program.write_text(DYING_RANK)
    monkeypatch.setattr(infer_run, "run_ranks", partial(launch.run_ranks, program=("-P", str(program))))
    code, _, err = titan("infer", tmp_path, *ARGUMENTS, "--tp", "2")
    ended_after = time.time() - float((tmp_path / "rank.py.died").read_text())
    assert code == 3
    assert "rank 1 was ended by SIGKILL" in err and "Traceback" not in err
    assert ended_after < 2
