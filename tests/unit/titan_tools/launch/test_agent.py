"""Starting ranks: exit codes, one reported error, forwarded signals, and no rank outlives its parent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_tools.launch.agent import run_ranks
from titan_tools.launch.failures import RankFailure, raise_first_failure
from titan_tools.launch.launch import Launch, environment_of_ranks

ROOT = Path(__file__).resolve().parents[4]
PARENT = """
import sys
from converters.common.errors import TitanError
from titan_tools.launch.agent import run_ranks
from titan_tools.launch.launch import Launch, environment_of_ranks
try:
    saves = len(sys.argv) < 3
    answer = "answered" if saves else ""
    launch = Launch((), nproc=2, environment=environment_of_ranks(2), program=("-P", sys.argv[1]))
    sys.exit(run_ranks(launch, saves=saves, interrupt_answer=answer))
except TitanError as error:
    print("error:", error.message, "| hint:", error.hint, "| tries:", error.tries, file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt as error:
    for text in getattr(error, "__notes__", []):
        print("noted:", text, file=sys.stderr)
    sys.exit(130)
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from converters.common.errors import CheckpointError, NumericalFault
from titan_tools.launch.rank import inside_launch, rank_errors
RANK, FOLDER = int(os.environ["RANK"]), Path(__file__).parent
with rank_errors(less_memory=["fewer tokens"]):
    assert inside_launch() and os.environ["WORLD_SIZE"] == "2"
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
"""


def _write_rank(tmp_path, body):
    rank = tmp_path / "rank.py"
    rank.write_text(RANK + textwrap.indent(textwrap.dedent(body), "    "))
    return rank


def _start(tmp_path, body, *more):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(_write_rank(tmp_path, body)), *more],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs two ranks with this process as the parent, which has torch loaded already."""
    for name in ("OMP_NUM_THREADS", "TITAN_LAUNCH", "PYTHONPATH", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "")  # so that what the launch sets is taken back afterwards
        monkeypatch.delenv(name)

    def start(body):
        program = ("-P", str(_write_rank(tmp_path, body)))
        return run_ranks(Launch((), nproc=2, environment=environment_of_ranks(2), program=program))

    return start


def _wait_for_ranks(tmp_path, what="ready"):
    files = [tmp_path / f"{what}-{rank}" for rank in (0, 1)]
    deadline = time.monotonic() + 120
    while not all(f.exists() for f in files):
        assert time.monotonic() < deadline, f"ranks are not {what}"
        time.sleep(0.05)
    return [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]


def _wait_for_the_end_of(pids):
    """A killed process is there until the kernel has taken it down, on a busy machine for some time."""
    until = time.monotonic() + 30
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < until, alive
        time.sleep(0.05)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_success_is_zero_and_ranks_share_the_cores(run, capfd):
    # one write each: the ranks share the file, and unbuffered `print` writes every argument by itself
    assert run("os.write(1, f\"threads {os.environ['OMP_NUM_THREADS']}\\n\".encode())") == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    out, err = capfd.readouterr()
    assert (out.split(), err) == (["threads", str(threads)] * 2, "")


def test_an_error_of_every_rank_is_reported_once_with_its_code(run, capfd):
    with pytest.raises(RankFailure) as failure:
        run("raise NumericalFault('loss is nan', hint='at step 7', tries=['a', 'b'])")
    error = failure.value
    assert (error.exit_code, error.message, error.hint, error.tries) == (4, "loss is nan", "at step 7", ("a", "b"))
    assert capfd.readouterr() == ("", "")


def test_the_first_failing_rank_is_reported(run):
    body = """
        if RANK == 1:
            raise CheckpointError("rank 1 found it")
        error = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "1" / "error.json"
        while not error.exists():  # on a busy machine this rank may start long before the other, or run long before it
            time.sleep(0.01)
        raise RuntimeError("peer is gone")
    """
    with pytest.raises(RankFailure, match="rank 1 found it") as failure:
        run(body)
    assert failure.value.exit_code == 2


def test_of_two_errors_that_of_the_first_failing_rank_is_reported():
    message = {"traceback": "", "exit_code": 2, "hint": "", "tries": [], "kind": "config"}
    failures = {
        rank: SimpleNamespace(
            exitcode=2, timestamp=9, error_file_data={"titan": message | {"message": f"rank {rank}", "secs": secs}}
        )
        for rank, secs in ((0, 3.5), (1, 2.5), (2, 4.5))
    }
    with pytest.raises(RankFailure, match="^rank 1$"):
        raise_first_failure(failures)


def test_an_unexpected_error_comes_with_one_traceback(run, capfd):
    with pytest.raises(RankFailure, match="ZeroDivisionError: oops") as failure:
        run("if RANK == 1: raise ZeroDivisionError('oops')\nelse: time.sleep(60)")
    assert failure.value.exit_code == 3
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1 and err.startswith("rank 1:\n")


@pytest.mark.parametrize("kind", ["ZeroDivisionError", pytest.param("SystemExit", marks=pytest.mark.slow)])
def test_an_error_in_a_module_of_the_user_s_is_named_by_its_line(run, capfd, tmp_path, kind):
    (tmp_path / "of_the_user.py").write_text(f"def fail():\n    raise {kind}('oops')\n")
    body = """
        from trainer.config.custom_import import import_custom
        import_custom(str(FOLDER / "of_the_user.py"))
        import of_the_user
        of_the_user.fail() if RANK == 1 else time.sleep(60)
    """
    with pytest.raises(RankFailure, match=f"of_the_user.py:2: {kind}: oops$") as failure:
        run(body)
    assert failure.value.exit_code == 2 and "this file is yours" in failure.value.hint
    err = capfd.readouterr().err
    assert err.startswith("rank 1:\nTraceback in your module:\n") and "import_custom" not in err


@pytest.mark.slow
def test_a_full_disk_is_reported_as_without_ranks(run, capfd):
    body = """
        sys.stdout = open("/dev/full", "w")
        if RANK == 0: print("a result", flush=True)
        time.sleep(60)
    """
    with pytest.raises(RankFailure, match="^standard output: No space left on device$") as failure:
        run(body)
    assert failure.value.exit_code == 2
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_out_of_memory_is_not_an_internal_error(run, capfd):
    """Neither CUDA's nor Python's."""
    for problem, hint in (
        ("RuntimeError('CUDA out of memory. GPU 1 has 79 GiB')", "CUDA out of memory. GPU 1 has 79 GiB"),
        ("MemoryError()", "a limit of this machine, container or shell"),
    ):
        with pytest.raises(RankFailure, match="^out of memory on rank 1$") as failure:
            run(f"if RANK == 1: raise {problem}\nelse: time.sleep(60)")
        assert (failure.value.exit_code, failure.value.hint, failure.value.tries) == (2, hint, ("fewer tokens",))
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(tmp_path):
    body = """
        if RANK == 0:
            while True: print("result", flush=True)
        time.sleep(60)
    """
    process = _start(tmp_path, body)
    assert process.stdout.readline() == "result\n"
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == 141


def test_a_stop_request_before_the_handlers_are_installed(run):
    with pytest.raises(RankFailure, match="stopped on request while starting") as failure:
        run("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)")
    assert failure.value.exit_code == 75


def test_the_message_for_stopped_ranks_that_do_not_save():
    ended = {rank: SimpleNamespace(exitcode=-signal.SIGTERM, error_file_data={}, timestamp=1) for rank in (0, 1)}
    with pytest.raises(RankFailure, match="^the ranks were ended by SIGTERM from outside$") as failure:
        raise_first_failure(ended, saves=False)
    assert failure.value.exit_code == 143


def test_a_killed_rank_is_named_with_its_signal(run, capfd):
    with pytest.raises(RankFailure, match="rank 1 was ended by SIGKILL") as failure:
        run("if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert failure.value.exit_code == 3
    assert capfd.readouterr().err == ""


def test_a_rank_that_timed_out_is_reported_before_the_hung_rank():
    """Under NCCL: the watchdog aborts the first, the agent kills the other, which did not hear of SIGTERM."""
    ended = {0: SimpleNamespace(exitcode=-signal.SIGKILL, error_file_data={}, timestamp=1)}
    ended |= {1: SimpleNamespace(exitcode=-signal.SIGABRT, error_file_data={}, timestamp=1)}
    with pytest.raises(RankFailure, match="rank 1 was ended by SIGABRT") as failure:
        raise_first_failure(ended)
    assert "NCCL's watchdog" in failure.value.hint and failure.value.exit_code == 3


WAITING = """
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    (FOLDER / f"ready-{RANK}").touch()
    deadline = time.monotonic() + 60
    while not stop and time.monotonic() < deadline:
        time.sleep(0.02)
"""


def test_sigterm_reaches_the_ranks_and_their_exit_code_is_returned(tmp_path):
    process = _start(tmp_path, WAITING + "    os._exit(75)\n")
    _wait_for_ranks(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_sigterm_kills_ranks_that_do_not_save_and_then_this_process(tmp_path):
    process = _start(tmp_path, WAITING + "    time.sleep(60)\n", "saves nothing")
    pids = _wait_for_ranks(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=29)  # less than the agent waits before it kills
    assert process.returncode == -signal.SIGTERM
    _wait_for_the_end_of(pids)


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], pytest.param([signal.SIGTERM, signal.SIGTERM], marks=pytest.mark.slow)]
)
def test_ctrl_c_or_a_second_sigterm_kills_the_ranks(tmp_path, signals):
    process = _start(tmp_path, WAITING + '    (FOLDER / f"asked-{RANK}").touch()\n    time.sleep(60)\n')
    pids = _wait_for_ranks(tmp_path)
    for number in signals[:-1]:
        process.send_signal(number)
        _wait_for_ranks(tmp_path, "asked")  # two that come at once are one
    process.send_signal(signals[-1])
    process.communicate(timeout=29)  # less than the agent waits before it kills
    assert process.returncode == 130
    _wait_for_the_end_of(pids)


STEPPING = """
    from titan_tools.launch.rank import report_step_done
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    (FOLDER / f"ready-{RANK}").touch()
    while not (FOLDER / "ready-1").exists():
        time.sleep(0.02)
    if RANK == 0:
        report_step_done("step 1 is lost")
        (FOLDER / "done-0").touch(); (FOLDER / "done-1").touch()
    deadline = time.monotonic() + 60
    while not asked and time.monotonic() < deadline:
        time.sleep(0.02)
    (FOLDER / f"asked-{RANK}").touch()
"""


def test_ctrl_c_after_a_step_asks_every_rank_once(tmp_path):
    body = STEPPING + "    time.sleep(1)\n    assert asked == [1]\n    os._exit(77)\n"
    process = _start(tmp_path, body)
    _wait_for_ranks(tmp_path, "done")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (77, "answered\n")


def test_a_second_ctrl_c_after_a_step_kills_the_ranks_and_says_what_is_lost(tmp_path):
    process = _start(tmp_path, STEPPING + "    time.sleep(60)\n")
    pids = _wait_for_ranks(tmp_path, "done")
    process.send_signal(signal.SIGINT)
    _wait_for_ranks(tmp_path, "asked")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=29)  # less than the agent waits before it kills
    assert process.returncode == 130 and err == "answered\nnoted: step 1 is lost\n"
    _wait_for_the_end_of(pids)


@pytest.mark.parametrize(
    ("parent", "parent_id", "lives"),
    [(1, "1", True), (77, "77", True), (1, "77", False), (88, "77", False)],
    ids=["the agent is a container's first process", "usual", "orphan", "orphan under a subreaper"],
)
def test_a_rank_identifies_its_parent_by_process_id(parent, parent_id, lives):
    code = f"""
import os
from titan_tools.launch.rank import rank_errors
os.getppid = lambda: {parent}
with rank_errors():
    print("lives")
"""
    environment = os.environ | {"TITAN_LAUNCH": parent_id, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == ((0, "lives\n") if lives else (3, "")), done.stderr


def test_ranks_die_with_a_killed_parent(tmp_path):
    process = _start(tmp_path, WAITING)
    pids = _wait_for_ranks(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    _wait_for_the_end_of(pids)
