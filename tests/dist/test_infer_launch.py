"""`titan infer` on ranks: as one rank says it, whoever starts them, and no rank outlives another (I8)."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.dist.pool import _FORK_SERVER
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
from titan_tools.infer.decoding import generate
from titan_tools.infer import run
from titan_tools.cli import main

RANK, PLACE = os.environ["DYING"].split()

def dying(work, place, holds=lambda *args: True):
    def replaced(*args, **more):
        if place == PLACE and os.environ["RANK"] == RANK and holds(*args):
            open(sys.argv[0] + ".died", "w").write(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **more)
    return replaced

generate.choose = dying(generate.choose, "generating", lambda logits, sampling, seats: seats[0].position == 18)
run.load_model = dying(run.load_model, "loading")
main()
"""
OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TITAN_LAUNCH", "OMP_NUM_THREADS", "PYTHONPATH")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def titan(monkeypatch, capfd):
    """`titan("infer", …)` → exit code, stdout, stderr, those of started ranks included."""
    # what a launch sets in the environment is taken back; what makes a rank of this process must not be there
    for name in (*OF_A_LAUNCH, "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["titan", *map(str, arguments)])
        code = cli.run()
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return run


class Started:
    """Two ranks that somebody else than titan has started: forked, so that none has to import torch again."""

    def __init__(self, folder, *arguments, patience=None):
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.output = [folder / f"output_of_rank_{rank}" for rank in (0, 1)]
        self.processes = []
        for rank in (0, 1):
            given = (rank, self._store.port, [*map(str, arguments)], self.output[rank], patience)
            self.processes.append(_FORK_SERVER.Process(target=_be_rank, args=given, daemon=True))
            self.processes[-1].start()

    def wait(self, rank, secs=60):
        """The exit code of a rank, which ends in that time."""
        assert wait([self.processes[rank].sentinel], timeout=secs), f"rank {rank} is still there"
        self.processes[rank].join()
        return self.processes[rank].exitcode


def _be_rank(rank, port, arguments, output, patience):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    for name in OF_A_LAUNCH:
        os.environ.pop(name, None)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = ["titan", *arguments]
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  as a program of its own has it
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    import torch

    from titan_tools.infer import ranks
    from titan_tools.infer.model import shared_memory

    torch.set_num_threads(1)
    ranks.COLLECTIVE_TIMEOUT = shared_memory.COLLECTIVE_TIMEOUT = patience or ranks.COLLECTIVE_TIMEOUT
    cli.main()


@pytest.fixture
def started(tmp_path):
    """`started(*arguments)`: two ranks of `titan`, which do not outlive the test."""
    running = []

    def start(*arguments, **more):
        running.append(Started(tmp_path, *arguments, **more))
        return running[-1]

    yield start
    for process in (process for one in running for process in one.processes):
        process.kill()
        process.join()


def test_two_ranks_print_what_one_prints(titan, hf):
    one, two = (titan("infer", hf, *ARGUMENTS, "--json", *tp) for tp in ((), ("--tp", "2")))
    assert one[0] == two[0] == 0, two[2]
    assert json.loads(one[1])["results"] == json.loads(two[1])["results"]
    assert json.loads(two[1])["stats"]["tp"] == 2


def test_ranks_of_another_launcher_print_it_once(titan, started, hf):
    ranks = started("infer", hf, *ARGUMENTS, "--json")
    assert [ranks.wait(rank) for rank in (0, 1)] == [0, 0], ranks.output[0].read_text()
    alone = json.loads(titan("infer", hf, *ARGUMENTS, "--json")[1])
    assert json.loads(ranks.output[0].read_text())["results"] == alone["results"]
    assert ranks.output[1].read_text() == ""


def test_scores_of_two_ranks_are_those_of_one(titan, started, hf, tmp_path):
    lines = [{"id": i, "prompt": "One two three" * 9 * i, "completion": " four"} for i in range(4)]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("infer", hf, "--score", "--batch", tmp_path / "lines", "--logprobs", "2", "--json")
    ranks = started(*arguments)
    assert [ranks.wait(rank) for rank in (0, 1)] == [0, 0], ranks.output[0].read_text()
    alone, two = json.loads(titan(*arguments)[1]), json.loads(ranks.output[0].read_text())
    for one, other in zip(alone["results"], two["results"], strict=True):
        assert other["tokens"] == one["tokens"] and other["logprob"] == pytest.approx(one["logprob"], abs=1e-4)
        for told, told_by_two in zip(one["logprobs"], other["logprobs"], strict=True):
            assert told_by_two["logprob"] == pytest.approx(told["logprob"], abs=1e-4)
    assert math.exp(-two["stats"]["logprob"] / two["stats"]["num_tokens"]) == two["stats"]["perplexity"]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_whose_peer_dies_ends_by_itself(started, tmp_path, dies):
    """In a batch, without an agent that would end it: as on another machine of a launch."""
    write_llama(tmp_path / "hf", max_position_embeddings=100_000)
    (tmp_path / "in").write_text('{"id": "short", "prompt": "a"}\n{"id": "long", "prompt": "b"}\n')
    out, other = tmp_path / "out", 1 - dies
    arguments = ("infer", tmp_path / "hf", "--batch", tmp_path / "in", "--out", out, "--ignore-eos")
    # which the one text has after 26 letters, and the other has not in its first 12,000
    ranks = started(*arguments, "--max-new-tokens", "99000", "--stop", "e^", "--temperature", "3", "--seed", "2")
    _wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") == 1)
    os.kill(ranks.processes[dies].pid, signal.SIGKILL)
    code = ranks.wait(other, secs=2)
    told = ranks.output[other].read_text()
    assert code == 3 and f"error: rank {other} has lost another rank" in told and "Traceback" not in told
    assert len(out.read_bytes().splitlines()) == 1  # what was finished stays


slow = pytest.mark.slow


@slow
def test_a_rank_that_hangs_is_given_up(started, tmp_path):
    write_llama(tmp_path / "hf", max_position_embeddings=100_000)
    asked = ("--prompt", "a", "--max-new-tokens", "99000", "--ignore-eos")
    ranks = started("infer", tmp_path / "hf", *asked, patience=timedelta(seconds=5))
    _wait_for(lambda: ranks.output[0].exists() and ranks.output[0].stat().st_size > 0)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    assert ranks.wait(0) == 3
    told = ranks.output[0].read_text(errors="replace")
    assert "error: rank 0 has waited in vain for another rank" in told and "Traceback" not in told


@pytest.mark.parametrize(
    "dying", ["1 generating", pytest.param("0 generating", marks=slow), pytest.param("1 loading", marks=slow)]
)
def test_a_rank_that_dies_ends_the_others(titan, hf, tmp_path, monkeypatch, dying):
    program = tmp_path / "rank.py"
    program.write_text(DYING_RANK)
    monkeypatch.setenv("DYING", dying)
    monkeypatch.setattr(infer_run, "run_ranks", partial(launch.run_ranks, program=("-P", str(program))))
    code, _, err = titan("infer", hf, *ARGUMENTS, "--tp", "2")
    ended_after = time.time() - float((tmp_path / "rank.py.died").read_text())
    assert code == 3
    assert f"rank {dying[0]} was ended by SIGKILL" in err and "Traceback" not in err
    assert ended_after < 2


@pytest.fixture
def endless(tmp_path):
    """`endless(*command, options=…)` generates on two ranks until something ends it: the process, and its ranks."""
    write_llama(tmp_path / "hf", max_position_embeddings=100_000)
    (tmp_path / "tmp").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
    started = []

    def start(*command, options=()):
        asked = ("--prompt", "a", "--max-new-tokens", "99000", "--ignore-eos")
        started.append(
            subprocess.Popen(
                [*command, "infer", str(tmp_path / "hf"), *asked, *options],
                env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
                stdout=(tmp_path / "out").open("wb"),
                stderr=(tmp_path / "err").open("wb"),
                start_new_session=True,
            )
        )
        _wait_for(lambda: (tmp_path / "out").stat().st_size > 0)
        pid = started[0].pid
        ranks = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        ranks.sort(key=lambda child: b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes())
        assert len(ranks) == 2
        return started[0], ranks

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


TITAN = (sys.executable, "-P", "-m", "titan_tools")


@slow
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "error: interrupted\n"), (signal.SIGTERM, 143, "error: ended by SIGTERM\n")],
)
def test_ctrl_c_and_sigterm_end_all_ranks_and_leave_nothing(endless, tmp_path, number, code, said):
    process, ranks = endless(*TITAN, options=["--tp=2"])
    send = os.killpg if number == signal.SIGINT else os.kill  # a terminal sends Ctrl-C to all
    send(process.pid, number)
    _wait_for(lambda: not any(map(_is_alive, ranks)), secs=2)
    assert process.wait(timeout=10) == code
    assert (tmp_path / "err").read_text() == said
    assert [*(tmp_path / "tmp").glob("titan-*")] == []


@slow
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_under_torchrun_ends_the_others(endless, tmp_path, dies):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "titan_tools")
    process, ranks = endless(sys.executable, *torchrun)
    os.kill(ranks[dies], signal.SIGKILL)
    _wait_for(lambda: not any(map(_is_alive, ranks)), secs=2)
    assert process.wait(timeout=20) == 1
    assert "this is a fault of titan" not in (tmp_path / "err").read_text()


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(holds, secs=60):
    deadline = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
