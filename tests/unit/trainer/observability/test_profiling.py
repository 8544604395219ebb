"""Traces at the steps that the cycle names, also after a resume; snapshots of CUDA's allocator, in mocks."""

import json

import pytest
import torch

from converters.common.errors import ConfigError, UnsupportedError
from trainer.config.sections import Config, Profiling
from trainer.job.hardware import check_hardware
from trainer.job.job import resolve_job
from trainer.observability.profiling import profiled


def _steps(settings, folder, *, num_done, num_steps):
    with profiled(settings, folder, rank=3, num_done=num_done) as watch:
        for step in range(num_done + 1, num_done + num_steps + 1):
            torch.ones(step, 7).relu()
            watch.step()


def _steps_seen(path):
    """The steps whose work is in a trace: each took a matrix of as many rows as its number."""
    events = json.loads(path.read_text())["traceEvents"]
    return [e["args"]["Input Dims"][0][0] for e in events if e.get("name") == "aten::relu"]


@pytest.mark.parametrize("num_done", [0, 5])
def test_a_trace_holds_the_last_steps_of_its_cycle(tmp_path, num_done):
    settings = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2)
    _steps(settings, tmp_path, num_done=num_done, num_steps=8)
    found = {path.parent.name: _steps_seen(path) for path in tmp_path.glob("profile_traces/*/rank3_trace.json")}
    last = {0: {"iteration_4": [3, 4], "iteration_8": [7, 8]}, 5: {"iteration_8": [7, 8], "iteration_12": [11, 12]}}
    assert {name: steps for name, steps in found.items() if name != "iteration_13"} == last[num_done]


def test_without_profiling_nothing_is_written(tmp_path):
    _steps(Profiling(), tmp_path, num_done=0, num_steps=3)
    assert list(tmp_path.iterdir()) == []


def test_a_cycle_that_cannot_hold_its_steps_is_a_problem_of_the_layout():
    config = Config(profiling=Profiling(enable_profiling=True, profile_freq=3, profiler_warmup=3, profiler_active=1))
    with pytest.raises(ConfigError, match=r"profile_freq = 3 is less .*warmup 3 \+ profiler_active 1; nearest: 4"):
        resolve_job(config)
    resolve_job(Config(profiling=Profiling(profile_freq=3)))  # off: it does not matter


@pytest.fixture
def allocator(monkeypatch):
    """What is asked of CUDA's allocator, in order."""
    asked = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **keys: asked.append(("record", enabled))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: asked.append(("write", path)))
    return asked


SNAPSHOTS = Profiling(enable_memory_snapshot=True, profile_freq=2, save_memory_snapshot_folder="snaps")


def test_snapshots_are_written_every_few_steps(tmp_path, allocator):
    _steps(SNAPSHOTS, tmp_path, num_done=3, num_steps=3)
    written = [str(tmp_path / "snaps" / f"iteration_{n}" / "rank3_memory_snapshot.pickle") for n in (4, 6)]
    assert allocator == [("record", "all"), *(("write", path) for path in written), ("record", None)]
    assert all((tmp_path / "snaps" / f"iteration_{n}").is_dir() for n in (4, 6))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError])
def test_a_snapshot_is_written_when_memory_runs_out_and_not_for_other_errors(tmp_path, allocator, error):
    with pytest.raises(error), profiled(SNAPSHOTS, tmp_path, rank=0, num_done=6) as watch:
        watch.step()
        raise error("in step 8")
    last = [("write", str(tmp_path / "snaps" / "iteration_8_exit" / "rank0_memory_snapshot.pickle"))]
    assert allocator == [("record", "all"), *(last if error is torch.OutOfMemoryError else []), ("record", None)]


def test_snapshots_are_refused_where_there_is_no_cuda():
    config = Config(profiling=Profiling(enable_memory_snapshot=True))
    with pytest.raises(UnsupportedError, match=r"enable_memory_snapshot: it records CUDA"):
        check_hardware(config, torch.device("cpu"))
    check_hardware(config, torch.device("cuda", 0))
