"""What a run of two ranks leaves to look at: traces and scalars of each, its waits, what only the collector frees."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.dist import runs

PP2 = {"parallelism": {"pipeline_parallel_degree": 2}}


@pytest.fixture(scope="module")
def watched(pools, tmp_path_factory):
    """A run's dump folder, and what it said."""
    dump = tmp_path_factory.mktemp("watched")
    config = runs.make_config(
        runs.make_data(tmp_path_factory.mktemp("data")),
        dump,
        **PP2 | {"training": {"gc_debug": True}},
        profiling={"enable_profiling": True, "profile_freq": 3, "profiler_warmup": 1, "profiler_active": 1},
        metrics={"log_freq": 1, "enable_tensorboard": True, "save_for_all_ranks": True},
    )
    heard = pools[2].run(runs.run_and_hear, config)
    assert [error for error, _ in heard] == ["", ""]
    return dump, [talk for _, talk in heard]


def test_every_rank_writes_its_trace(watched):
    dump, _ = watched
    for rank in (0, 1):
        events = json.loads((dump / "profile_traces" / "iteration_3" / f"rank{rank}_trace.json").read_text())
        names = {event.get("name", "") for event in events["traceEvents"]}
        assert {
            "aten::mm",
            "forward_backward 0",
            "clip",
            "update",
        } <= names and "ProfilerStep#2" in names  # torch counts from 0
        assert any("gloo" in name for name in names)


def test_every_rank_writes_its_scalars_and_one_the_records(watched):
    dump, _ = watched
    records = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(0 < record["data_secs"] < 5 and record["memory_gib"] > 0 for record in records)
    memory = []
    for rank in (0, 1):
        events = EventAccumulator(str(dump / "tb" / dump.name / f"rank_{rank}"))
        events.Reload()
        losses = events.Scalars("loss_metrics/global_avg_loss")
        output = {e.step: e.value for e in losses}  # all ranks know it, the last stage's too
        assert output == pytest.approx({record["step"]: record["loss"] for record in records}, rel=1e-6)
        assert len(events.Scalars("time_metrics/data_loading(s)")) == len(events.Scalars("throughput(tps)")) == 4
        memory.append([e.value for e in events.Scalars("memory/max_resident(GiB)")])
    most = [max(of_ranks) for of_ranks in zip(*memory, strict=True)]
    assert [record["memory_gib"] for record in records] == pytest.approx(most, rel=1e-6) and memory[0] != memory[1]
    assert all(record["max_loss"] == pytest.approx(record["loss"]) for record in records)  # of one batch


def test_the_collector_says_what_it_found_after_each_step(watched):
    _, (talk, silence) = watched
    output = [line for line in talk.splitlines() if "only the garbage collector could free" in line]
    assert [line.split(":")[0] for line in output] == [f"step {n}" for n in (1, 2, 3, 4)]
    assert "garbage" not in silence
