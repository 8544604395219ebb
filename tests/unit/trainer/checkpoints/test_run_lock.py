"""One run per checkpoint folder: a second is refused by name, a dead one is no obstacle."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from converters.common.errors import CheckpointError
from converters.common.names import RUN_LOCK
from trainer.checkpoints.run_lock import only_run

ROOT = Path(__file__).resolve().parents[4]
HOLDER = """
import sys, time
from pathlib import Path
from trainer.checkpoints.run_lock import only_run
with only_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/checkpoint."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "checkpoint")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_with_the_name_of_the_first(holder, tmp_path):
    (tmp_path / "checkpoint" / ".tmp-being-saved").mkdir()
    with pytest.raises(CheckpointError) as caught, only_run(tmp_path / "checkpoint", patience_secs=0):
        pytest.fail("both run")
    assert f"process {holder.pid} on {socket.gethostname()}" in caught.value.message
    assert (tmp_path / "checkpoint" / ".tmp-being-saved").is_dir()


def test_the_kernel_lets_go_for_a_killed_one(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    with only_run(tmp_path / "checkpoint"):
        assert (tmp_path / "checkpoint" / RUN_LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    with only_run(tmp_path / "checkpoint", patience_secs=0):
        pass


def test_nothing_is_left_in_a_folder_of_somebody_else(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"thesis\.tex"), only_run(tmp_path):
        pytest.fail("it runs there")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
