"""Weights & Biases with the real package, offline: what is logged, which run a resumed run continues, and failures."""

import json
import struct
import sys
import threading
from types import SimpleNamespace

import pytest

from trainer.observability import wandb_sink
from trainer.observability.sinks import LoggedRun
from trainer.observability.wandb_sink import WandbSink

wandb = pytest.importorskip("wandb")
BLOCK = 32768


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in wandb_sink._VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    yield
    wandb.teardown()


def logged_run(folder, num_done: int = 0, num_logged: int = 0) -> LoggedRun:
    return LoggedRun(folder, {"training": {"steps": 4}}, num_done, num_logged)


def records_of(folder) -> list[dict]:
    """What was logged, read back from the run's file, which has the form of LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process may still be writing after the run is finished
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no header fits into what is left of the block
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (2, 3):  # the record continues
            continue
        record, parts = Record.FromString(parts), b""
        if record.WhichOneof("record_type") == "history":
            found.append({(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item})
    return found


def test_metrics_and_run_id_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "a-project")
    monkeypatch.setenv("WANDB_RUN_TAGS", "one,two")
    sink = WandbSink(logged_run(tmp_path), run_id=None)
    run = sink._run
    assert (run.project, run.tags, run.config["training"]) == ("a-project", ("one", "two"), {"steps": 4})
    sink.log(1, {"loss": 2.5, "grad_norm": float("inf")})
    sink.log(2, {"loss": 2.0})
    run_id = sink.run_id
    sink.close()
    assert run_id
    logged = [(r["_step"], r["loss_metrics/global_avg_loss"]) for r in records_of(tmp_path)]
    assert logged == [(1, 2.5), (2, 2.0)]


def test_a_resumed_run_continues_its_run(tmp_path):
    sink = WandbSink(logged_run(tmp_path), run_id="abc123")
    assert sink.run_id == "abc123"
    sink.close()


def test_steps_that_are_run_again_are_taken_back(tmp_path):
    sink = WandbSink(logged_run(tmp_path, num_done=50, num_logged=57), run_id="abc123")
    resume_from = sink._run.settings.resume_from
    assert (sink.run_id, resume_from.run, resume_from.metric, resume_from.value) == ("abc123", "abc123", "_step", 50)
    sink.log(51, {"loss": 2.0})
    sink.close()
    assert [record["_step"] for record in records_of(tmp_path)] == [51]


def test_a_server_that_cannot_take_steps_back_is_reported_and_the_run_continued(tmp_path, monkeypatch, capsys):
    calls = []

    def init(**settings):
        calls.append(settings)
        if settings["resume_from"]:
            raise wandb.errors.CommError("rewinding is not enabled\nat length")
        return SimpleNamespace(id=settings["id"], finish=lambda exit_code: None)

    monkeypatch.setattr(wandb, "init", init)
    sink = WandbSink(logged_run(tmp_path, num_done=50, num_logged=57), run_id="abc123")
    assert sink.run_id == "abc123" and [call.get("resume") for call in calls] == [None, "allow"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not take back steps 51 to 57" in line and line.endswith("first records: rewinding is not enabled")
    WandbSink(logged_run(tmp_path, num_done=50, num_logged=50), run_id="abc123")  # nothing is run again
    assert len(calls) == 3 and calls[-1]["resume"] == "allow"


def test_a_given_run_id_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "given")
    sink = WandbSink(logged_run(tmp_path), run_id="saved")
    assert sink.run_id == "given"
    sink.close()


def test_a_missing_package_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    sink = WandbSink(logged_run(tmp_path), run_id=None)
    sink.log(1, {"loss": 1.0})
    sink.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "training continues without it" in line and "pip install" in line and sink.run_id is None


def test_an_unreachable_server_is_reported_once(tmp_path, monkeypatch, capsys):
    def no_network(**settings):
        raise wandb.errors.CommError("Error communicating with wandb process\nat length")

    monkeypatch.setattr(wandb, "init", no_network)
    sink = WandbSink(logged_run(tmp_path), run_id=None)
    sink.log(1, {"loss": 1.0})
    sink.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: Weights & Biases cannot be used") and line.endswith("with wandb process")


def test_a_failure_while_logging_is_reported_once(tmp_path, capsys):
    sink = WandbSink(logged_run(tmp_path), run_id=None)
    run, sink._run = sink._run, type("Broken", (), {"id": "x", "log": lambda *args, **keys: 1 / 0})()
    run.finish()
    capsys.readouterr()
    sink.log(1, {"loss": 1.0})
    sink.log(2, {"loss": 1.0})
    sink.close()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert "failed" in line and "division by zero" in line


def test_a_run_that_ends_early_keeps_its_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_sink, "_FINISH_EARLY_SECS", 300)  # a machine under load
    sink = WandbSink(logged_run(tmp_path), run_id=None)
    sink.log(1, {"loss": 2.5})
    sink.end_early(failed=False)
    sink.close()
    assert [(r["_step"], r["loss_metrics/global_avg_loss"]) for r in records_of(tmp_path)] == [(1, 2.5)]


def test_an_upload_that_never_ends_is_left(tmp_path, monkeypatch, capsys):
    sink = WandbSink(logged_run(tmp_path), run_id=None)
    sink._run.finish()
    capsys.readouterr()
    release = threading.Event()
    sink._run = type("Stuck", (), {"dir": "FOLDER", "finish": lambda self, exit_code: release.wait()})()
    monkeypatch.setattr(wandb_sink, "_FINISH_EARLY_SECS", 0.01)
    sink.end_early(failed=True)
    sink.close()
    release.set()
    assert "wandb sync" in capsys.readouterr().err
