"""The Flight Recorder: its settings of torch, whose record is written, and the message about a failed collective."""

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from converters.common.errors import DataError
from trainer.checkpoints.run_state import Progress
from trainer.config.sections import Comm
from trainer.observability import flight_recorder
from trainer.observability.flight_recorder import CollectiveFailure, FlightRecorder, collective_failures


@pytest.fixture
def environment(monkeypatch):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in names:
        monkeypatch.setenv(name, "of the user")
    return lambda: [os.environ[name] for name in names]


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A gloo group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torch_gets_size_and_place_by_names_that_it_does_not_warn_of(tmp_path, environment, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Comm(trace_buf_size=7, save_traces_folder="flights", save_traces_file_prefix="of_")
    recorder = FlightRecorder.of(settings, tmp_path.relative_to(tmp_path))
    recorder.switch_on()
    assert environment() == ["7", f"{tmp_path.resolve()}/flights/of_", "1"]
    assert recorder.file(3) == tmp_path.resolve() / "flights" / "of_3"  # as torch adds the rank
    FlightRecorder.of(Comm(trace_buf_size=0), tmp_path).switch_on()
    assert environment()[0] == environment()[2] == "0"


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_folders_of_runs_before_are_cleared_and_made_only_for_nccl(tmp_path, group, monkeypatch, backend):
    recorder = FlightRecorder.of(Comm(), tmp_path)
    recorder.clear(0)
    assert not recorder.folder.exists()
    recorder.folder.mkdir()
    recorder.file(0).touch()
    recorder.file(1).touch()
    recorder.clear(0)
    assert [path.name for path in recorder.folder.iterdir()] == ["rank_1"]
    recorder.file(1).unlink()
    recorder.folder.rmdir()
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    recorder.clear(0)  # its watchdog makes no folder
    assert recorder.folder.is_dir()


def test_nccls_record_is_written_where_nccl_runs(tmp_path, group, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    theirs = {"entries": [], "pg_config": {"0": {"desc": "default_pg", "ranks": "[0]"}}}
    dump = pickle.dumps(theirs)
    monkeypatch.setattr(flight_recorder.c10d, "_dump_nccl_trace", lambda: dump, raising=False)
    recorder = FlightRecorder.of(Comm(), tmp_path)
    assert recorder.write(0)
    assert pickle.loads(recorder.file(0).read_bytes()) == theirs


def test_what_cannot_be_written_hides_no_other_error(tmp_path, group, capsys):
    (tmp_path / "comm_traces").touch()
    recorder = FlightRecorder.of(Comm(), tmp_path)
    with pytest.raises(ZeroDivisionError), collective_failures(recorder, Progress()):
        1 / 0  # noqa: B018
    output = capsys.readouterr().err
    assert "WARNING: rank 0: the record of collectives cannot be written" in output
    assert "rank 0: the record of collectives cannot be written" in output


@pytest.mark.parametrize(
    ("error", "output"),
    [
        (
            RuntimeError("[/a/b.cc:78] Timed out waiting 4000ms for recv operation. This may"),
            "timed out: Timed out waiting",
        ),
        (
            RuntimeError("[/a/b.cc:5] Connection closed by peer [::1]:7"),
            "lost a peer: Connection closed by peer [::1]:7",
        ),
        (dist.DistBackendError("NCCL error: remote process exited"), "lost a peer: NCCL error: remote process exited"),
        (dist.DistStoreError("wait timeout after 100ms"), "timed out: wait timeout after 100ms"),
    ],
)
def test_errors_of_collectives_are_reported_with_rank_and_step(tmp_path, group, error, output):
    recorder = FlightRecorder.of(Comm(trace_buf_size=0), tmp_path)
    with pytest.raises(CollectiveFailure) as raised, collective_failures(recorder, Progress(step=4)):
        raise error
    assert raised.value.message.startswith("rank 0, step 5: a collective ") and output in raised.value.message
    assert raised.value.exit_code == 3 and raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.OutOfMemoryError("CUDA out of memory; timeout"),
        TimeoutError("timed out"),
        DataError("timed out"),
    ],
)
def test_other_errors_stay_what_they_are(tmp_path, group, error):
    with pytest.raises(type(error)) as raised, collective_failures(FlightRecorder.of(Comm(), tmp_path), Progress()):
        raise error
    assert raised.value is error


def test_torchs_private_list_of_groups_is_what_the_record_takes_it_for(group):
    groups = {g.group_name: list(r) for g, r in distributed_c10d._world.pg_group_ranks.items()}
    assert list(groups.values()) == [[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(flight_recorder._record())["pg_config"].keys() == groups.keys()
