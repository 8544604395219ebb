"""Ranks that are killed, stopped or fail in any phase of a step: the others say so soon, and the next start is whole.

Faults T1–T5, T19 and T20. Those under the launcher are in tests/dist/test_train_command.py (T15, T16, T20), those of
numbers in tests/dist/test_nonfinite.py (T26, T27).
"""

import os
import pickle
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.dist import runs
from tests.dist.processes import ranks

FSDP2 = runs.FSDP2  # accumulates twice
STEP, VICTIM = 3, 1  # saved are the steps 2 and 4
PER_STEP = {"init": 0, "data": 1, "forward": 2, "backward": 2, "optim": 1, "exchange": 2}
FAST, SLOW = ("backward",), ("init", "data", "forward", "optim")  # of a dense model, which exchanges no rows


def _fault(phase, what, rank):
    """Let `what` happen on the victim in a phase of STEP: in its last microbatch, where there are several."""
    if rank != VICTIM:
        return
    num_calls, due = 0, PER_STEP[phase] * STEP

    def count():
        nonlocal num_calls
        num_calls += 1
        if num_calls >= due:
            what()

    from torch import Tensor

    from trainer import train
    from trainer.models.decoder import TransformerBlock
    from trainer.observability.report import Report
    from trainer.optim.adam import LocalAdam
    from trainer.parallel import expert_parallel

    def before(owner, name, happen):
        original = getattr(owner, name)

        def wrapped(*args, **keys):
            happen(*args)
            return original(*args, **keys)

        setattr(owner, name, wrapped)

    match phase:
        case "init":
            before(train, "build", lambda *_: count())
        case "data":
            fetching = Report.fetching

            @contextmanager
            def interrupted(report):
                with fetching(report):
                    yield
                    count()

            Report.fetching = interrupted
        case "forward":
            due *= runs.TWO_LAYERS.num_layers
            before(TransformerBlock, "forward", lambda *_: count())
        case "backward":
            before(Tensor, "backward", lambda loss, *_: loss.register_hook(lambda _: count()))
        case "optim":
            before(LocalAdam, "step", lambda *_: count())
        case "exchange":
            before(expert_parallel, "send_to_experts", lambda *_: count())


def _kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise():
    raise ZeroDivisionError("a slip of ours")


def _assert_whole_after_another_start(config, dump, whole):
    with ranks(config, 2, dump) as running:
        assert [ended.exit_code for ended in running.wait().values()] == [0, 0]
    assert runs.read_losses(dump) == runs.read_losses(whole)
    assert runs.differences(dump / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []


@pytest.mark.parametrize("phase", [*FAST, *(pytest.param(phase, marks=pytest.mark.slow) for phase in SLOW)])
def test_a_killed_rank_ends_the_others_and_the_next_start_is_bit_equal(data, whole, tmp_path, phase):
    config = runs.make_config(data, tmp_path, **FSDP2)
    with ranks(config, 2, tmp_path, partial(_fault, phase, _kill_oneself)) as running:
        ended = running.wait()
    assert ended[VICTIM].exit_code == -signal.SIGKILL and ended[VICTIM].output == {}
    assert ended[0].exit_code == 3 and ended[0].secs - ended[VICTIM].secs < 30  # and not a collective's timeout
    step = {"init": 1, "optim": STEP + 1}.get(phase, STEP)
    assert ended[0].output["message"].startswith(f"rank 0, step {step}: gloo:"), ended[0].output
    assert ", lost a peer: " in ended[0].output["message"] and ended[0].output["traceback"] == ""
    steps = {p.name for p in (tmp_path / "checkpoint").glob("step-*")}
    assert steps == (set() if phase == "init" else {"step-2"})
    _assert_whole_after_another_start(config, tmp_path, whole)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_collective_and_the_step(data, whole, tmp_path):
    config = runs.make_config(data, tmp_path, **FSDP2, comm={"train_timeout_seconds": 8})
    with ranks(config, 2, tmp_path, partial(_fault, "forward", _stop_oneself)) as running:
        ended = running.wait(0)
    output = ended[0].output
    assert ended[0].exit_code == 3 and output["traceback"] == ""
    assert output["message"].startswith(f"rank 0, step {STEP}: gloo:") and "timed out" in output["message"]
    assert "rank 1 did not time out: stopped" in output["hint"]

    # What torch's own reader makes of the record: the collective that the other rank never came to
    (written,) = (tmp_path / "comm_traces").iterdir()
    assert written.name == "rank_0"
    entries = pickle.loads(written.read_bytes())["entries"]
    assert entries[-1]["profiling_name"] in output["message"] and entries[-1]["frames"]
    (reader,) = output["tries"]
    arguments = shlex.split(reader.removeprefix("torchfrtrace "))
    (tmp_path / "tabulate.py").write_text("def tabulate(rows, headers): return '\\n'.join(row[0] for row in rows)")
    read = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", *arguments],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if torch.__version__ < "2.12":  # that reader knows NCCL's records only, and says so
        assert "gloo !=" in read.stderr
    else:
        last = read.stderr.splitlines()[-1]
        assert read.returncode == 0 and last.startswith(entries[-1]["profiling_name"].removeprefix("gloo:")), read
    _assert_whole_after_another_start(runs.make_config(data, tmp_path, **FSDP2), tmp_path, whole)


@pytest.mark.slow
def test_a_rank_that_sends_no_rows_to_experts_is_named_with_the_exchange_and_its_axis(data, tmp_path):
    config = runs.make_config(
        data,
        tmp_path,
        model={"name": "qwen3", "flavor": "debug_moe_mixed"},
        parallelism={"expert_parallel_degree": 2},
        training={"local_batch_size": 1},
        comm={"train_timeout_seconds": 4},
    )
    with ranks(config, 2, tmp_path, partial(_fault, "exchange", _stop_oneself)) as running:
        ended = running.wait(0)[0]
    assert ended.exit_code == 3 and ended.output["traceback"] == ""
    record = pickle.loads((tmp_path / "comm_traces" / "rank_0").read_bytes())
    last = record["entries"][-1]
    # The axis of experts has a group of its own: all ranks are also those of FSDP, and of the default group
    assert ended.output["message"].startswith(
        f"rank 0, step {STEP}: gloo:all_to_all of Float {last['input_sizes'][0]} in mesh_ep, number"
    )
    assert "timed out" in ended.output["message"] and "rank 1 did not time out: stopped" in ended.output["hint"]
    (group,) = (group for group in record["pg_config"].values() if group["desc"] == "mesh_ep")
    assert group["name"] == last["process_group"][0] and group["ranks"] == "[0, 1]"
    assert "send_to_experts" in [frame["name"] for frame in last["frames"]]


def test_an_exception_on_one_rank_is_the_only_traceback(data, tmp_path):
    config = runs.make_config(data, tmp_path, **FSDP2)
    with ranks(config, 2, tmp_path, partial(_fault, "optim", _raise)) as running:
        ended = running.wait()
    assert "ZeroDivisionError: a slip of ours" in ended[VICTIM].output["message"]
    assert "_raise" in ended[VICTIM].output["traceback"] and ended[0].output["traceback"] == ""
    assert "lost a peer" in ended[0].output["message"] and "see its error" in ended[0].output["hint"]
    assert ended[VICTIM].output["secs"] < ended[0].output["secs"]  # so the launcher tells the victim's
    assert {ended[0].exit_code, ended[VICTIM].exit_code} == {3}
    assert sorted(p.name for p in (tmp_path / "comm_traces").iterdir()) == ["rank_0", "rank_1"]


def test_without_a_buffer_nothing_is_recorded(data, tmp_path):
    config = runs.make_config(data, tmp_path, **FSDP2, comm={"trace_buf_size": 0})
    with ranks(config, 2, tmp_path, partial(_fault, "optim", _kill_oneself)) as running:
        output = running.wait()[0].output
    assert output["message"].startswith(f"rank 0, step {STEP + 1}: a collective lost a peer") and output["tries"] == []
    assert not (tmp_path / "comm_traces").exists()
