"""Ranks of `titan infer` that die, hang, are stopped or interrupted: no rank outlives another (I8)."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from tests.dist.infer_ranks import ARGUMENTS, TITAN, cpu_secs, is_alive, outside, wait_for
from tests.json_lines import write_lines
from tests.models.llama import write as write_llama
from titan_tools.infer import run as infer_run
from titan_tools.launch.launch import Launch

slow = pytest.mark.slow
AGENT_KILLS_AFTER_SECS = 30  # what has not ended after SIGTERM
DYING_RANK = """
import os, signal, sys, time
from titan_tools.infer.decoding import generate
from titan_tools.infer import loading
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
loading.load_model = dying(loading.load_model, "loading")
main()
"""


@pytest.mark.parametrize("dies", [pytest.param(0, marks=slow), 1])
def test_a_rank_whose_peer_dies_ends_by_itself(started, tmp_path, dies):
    """In a batch, without an agent that would end it: as on another machine of a launch."""
    write_llama(tmp_path / "hf", max_position_embeddings=100_000)
    (tmp_path / "in").write_text('{"id": "short", "prompt": "a"}\n{"id": "long", "prompt": "b"}\n')
    out, other = tmp_path / "out", 1 - dies
    arguments = ("infer", tmp_path / "hf", "--batch", tmp_path / "in", "--out", out, "--ignore-eos")
    # which the one text has after 26 letters, and the other has not in its first 12,000
    ranks = started(*arguments, "--max-new-tokens", "99000", "--stop", "e^", "--temperature", "3", "--seed", "2")
    wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") == 1)
    os.kill(ranks.processes[dies].pid, signal.SIGKILL)
    code = ranks.wait(other)  # collectives time out after an hour
    text = ranks.output[other].read_text()
    assert code == 3 and f"error: rank {other} has lost another rank" in text and "Traceback" not in text
    assert len(out.read_bytes().splitlines()) == 1  # what was finished stays


@slow
@pytest.mark.parametrize("dies", [0, 5])
def test_a_rank_that_dies_ends_seven_others(started, tmp_path, dies):
    write_llama(tmp_path / "hf", max_position_embeddings=100_000, num_attention_heads=8)
    asked = ("--prompt", "a", "--max-new-tokens", "99000", "--ignore-eos")
    ranks = started("infer", tmp_path / "hf", *asked, num=8)
    wait_for(lambda: ranks.output[0].exists() and ranks.output[0].stat().st_size > 0)
    os.kill(ranks.processes[dies].pid, signal.SIGKILL)
    others = [rank for rank in range(8) if rank != dies]
    assert [ranks.wait(rank) for rank in others] == [3] * 7
    assert all("has lost another rank" in ranks.output[rank].read_text(errors="replace") for rank in others)


@slow
def test_a_rank_that_hangs_on_another_machine_is_given_up(started, tmp_path):
    write_llama(tmp_path / "hf", max_position_embeddings=100_000)
    asked = ("--prompt", "a", "--max-new-tokens", "99000", "--ignore-eos")
    ranks = started("infer", tmp_path / "hf", *asked, patience=timedelta(seconds=5))
    wait_for(lambda: ranks.output[0].exists() and ranks.output[0].stat().st_size > 0)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    assert ranks.wait(0) == 3
    text = ranks.output[0].read_text(errors="replace")
    assert "error: rank 0 timed out while waiting for another rank\nhint: it hangs, was stopped, or its machine" in text
    assert "Traceback" not in text


@slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_waited_for(titan_and_ranks, started, tmp_path, monkeypatch, stopped):
    """By Ctrl-Z, or since nobody reads its output."""
    write_llama(tmp_path / "hf", max_position_embeddings=100_000)
    asked = ("infer", tmp_path / "hf", "--prompt", "a", "--max-new-tokens", "3000", "--ignore-eos")
    ranks = started(*asked)
    wait_for(lambda: ranks.output[0].exists() and ranks.output[0].stat().st_size > 0)
    other = ranks.processes[1 - stopped].pid
    os.kill(ranks.processes[stopped].pid, signal.SIGSTOP)
    time.sleep(1)
    before = cpu_secs(other)
    time.sleep(3)
    assert cpu_secs(other) - before < 0.5
    os.kill(ranks.processes[stopped].pid, signal.SIGCONT)
    assert [ranks.wait(rank) for rank in (0, 1)] == [0, 0]
    alone = titan_and_ranks(*asked)[1]
    assert ranks.output[0].read_text(errors="replace").startswith(alone)


@slow  # in the suite: test_agent.py has a killed rank
@pytest.mark.parametrize("dying", ["1 generating", "0 generating", "1 loading"])
def test_a_rank_that_dies_ends_the_others(titan_and_ranks, hf, tmp_path, monkeypatch, dying):
    program = tmp_path / "rank.py"
    program.write_text(DYING_RANK)
    monkeypatch.setenv("DYING", dying)
    monkeypatch.setattr(infer_run, "Launch", partial(Launch, program=("-P", str(program))))
    code, _, err = titan_and_ranks("infer", hf, *ARGUMENTS, "--tp", "2")
    ended_after = time.time() - float((tmp_path / "rank.py.died").read_text())
    assert code == 3
    assert f"rank {dying[0]} was ended by SIGKILL" in err and "Traceback" not in err
    assert ended_after < AGENT_KILLS_AFTER_SECS


@pytest.fixture
def endless(tmp_path):
    """`endless(*command, options=…)` generates on two ranks until something ends it: the process, and its ranks."""
    write_llama(tmp_path / "hf", max_position_embeddings=100_000)
    (tmp_path / "tmp").mkdir()
    started = []

    def start(*command, options=()):
        asked = ("--prompt", "a", "--max-new-tokens", "99000", "--ignore-eos")
        started.append(
            subprocess.Popen(
                [*command, "infer", str(tmp_path / "hf"), *asked, *options],
                env=outside() | {"TMPDIR": str(tmp_path / "tmp")},
                stdout=(tmp_path / "out").open("wb"),
                stderr=(tmp_path / "err").open("wb"),
                start_new_session=True,
            )
        )
        wait_for(lambda: (tmp_path / "out").stat().st_size > 0)
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


@slow
def test_ctrl_c_keeps_the_finished_lines_of_two_ranks_and_a_rerun_completes_them(titan_and_ranks, tmp_path):
    write_llama(tmp_path / "hf", max_position_embeddings=1024)
    source = write_lines(tmp_path / "in", [{"id": i, "prompt": f"def f{i}("} for i in range(150)])
    asked = ("infer", tmp_path / "hf", "--batch", source, "--max-new-tokens", "100", "--ignore-eos", "--out")
    out, alone = tmp_path / "out", tmp_path / "alone"
    process = subprocess.Popen(
        [*TITAN, *map(str, asked), str(out), "--tp=2"],
        env=outside(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") > 9)
        os.killpg(process.pid, signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "error: interrupted\nhint: finished results are in " in err
    assert "Traceback" not in err
    kept = out.read_bytes()
    assert 9 < kept.count(b"\n") < 150
    assert titan_and_ranks(*asked, alone)[0] == 0
    whole = alone.read_bytes()
    assert {*kept.split(b"\n")[:-1]} < {*whole.split(b"\n")}
    code, _, err = titan_and_ranks(*asked, out, "--tp", "2")
    assert code == 0 and "of 150 prompts are in " in err
    assert out.read_bytes() == whole


@slow
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "error: interrupted\n"), (signal.SIGTERM, 143, "error: ended by SIGTERM\n")],
)
def test_ctrl_c_and_sigterm_end_all_ranks_and_leave_nothing(endless, tmp_path, number, code, said):
    process, ranks = endless(*TITAN, options=["--tp=2"])
    send = os.killpg if number == signal.SIGINT else os.kill  # a terminal sends Ctrl-C to all
    send(process.pid, number)
    wait_for(lambda: not any(map(is_alive, ranks)), secs=AGENT_KILLS_AFTER_SECS)
    assert process.wait(timeout=60) == code
    assert (tmp_path / "err").read_text() == said
    assert [*(tmp_path / "tmp").glob("titan-*")] == []


@slow
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_under_torchrun_ends_the_others(endless, tmp_path, dies):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "titan_tools")
    process, ranks = endless(sys.executable, *torchrun)
    os.kill(ranks[dies], signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, ranks)), secs=AGENT_KILLS_AFTER_SECS)
    assert process.wait(timeout=60) == 1
    assert "this is a fault of titan" not in (tmp_path / "err").read_text()
