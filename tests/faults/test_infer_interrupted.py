"""Batches of inference that are interrupted keep what is finished, and the same command resumes to the same file.

They run in forks of the pools' server, which have imported everything; Ctrl-C also in a process of its own.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.dist.pool import FORK_SERVER
from tests.dist.processes import ENOUGH_SECS
from tests.json_lines import write_lines
from tests.models.llama import write as write_llama
from titan_tools import cli
from titan_tools.infer import run as infer_run

ROOT = Path(__file__).resolve().parents[2]
# The first gets 47 new tokens, the second 4: results end in another order than the batch's
LINES = [{"id": 0, "prompt": "def main(" + "x" * 7}, *({"id": i, "prompt": "b" * (59 - i % 3)} for i in range(1, 6))]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Llama of 64 tokens' context."""
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, max_position_embeddings=64)
    return folder


@pytest.fixture
def batch(tmp_path):
    """(in, out): the batch LINES, and where its results go."""
    return write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"


@pytest.fixture(scope="module")
def whole(hf, tmp_path_factory):
    """What an uninterrupted run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    write_lines(folder / "in.jsonl", LINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command(hf, folder / "in.jsonl", folder / "out.jsonl"))
        assert cli.run() == 0
    return (folder / "out.jsonl").read_bytes()


def command(hf, source, out):
    return ["titan", "infer", str(hf), "--batch", str(source), "--out", str(out), "--batch-size", "2"]


def in_a_fork(argv, inject, errors: Path) -> int:
    """Run a command line after `inject()`; its exit code, negative for a signal. Its stderr goes to `errors`."""
    process = FORK_SERVER.Process(target=_run, args=(argv, inject, errors), daemon=True)
    process.start()
    process.join(ENOUGH_SECS)
    process.kill()
    process.join()
    return process.exitcode


def _run(argv, inject, errors):
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 99
    try:
        sys.argv, sys.stderr = argv, errors.open("w")
        inject()
        code = cli.run()
        sys.stderr.flush()
    finally:
        os._exit(code)


def at_line(number, when, act):
    """Let `act` happen before, in the middle of or after the writing of the n-th result, from 1."""
    write, seen = os.write, 0

    def watched(descriptor, data):
        nonlocal seen
        seen += bytes(data[:5]) == b'{"id"'
        if seen != number:
            return write(descriptor, data)
        written = 0
        if when != "before":
            written = write(descriptor, data if when == "after" else data[: len(data) // 2])
        act()
        return written or write(descriptor, data)

    os.write = watched


def at_replace(name, when, act):
    """Let `act` happen before or after the file of that name takes its place."""
    replace = os.replace

    def watched(source, target):
        is_it = Path(target).name == name
        if not is_it or when == "after":
            replace(source, target)
        if is_it:
            act()

    os.replace = watched


def signal_self(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


SETTINGS = "out.jsonl.settings.json"
POINTS = {
    "before its settings are there": (partial(at_replace, SETTINGS, "before", signal_self), 0),
    "after its settings are there": (partial(at_replace, SETTINGS, "after", signal_self), 0),
    "before the first line": (partial(at_line, 1, "before", signal_self), 0),
    "in the first line": (partial(at_line, 1, "middle", signal_self), 0),
    "after the second line": (partial(at_line, 2, "after", signal_self), 2),
    "in the fifth line": (partial(at_line, 5, "middle", signal_self), 4),
    "before the last line": (partial(at_line, 6, "before", signal_self), 5),
    "before it is put in order": (partial(at_replace, "out.jsonl", "before", signal_self), 6),
    "after it is put in order": (partial(at_replace, "out.jsonl", "after", signal_self), 6),
}


QUICK = ("before its settings are there", "after the second line", "in the fifth line", "before it is put in order")


@pytest.mark.parametrize(
    "inject, num_kept",
    [pytest.param(*POINTS[name], id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in POINTS],
)
def test_a_batch_that_is_killed_goes_on_to_the_same_file(titan, hf, batch, whole, tmp_path, inject, num_kept):
    """kill -9 at any point loses no finished line, and the end is an uninterrupted run's, byte for byte."""
    argv, out = command(hf, *batch), batch[1]
    assert in_a_fork(argv, inject, tmp_path / "errors") == -signal.SIGKILL, (tmp_path / "errors").read_text()
    left = out.read_bytes()
    assert left.count(b"\n") == num_kept and set(left.split(b"\n")[:-1]) <= set(whole.split(b"\n"))
    code, _, talk = titan(*argv[1:])
    assert code == 0 and out.read_bytes() == whole
    output = f"{num_kept} of 6 prompts are in" if num_kept < 6 else "all results are in"
    assert (f"{output} {out} already" in talk) == (num_kept > 0)
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", SETTINGS, "errors"}


def test_the_order_of_results_is_not_that_in_which_they_end(hf, batch, whole, tmp_path):
    """Or the tests above would put nothing in order."""
    in_a_fork(command(hf, *batch), POINTS["before it is put in order"][0], tmp_path / "errors")
    left = batch[1].read_bytes()
    assert left != whole and sorted(left.split(b"\n")) == sorted(whole.split(b"\n"))


@pytest.mark.parametrize(
    "number, code, said", [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_request_to_stop_keeps_the_finished_lines(hf, batch, whole, tmp_path, number, code, said):
    inject = partial(at_line, 3, "before", partial(signal_self, number))
    assert in_a_fork(command(hf, *batch), inject, tmp_path / "errors") == code
    assert batch[1].read_bytes().count(b"\n") == 2
    hint = f"2 of 6 results are in {batch[1]}; the same command resumes there"
    assert (tmp_path / "errors").read_text().endswith(f"error: {said}\nhint: {hint}\n")


def test_ctrl_c_ends_a_process_with_its_finished_lines(hf, batch):
    source, out = batch
    write_lines(source, ({"id": i, "prompt": f"def f{i}("} for i in range(5000)))
    argv = (sys.executable, "-P", "-m", "titan_tools", *command(hf, source, out)[1:])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > 3):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        err = process.communicate()[1]
    kept = out.read_bytes()
    assert process.returncode == 130 and kept.endswith(b"\n")
    assert all(json.loads(line)["finish_reason"] for line in kept.split(b"\n")[:-1])
    # one more where the signal came between a line and its count
    hints = [f"{kept.count(10) - more:,} of 5,000 results are in {out}; the same command resumes" for more in (0, 1)]
    assert any(f"error: interrupted\nhint: {hint}" in err for hint in hints) and "Traceback" not in err


def test_who_started_the_ranks_says_where_the_finished_lines_are(titan, hf, batch, monkeypatch):
    def interrupted(*_, **__):
        batch[1].touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(infer_run, "run_ranks", interrupted)
    code, _, err = titan(*command(hf, *batch)[1:], "--tp", "2")
    hint = f"finished results are in {batch[1]}; the same command resumes there"
    assert (code, err) == (130, f"error: interrupted\nhint: {hint}\n")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_between_settings_and_results_binds_nobody(titan, hf, batch, tmp_path, when):
    """Where no result is there yet a run with other options may follow, and its settings are those of the file."""
    argv, out = command(hf, *batch), batch[1]
    in_a_fork(argv, partial(at_replace, SETTINGS, when, signal_self), tmp_path / "errors")
    assert titan(*argv[1:], "--max-new-tokens", "2")[0] == 0
    assert [len(json.loads(line)["tokens"]) for line in out.read_text().splitlines()] == [2] * 6
    code, _, err = titan(*argv[1:])
    assert code == 2 and "--max-new-tokens: 2 there, not given here" in err


def test_a_line_that_was_cut_off_binds_nobody(titan, hf, batch, tmp_path):
    argv, out = command(hf, *batch), batch[1]
    in_a_fork(argv, POINTS["in the first line"][0], tmp_path / "errors")
    assert out.stat().st_size and titan(*argv[1:], "--max-new-tokens", "2")[0] == 0
    assert [len(json.loads(line)["tokens"]) for line in out.read_text().splitlines()] == [2] * 6


def test_a_disk_that_is_full_from_the_start_leaves_nothing_half_made(titan, hf, batch, whole, tmp_path, monkeypatch):
    argv, out = command(hf, *batch), batch[1]
    monkeypatch.setattr(os, "fsync", lambda descriptor: full())
    code, _, err = titan(*argv[1:])
    assert code == 2 and err.startswith(f"error: cannot write {out}.settings.json: No space left on device\nhint: no ")
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"} and not out.read_bytes()
    monkeypatch.undo()
    assert titan(*argv[1:])[0] == 0 and out.read_bytes() == whole


def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_finished_lines(titan, hf, batch, whole):
    argv, out = command(hf, *batch), batch[1]
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))  # what a full disk does
    try:
        code, _, err = titan(*argv[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    left = out.read_bytes()
    assert code == 2 and 0 < left.count(b"\n") < 6 and left.endswith(b"\n")
    assert f"error: cannot write {out}: File too large\nhint: {left.count(10)} of 6 results are in {out}" in err
    assert titan(*argv[1:])[0] == 0 and out.read_bytes() == whole


def test_a_disk_that_is_full_at_the_end_leaves_all_results(titan, hf, batch, whole, tmp_path, monkeypatch):
    argv, out = command(hf, *batch), batch[1]

    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *a: full() if Path(a[1]) == out else replace(*a))
    code, _, err = titan(*argv[1:])
    assert code == 2 and f"cannot put {out} into the batch's order: No space left on device\nhint: all results" in err
    assert sorted(out.read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", SETTINGS}


def test_a_full_standard_output_is_reported(titan, hf, batch, monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115  its end would write what could not be written
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        code, _, err = titan("infer", hf, "--batch", batch[0])
    with suppress(OSError):
        full.close()
    assert code == 2 and "error: standard output: No space left on device" in err
