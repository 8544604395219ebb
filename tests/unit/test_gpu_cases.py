"""The configs of tests/gpu and of the benchmarks are valid, which only a machine with a GPU would show otherwise."""

import importlib
from pathlib import Path

import pytest

from converters.families import registry
from tests.gpu.running import write_job
from tests.gpu.test_infer import ASK, COMMANDS
from tests.gpu.test_training import CASES
from titan_tools.infer import run
from titan_tools.infer.request import check_options
from trainer.config.load import load_config
from trainer.job import Job, resolve_job

BENCHES = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch):
    """`bench("train")` is the module scripts/bench/train.py."""
    monkeypatch.syspath_prepend(BENCHES)
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))  # a bench registers flavors of its own
    modules = []

    def imported(name):
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)
        modules.append(name)
        return importlib.import_module(name)

    yield imported
    for name in modules:
        importlib.sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("options", [options for options, _ in CASES], ids=" ".join)
def test_the_options_of_a_gpu_test_fit_its_job(job, options):
    config = load_config(job, options)
    assert resolve_job(config, 1).dims.world_size == 1


@pytest.mark.parametrize("options", [options for options, _ in COMMANDS], ids=" ".join)
def test_the_options_of_a_gpu_test_of_inference_go_together(titan, monkeypatch, options):
    asked = []
    monkeypatch.setattr(run, "infer", asked.append)
    code, _, err = titan("infer", "somewhere", *ASK, *options)
    assert code == 0, err
    check_options(*asked)


def test_the_rows_of_the_training_benchmark_are_valid_jobs(bench, tmp_path, monkeypatch):
    train = bench("train")
    monkeypatch.chdir(tmp_path)
    Path("bench.toml").write_text(train.CONFIG)
    Path("bench_flavors.py").write_text(train.FLAVORS)
    rows = [*train.gpu_rows(), *train.cpu_rows(peer=True)]
    for row in rows:
        config = load_config("bench.toml", [*row.options, "--job.dump_folder", "run"])
        assert resolve_job(config, row.nproc).dims.world_size == row.nproc
    assert {row.times[0] for row in rows if row.times} <= {row.name for row in rows}
    assert len({row.name for row in rows}) == len(rows)
    assert [row.needs_gb < 80 for row in train.gpu_rows()].count(True) >= 3


def test_the_cases_of_the_memory_comparison_are_valid_jobs(bench):
    estimate = bench("estimate_gpu")
    for case in estimate.CASES:
        assert Job.of(case.config, case.args, case.dims).dims.world_size == case.world_size


def test_the_benchmarks_of_inference_name_rows_that_exist(bench):
    infer = bench("infer")
    for rows, limits in (infer.gpu_rows(4), infer.cpu_rows(4)):
        names = {row.name for row in rows}
        assert all({limit.row, limit.over or limit.row} <= names for limit in limits)
