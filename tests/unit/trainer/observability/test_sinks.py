"""Metric sinks: the console line, metrics.jsonl, TensorBoard, and sinks that a user's module registers."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from converters.common.errors import Preempted
from converters.common.names import METRICS_FILE
from titan_tools.pages.run_folder import summarize_run
from trainer.checkpoints.run_state import Progress
from trainer.config.sections import Config, JobSection, Metrics, Model
from trainer.job.job import resolve_job
from trainer.observability import sinks
from trainer.observability.report import Report
from trainer.observability.sinks import JsonlSink, TensorBoardSink, register_metric_sink, step_line
from trainer.ranks.process_group import fake_ranks
from trainer.step import OwnShare, StepResult

RESULT = StepResult(loss=2.5, grad_norm=1.0, num_units=100, stop_requested=False)


def config_in(folder, **metrics) -> Config:
    config = Config(model=Model(flavor="debug_gqa"), job=JobSection(dump_folder=str(folder)))
    return replace(config, metrics=Metrics(**metrics))


def open_report(config: Config, *, rank: int = 0, world_size: int = 1) -> Report:
    return Report(resolve_job(config, world_size), Progress(), device=torch.device("cpu"), rank=rank)


def test_records_are_appended_and_a_torn_line_is_left_behind(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    sinks = [JsonlSink(path, num_done=2), TensorBoardSink(tmp_path / "tb", num_done=2, texts={"a/text": "of the run"})]
    for sink in sinks:
        sink.log(3, {"loss": 1.5, "grad_norm": float("nan")})
        sink.close()
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1]) == {"step": 3, "loss": 1.5}
    assert len(lines) == 3

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss_metrics/global_avg_loss")] == [(3, 1.5)]
    assert [(e.step, e.tensor_proto.string_val) for e in events.Tensors("a/text/text_summary")] == [
        (2, [b"of the run"])
    ]


def test_records_of_a_part_that_was_given_up_are_marked(tmp_path):
    path = tmp_path / METRICS_FILE

    def run(steps, *, num_done):
        log = JsonlSink(path, num_done=num_done)
        for step in steps:
            log.log(step, {"loss": 10.0 * (num_done + 1) + step})
        log.close()

    run([1, 2, 3, 4], num_done=0)
    run([5], num_done=4)  # goes on where the last one ended: nothing is there twice
    run([3], num_done=2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 2, 3]
    assert [record for record in records if "loss" not in record] == [{"step": 2, "resumed_from": 2}]
    assert summarize_run(tmp_path).loss == ((1, 11.0), (2, 12.0), (3, 33.0))  # 4 and 5 are not this run's


def test_all_sinks_agree_on_steps_that_are_run_again(monkeypatch, tmp_path):
    """A run killed after step 57 goes on from step 50, is killed after 52, and goes on from 50 again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = []
    monkeypatch.setattr(sinks, "_REGISTERED", {})
    register_metric_sink("list", lambda run: opened.append(ListSink(run)) or opened[-1])
    config = config_in(tmp_path, log_freq=1, enable_tensorboard=True)
    for start, end in ((0, 57), (50, 52), (50, 54), (54, 56)):
        with fake_ranks(1, rank=0):
            job = resolve_job(config, 1)
            with Report(job, Progress(step=start), device=torch.device("cpu"), rank=0) as report:
                for step in range(start + 1, end + 1):
                    report.step(Progress(step=step), replace(RESULT, loss=100.0 * len(opened) + step), lr=0.1)
    expected = {step: 100.0 + step for step in range(1, 51)} | {step: 300.0 + step for step in range(51, 55)}
    expected |= {55: 455.0, 56: 456.0}
    assert dict(summarize_run(tmp_path).loss) == expected and len(summarize_run(tmp_path).loss) == len(expected)
    events = EventAccumulator(str(tmp_path / "tb" / tmp_path.name), size_guidance={"scalars": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss_metrics/global_avg_loss")] == sorted(expected.items())
    assert [(sink.run.num_done, sink.run.num_logged) for sink in opened] == [(0, 0), (50, 57), (50, 52), (54, 54)]


def test_tensorboard_shows_the_runs_name_and_its_config(tmp_path):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    for name in ("a-run", "another"):
        with fake_ranks(1, rank=0), open_report(config_in(tmp_path / name, enable_tensorboard=True)):
            pass
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    runs.Reload()
    assert sorted(runs.Runs()) == ["a-run/tb/a-run", "another/tb/another"]
    alone = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "a-run" / "tb"))
    alone.Reload()
    assert list(alone.Runs()) == ["a-run"]
    name, config = (
        alone.Tensors("a-run", f"run/{tag}/text_summary")[0].tensor_proto.string_val[0].decode()
        for tag in ("name", "config")
    )
    assert name == "**a-run**: llama3 debug_gqa, 10,000 steps, on 1 rank"
    fence, *lines, last = config.splitlines()
    assert (fence, last) == ("```json", "```")
    assert json.loads("\n".join(lines))["model"]["flavor"] == "debug_gqa"


def test_the_largest_loss_is_of_a_ranks_samples_and_memory_of_the_rank_with_most(monkeypatch, tmp_path):
    """Two batches over two stages: only the last stage has losses. The second batch has a quarter of the tokens."""
    rows = [(0, 0.0, 75, 3.0), (1, 0.0, 25, 1.0), (0, 1.5, 75, 2.0), (1, 1.0, 25, 5.0)]

    def all_gather(outputs, own):
        assert own.tolist()[:3] == [0, 0.0, 75]
        for output, row in zip(outputs, rows, strict=True):
            output.copy_(torch.tensor(row))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    with fake_ranks(4, rank=0), open_report(config_in(tmp_path, log_freq=1), world_size=4) as report:
        report.step(Progress(step=1), replace(RESULT, own=OwnShare(0.0, 75)), lr=0.1)
    (record,) = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert (record["loss"], record["max_loss"], record["memory_gib"]) == (2.5, 4.0, 5.0)


def test_step_line_says_mfu_only_where_it_is_known():
    scalars = {"loss": 3.25, "grad_norm": 1.5, "lr": 1e-3}
    scalars |= {"tokens_per_sec": 12345.0, "tflops_per_rank": 0.5, "memory_gib": 1.0, "data_secs": 0.0123}
    scalars |= {"skipped_steps": 0}
    line = step_line(20, scalars, unit="tokens", eta_secs=3725)
    assert "loss 3.2500" in line and "tokens/s 12,345" in line and "ETA 1:02:05" in line and "data 12.3 ms" in line
    assert "MFU" not in line and "in use" not in line and "skipped" not in line
    assert "memory 1.00 GiB (0.50 in use)  skipped 2  ETA" in step_line(
        20, scalars | {"memory_allocated_gib": 0.5, "skipped_steps": 2}, unit="tokens", eta_secs=1
    )
    assert "MFU 41.2%" in step_line(20, scalars | {"mfu": 0.412}, unit="tokens", eta_secs=1)


@pytest.mark.parametrize("plain", [True, False])
def test_lines_are_colored_on_a_terminal_unless_disabled(monkeypatch, tmp_path, capsys, plain):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sinks.sys.stdout, "isatty", lambda: True)
    with fake_ranks(1, rank=0), open_report(config_in(tmp_path, disable_color_printing=plain)) as report:
        metrics = {"validation_loss": 1.0, "validation_perplexity": 2.7, "validation_unigram_entropy": None}
        report.validation(1, metrics)
    line = "step      1  held-out loss 1.0000  perplexity 2.70"
    assert capsys.readouterr().out == (f"{line}\n" if plain else f"\033[36m{line}\033[0m\n")


class ListSink:
    def __init__(self, run):
        self.run, self.records, self.is_closed = run, [], False

    def log(self, step, metrics):
        self.records.append((step, dict(metrics)))

    def close(self):
        self.is_closed = True


def test_a_registered_sink_receives_what_metrics_jsonl_does_on_rank_0_only(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(sinks, "_REGISTERED", {})
    register_metric_sink("list", lambda run: opened.append(ListSink(run)) or opened[-1])
    config = config_in(tmp_path, log_freq=1)
    with fake_ranks(2, rank=0), open_report(config, world_size=2) as report:
        report.step(Progress(step=1, units_seen=100), RESULT, lr=0.1)
        metrics = {"validation_loss": 2.0, "validation_perplexity": 7.4, "validation_unigram_entropy": 3.0}
        report.validation(1, metrics)
    with fake_ranks(2, rank=1), open_report(config, rank=1, world_size=2):
        pass
    (sink,) = opened
    records = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [{"step": step, **metrics} for step, metrics in sink.records] == records
    assert records[0]["loss"] == 2.5 and records[1]["validation_loss"] == 2.0 and sink.is_closed
    assert sink.run.num_done == 0 and sink.run.config["model"]["flavor"] == "debug_gqa"
    assert not dist.is_initialized()


def test_sinks_are_closed_after_an_error_which_theirs_do_not_hide(monkeypatch, tmp_path, capsys):
    opened = []
    monkeypatch.setattr(sinks, "_REGISTERED", {})
    register_metric_sink("list", lambda run: opened.append(ListSink(run)) or opened[-1])

    def fail(sink):
        raise OSError("disk full")

    monkeypatch.setattr(JsonlSink, "close", fail)
    with fake_ranks(1, rank=0):
        with pytest.raises(Preempted), open_report(config_in(tmp_path)):
            raise Preempted("stopped on request")
        assert opened[0].is_closed and "metrics may be incomplete: disk full" in capsys.readouterr().err
        with pytest.raises(OSError, match="disk full"), open_report(config_in(tmp_path)):
            pass
