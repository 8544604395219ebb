"""Curves and summary of a run folder: which records count, and truncated lines."""

import json

import pytest

from converters.common.errors import CheckpointError
from titan_tools.pages.run_folder import read_curves, summarize_run


def write_metrics(folder, *records, tail=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return folder


def test_the_latest_record_of_a_step_counts(tmp_path):
    run = summarize_run(
        write_metrics(
            tmp_path,
            {"step": 1, "loss": 9.0},
            {"step": 2, "loss": 8.0},
            {"step": 2, "validation_loss": 7.5, "validation_unigram_entropy": 6.3},
            {"step": 2, "loss": 7.0},
        )
    )
    assert run.loss == ((1, 9.0), (2, 7.0))
    assert run.held_out_loss == ((2, 7.5),)
    assert run.unigram_entropy == 6.3


def test_records_after_the_resumed_step_do_not_count(tmp_path):
    parts = ({"step": n, "loss": 9.0 - n, "validation_loss": 8.0} for n in (1, 2, 3, 4))
    run = summarize_run(write_metrics(tmp_path, *parts, {"step": 2, "resumed_from": 2}, {"step": 3, "loss": 1.0}))
    assert run.loss == ((1, 8.0), (2, 7.0), (3, 1.0)) and run.held_out_loss == ((1, 8.0), (2, 8.0))


def test_a_truncated_last_line_is_skipped(tmp_path):
    assert summarize_run(write_metrics(tmp_path, {"step": 1, "loss": 9.0}, tail='{"step": 2, "lo')).loss == ((1, 9.0),)


@pytest.mark.parametrize("line", ["[1, 2]", "hello", '{"loss": 1.0}', '{"step": "x"}'])
def test_a_line_that_is_not_a_record_is_an_error_with_its_number(tmp_path, line):
    write_metrics(tmp_path, {"step": 1, "loss": 9.0}, tail=line + "\n")
    with pytest.raises(CheckpointError, match="metrics.jsonl:2"):
        summarize_run(tmp_path)


def test_saved_steps_are_listed_with_their_problems(tmp_path):
    write_metrics(tmp_path, {"step": 1, "loss": 9.0})
    for name in ("step-10", "step-9", "old-step-9-bak"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    steps = summarize_run(tmp_path).steps
    assert [s.step for s in steps] == [9, 10]
    assert all(s.problem for s in steps)


def test_every_metric_is_a_curve(tmp_path):
    write_metrics(tmp_path, {"step": 1, "lr": 0.1}, {"step": 3, "lr": 0.2, "mfu": 0.4}, {"step": 2, "resumed_from": 2})
    assert read_curves(tmp_path) == {"lr": ((1, 0.1),)}


def test_a_folder_that_is_not_a_runs_names_the_run_around_it(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        read_curves(tmp_path / "nothing")
    step = tmp_path / "checkpoint" / "step-1"
    step.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"is not the folder of a run: it has no metrics\.jsonl") as raised:
        read_curves(step)
    assert raised.value.tries == ()
    write_metrics(tmp_path, {"step": 1, "loss": 9.0})
    with pytest.raises(CheckpointError) as raised:
        read_curves(step)
    assert raised.value.tries == (str(tmp_path),)
