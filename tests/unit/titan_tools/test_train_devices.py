"""`titan train` on a machine with GPUs: the number of ranks."""

import pytest
from typer.testing import CliRunner

from converters.errors import ConfigError
from titan_tools import launch
from titan_tools.cli import app


@pytest.fixture
def started(monkeypatch):
    """How many ranks each launch on this machine of two GPUs asks for."""
    asked = []
    monkeypatch.setattr(launch, "count_gpus", lambda: 2)
    monkeypatch.setattr(launch, "run_ranks", lambda argv, *, nproc: asked.append(nproc) or 0)
    monkeypatch.delenv("RANK", raising=False)
    return asked


def _train(*arguments):
    return CliRunner().invoke(app, ["train", "debug", *arguments])


@pytest.mark.parametrize("arguments", [["--nproc", "8"], []], ids=["asked for", "what the degrees need"])
def test_more_ranks_than_gpus_are_refused(started, arguments):
    error = _train(*arguments).exception
    assert isinstance(error, ConfigError) and "8 ranks, but 2 GPUs" in error.message
    assert error.tries[-1].startswith("CUDA_VISIBLE_DEVICES= titan train") and started == []


def test_all_gpus_or_nproc_ranks(started):
    fits_any = ["--parallelism.data_parallel_shard_degree=-1", "--parallelism.tensor_parallel_degree=1"]
    fits_any.append("--parallelism.pipeline_parallel_degree=1")
    assert [_train(*fits_any).exit_code, _train(*fits_any, "--nproc", "1").exit_code] == [0, 0]
    assert started == [2, 1]
