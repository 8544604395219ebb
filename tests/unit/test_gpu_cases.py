"""The configs of tests/gpu and of the benchmarks are valid, which only a machine with a GPU would show otherwise."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from converters.families import registry
from tests.gpu.running import write_job
from tests.gpu.test_infer import ASK, COMMANDS
from tests.gpu.test_training import CASES
from titan_tools.infer import run
from titan_tools.infer.request import check_options
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.job.record import Job

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
    monkeypatch.setattr(run, "run_request", asked.append)
    code, _, err = titan("infer", "somewhere", *ASK, *options)
    assert code == 0, err
    check_options(*asked)


def test_the_rows_of_the_training_benchmark_are_valid_jobs(bench, tmp_path, monkeypatch):
    train = bench("train")
    monkeypatch.chdir(tmp_path)
    Path("bench.toml").write_text(train.CONFIG)
    rows = [*train.gpu_rows(), *train.cpu_rows(peer=True)]
    for flavors, more in ((train.TINY_FLAVORS, train.TINY), (train.FLAVORS, ())):
        Path("bench_flavors.py").write_text(flavors)
        for row in rows:
            config = load_config("bench.toml", [*row.options, *more, "--job.dump_folder", "run"])
            assert resolve_job(config, row.nproc).dims.world_size == row.nproc
    assert {row.times[0] for row in rows if row.times} <= {row.name for row in rows}
    assert len({row.name for row in rows}) == len(rows)
    assert {row.name for row in train.gpu_rows() if row.needs_gb > 80} == {
        row.name for row in rows if row.name.startswith("8B width, 12 layers")
    }


def test_the_cases_of_the_memory_comparison_are_valid_jobs(bench):
    estimate = bench("estimate_gpu")
    for case in estimate.CASES:
        assert Job.of(case.config, case.args, case.dims).dims.world_size == case.world_size


def test_the_benchmarks_of_inference_name_rows_that_exist(bench):
    infer = bench("infer")
    for rows, limits in (infer.gpu_rows(4), infer.cpu_rows(4)):
        names = {row.name for row in rows}
        assert all({limit.row, limit.over or limit.row} <= names for limit in limits)


def test_a_row_of_the_inference_benchmark_that_fails_is_a_result(bench, tmp_path, monkeypatch, capsys):
    """Such as one out of memory; and a row's checkpoint is made when the row runs."""
    infer = bench("infer")
    made = []

    def prepare(work, form, *_):
        made.append(form)
        if form == infer.FP8:
            raise infer.RunFailed("titan convert ended with 1:\nerror: no space left")

    def read(row, work, *, on_cpu, profiles):
        assert made[-1] == row.form
        return {"wall_secs": 1.0}

    monkeypatch.setattr(infer, "prepare", prepare)
    monkeypatch.setattr(infer, "_read", read)
    out = tmp_path / "out.jsonl"
    words = [
        "infer.py",
        "--only",
        "fp8 folder",
        "--rounds",
        "1",
        "--layers",
        "2",
        "--out",
        str(out),
        "--dir",
        str(tmp_path),
    ]
    monkeypatch.setattr(importlib.sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        infer.main()
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert ended.value.code == 1 and len(results) == 8
    assert {"error" in each for each in results[:2]} == {True} and "no space left" in results[0]["error"]
    assert any("error" not in each for each in results) and "FAILED" in capsys.readouterr().out


def test_the_summary_of_a_run_shows_failures_and_what_was_left_out(bench, tmp_path):
    summary = bench("gpu_summary")
    lines = {
        "results": [
            {"row": "8B: compile", "tokens_per_sec": 9000.0, "mfu": 0.58, "memory_gib": 59.0, "first_step_secs": 40.0},
            {"row": "8B: eager", "error": "titan train …\nended with 1:\nTraceback\nOutOfMemoryError: 80 GiB\n"},
            {"row": "8B, int8", "tpot_ms": 8.0, "decode_per_sec": 125.0, "ttft_ms": 30.0, "bandwidth_share": 0.5},
            {"case": "1B, TP 2", "says": "allocated 1.0 / 1.0 (+0.00%, limit 3%)"},
            {"ok": True, "results": []},
        ],
        "tests": [
            {"test": "tests/gpu/test_moe.py::a", "outcome": "passed"},
            {"test": "tests/gpu/test_moe.py::b", "outcome": "failed", "error": "x\nE   assert nan == 0\nE   and more"},
        ],
        "parts": [{"part": "tests", "exit": 1, "secs": 9}, {"part": "decode", "skipped": "skipped, 3 s left"}],
    }
    for name, of in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, of)) + '\n{"cut')
    text = "\n".join(summary.summary(tmp_path))
    for expected in (
        *("9,000 tokens/s  MFU 58.0%", "8B: eager: OutOfMemoryError: 80 GiB", "125.0 tokens/s", "1B, TP 2"),
        *("1 passed, 1 failed", "test_moe.py::b: assert nan == 0", "exit code 1, 9 s", "decode: skipped, 3 s left"),
    ):
        assert expected in text, text


def test_a_measured_estimate_is_judged_by_its_limits(bench):
    estimate = bench("estimate_gpu")
    case = next(case for case in estimate.CASES if case.name == "1B, foreach")
    predicted, measured = (
        {"allocated": 10.0, "reserved": 11.0},
        {"allocated": 10.2, "reserved": 11.5, "has_update": True},
    )
    assert estimate.judge(case, predicted, measured)["ok"]
    far = {**measured, "allocated": 9.0}
    assert not estimate.judge(case, predicted, far)["ok"]
    assert "update was skipped" in estimate.judge(case, predicted, {**far, "has_update": False})["says"]


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_the_order_of_a_gpu_run_is_rehearsed_on_a_cpu(tmp_path):
    """Every part ends well, with tiny models: a broken script is found without a GPU."""
    environment = {**os.environ, "REHEARSE": "1", "PYTHON": sys.executable, "WORK": str(tmp_path / "work")}
    command = ["bash", str(BENCHES / "gpu.sh"), "1500", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1600)
    log = (tmp_path / "out" / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-4000:]
    parts = [json.loads(line) for line in (tmp_path / "out" / "parts.jsonl").read_text().splitlines()]
    bad = [part for part in parts if part.get("exit") != 0]
    assert len(parts) == 15 and not bad, f"{bad}\n{log[-8000:]}"
    assert "the three texts are equal" in log
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "FAILED" not in text and "skipped" in text
    for expected in (
        "8B width, 8 layers: compile, float8",
        "30B-A3B width",
        "documents, varlen",
        "8B, int8",
        "GPT-OSS 20B",
    ):
        assert expected in text, text
