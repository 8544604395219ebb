"""`titan train` and the machine that it starts on: the number of ranks on its GPUs, and its memory."""

import json

import pytest
from typer.testing import CliRunner

from converters.common.errors import ConfigError
from tests.dist.runs import make_data
from titan_tools.cli import app
from titan_tools.launch import devices, training
from trainer.ranks import machine

LARGE = ["train", "llama3_8b", "--checkpoint.no_enable", "--training.seq_len", "256"]  # no disk, little text


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """Prepared data in the working folder, where presets look for it."""
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path)


def has_gpus(monkeypatch, number):
    for module in (devices, training):
        monkeypatch.setattr(module, "count_gpus", lambda: number)


@pytest.fixture
def started(monkeypatch):
    """The launches on this machine of two GPUs."""
    asked = []
    has_gpus(monkeypatch, 2)
    monkeypatch.setattr(training, "run_ranks", lambda launch, **_: asked.append(launch) or 0)
    monkeypatch.delenv("RANK", raising=False)
    return asked


def _train(*arguments):
    return CliRunner().invoke(app, ["train", "debug", "--validation.no_enable", *arguments])


@pytest.mark.parametrize("arguments", [["--nproc", "8"], []], ids=["asked for", "what the degrees need"])
def test_more_ranks_than_gpus_are_refused(started, arguments):
    error = _train(*arguments).exception
    assert isinstance(error, ConfigError) and "8 ranks, but 2 GPUs" in error.message
    assert error.tries[-1].startswith("CUDA_VISIBLE_DEVICES= titan train") and started == []


def test_all_gpus_or_nproc_ranks(started):
    fits_any = ["--parallelism.data_parallel_shard_degree=-1", "--parallelism.tensor_parallel_degree=1"]
    fits_any.append("--parallelism.pipeline_parallel_degree=1")
    assert [_train(*fits_any).exit_code, _train(*fits_any, "--nproc", "1").exit_code] == [0, 0]
    assert [launch.nproc for launch in started] == [2, 1]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """This machine has 20 GiB available."""
    (tmp_path / "meminfo").write_text(f"MemAvailable: {20 << 20} kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "none")


def test_a_model_that_cannot_fit_is_refused_before_ranks_start(started, small, monkeypatch):
    has_gpus(monkeypatch, 0)
    error = CliRunner().invoke(app, LARGE).exception
    assert isinstance(error, ConfigError) and error.exit_code == 2 and started == []
    assert error.message == "training needs at least 119.7 GiB of memory on this machine: 20.0 GiB available"
    assert CliRunner().invoke(app, [*LARGE, "--ignore-memory"]).exit_code == 0
    assert [(launch.command, launch.nproc) for launch in started] == [
        (("train", "llama3_8b", "--ignore-memory", *LARGE[2:]), 1)
    ]
    fits = ["train", "debug", "--nproc", "8", "--validation.no_enable"]
    assert CliRunner().invoke(app, fits).exit_code == 0 and len(started) == 2


def test_state_that_lies_in_gpus_needs_no_host_memory(started, small):
    assert CliRunner().invoke(app, LARGE).exit_code == 0
    assert [(launch.command, launch.nproc) for launch in started] == [(tuple(LARGE), 2)]
    assert "119.7 GiB" in CliRunner().invoke(app, [*LARGE, "--training.enable_cpu_offload"]).exception.message


def test_config_check_says_what_does_not_fit_here(small, monkeypatch):
    has_gpus(monkeypatch, 0)
    found = CliRunner().invoke(app, ["config", "check", "llama3_8b", "--world-size", "2"])
    said = "llama3_8b: fine on 2 ranks (dp_shard=2), but not on this machine alone\n"
    assert (found.exit_code, found.stdout) == (0, said)
    assert "WARNING: not on this machine alone: training needs at least 119.7 GiB" in found.stderr
    printed = json.loads(CliRunner().invoke(app, ["config", "check", "debug", "--json"]).stdout)
    norms = 9 * 128  # which two tensor ranks both hold
    assert printed["memory"] == {
        "least_bytes_of_rank": 16 * (196608 // 2 + 2048 * 128 // 4 + 5 * 128 // 2),  # output, norm, and two layers
        "least_bytes": 16 * (1_311_872 + norms),
        "fits_here": True,
    }
