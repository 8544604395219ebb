"""Runs on text, streams and mixtures: the same batches on any number of ranks, before and after a stop; no hang."""

import json
import random

import pytest

from tests.dist import runs
from trainer.data.prepare import prepare

DP2 = {"parallelism": {"data_parallel_shard_degree": 2}, "training": {"local_batch_size": 1}}


def write_lines(path, *, seed, count=200):
    """Sentences of a few words each, a JSON line each."""
    draw = random.Random(seed)
    lines = [{"text": " ".join(f"word{draw.randrange(40)}" for _ in range(12))} for _ in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def kinds(data, tmp_path_factory):
    """What each kind of data is called in a config's training section."""
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "c4").mkdir()
    for number in range(5):
        write_lines(folder / "c4" / f"{number}.jsonl", seed=number)
    prepare([write_lines(folder / "more.jsonl", seed=9)], folder / "more", tokenizer=data, held_out=0.1)
    mix = ((str(data), 0.75), (str(folder / "more"), 0.25))
    return {
        "c4": {"dataset": "c4", "dataset_path": str(folder / "c4"), "dataset_streams": 4},
        "jsonl": {"dataset": "jsonl", "dataset_path": str(folder / "c4")},
        "mix": {"dataset": "tokens", "dataset_path": None, "dataset_mix": mix},
    }


def config_of(data, dump, kind, *, ranks=1, **sections):
    layout = DP2 if ranks == 2 else {}
    training = layout.get("training", {}) | kind | sections.pop("training", {})
    return runs.make_config(data, dump, **(layout | {"training": training} | sections))


@pytest.mark.parametrize("name", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("c4", "jsonl")), "mix"])
def test_a_run_continues_with_the_same_batches_on_another_number_of_ranks(pools, data, kinds, tmp_path, name):
    one, two, resumed = (tmp_path / folder for folder in ("one", "two", "resumed"))
    assert pools[1].run(runs.run, config_of(data, one, kinds[name])) == [""]
    assert pools[2].run(runs.run, config_of(data, two, kinds[name], ranks=2)) == ["", ""]
    expected = runs.read_losses(one)
    assert expected.keys() == {1, 2, 3, 4} and expected[1] != expected[2]
    losses = runs.read_losses(two)
    assert all(abs(losses[step] - expected[step]) <= 5e-6 for step in expected)
    loaders = [
        found for found in runs.differences(one / "checkpoint" / "step-4", two / "checkpoint" / "step-4")
        if found.startswith("dataloader")
    ]  # fmt: skip
    assert loaders == []
    runs.begin_from(resumed, two, 2)
    assert pools[1].run(runs.run, config_of(data, resumed, kinds[name])) == [""]
    losses = runs.read_losses(resumed)
    assert losses.keys() == {3, 4} and all(abs(losses[step] - expected[step]) <= 5e-6 for step in losses)


def test_a_stream_resumes_bit_equal_in_the_same_layout(pools, data, kinds, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert pools[2].run(runs.run, config_of(data, whole, kinds["c4"], ranks=2)) == ["", ""]
    runs.begin_from(resumed, whole, 2)
    assert pools[2].run(runs.run, config_of(data, resumed, kinds["c4"], ranks=2)) == ["", ""]
    assert runs.differences(resumed / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []


def test_text_changed_between_two_runs_is_refused_and_may_be_restarted(pools, data, tmp_path):
    text = write_lines(tmp_path / "a.jsonl", seed=1)
    kind = {"dataset": "jsonl", "dataset_path": str(text)}
    assert pools[1].run(runs.run, config_of(data, tmp_path / "dump", kind, steps=2)) == [""]
    write_lines(text, seed=2)
    (output,) = pools[1].run(runs.run, config_of(data, tmp_path / "dump", kind))
    assert output.startswith("DataError: the data is not that of the checkpoint")
    anew = config_of(data, tmp_path / "dump", kind, checkpoint={"exclude_from_loading": ("dataloader",)})
    assert pools[1].run(runs.run, anew) == [""]


def test_a_checkpoint_of_another_kind_of_data_does_not_fit(pools, data, kinds, tmp_path):
    assert pools[1].run(runs.run, config_of(data, tmp_path, kinds["mix"], steps=2)) == [""]
    (output,) = pools[1].run(runs.run, config_of(data, tmp_path, kinds["c4"]))
    assert "dataloader.positions: missing" in output and "exclude_from_loading" in output


def test_uneven_streams_end_on_all_ranks_at_once(pools, data, tmp_path):
    """The second of two ranks owns the streams that no document is left for."""
    text = write_lines(tmp_path / "a.jsonl", seed=1, count=2)
    kind = {"dataset": "c4", "dataset_path": str(text), "dataset_streams": 4}
    output = pools[2].run(runs.run, config_of(data, tmp_path / "dump", kind, ranks=2))
    assert output[0] == output[1] and "stream 2 of 4 has no document" in output[0]


def test_text_that_cannot_be_read_ends_all_ranks_at_once(pools, data, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{oops\n')
    kind = {"dataset": "c4_test", "dataset_path": str(tmp_path / "a.jsonl")}
    output = pools[2].run(runs.run, config_of(data, tmp_path / "dump", kind, ranks=2))
    assert output[0] == output[1] and "a.jsonl:2: not JSON" in output[0]


def test_validation_tells_each_source_and_their_mean_by_weight(pools, data, kinds, tmp_path):
    mix = kinds["mix"]["dataset_mix"]
    validation = {"enable": True, "local_batch_size": 2, "steps": 2}
    alone = []
    for path, _ in mix:
        one = runs.make_config(data, tmp_path / "one", validation=validation | {"dataset_path": path})
        (output, _), = pools[1].run(runs.validate, one)  # fmt: skip
        alone.append(output["validation_loss"])
    both = runs.make_config(data, tmp_path, validation=validation | {"dataset_path": None, "dataset_mix": mix})
    (output, again), = pools[1].run(runs.validate, both)  # fmt: skip
    assert output == again
    assert [output[f"validation_loss/{path}"] for path, _ in mix] == alone
    assert output["validation_loss"] == pytest.approx(0.75 * alone[0] + 0.25 * alone[1], rel=1e-12)
    two = {"enable": True, "local_batch_size": 1, "steps": 2, "dataset_path": None, "dataset_mix": mix}
    for output, _ in pools[2].run(runs.validate, runs.make_config(data, tmp_path, validation=two, **DP2)):
        assert output["validation_loss"] == pytest.approx(0.75 * alone[0] + 0.25 * alone[1], abs=5e-6)


@pytest.mark.slow
def test_validation_of_c4s_own_files_is_that_of_the_same_text(pools, data, kinds, tmp_path):
    """An index under the dump folder, of all documents in the order of their files."""
    output = {}
    for dataset in ("c4_validation", "jsonl"):
        validation = {
            "enable": True,
            "dataset": dataset,
            "dataset_path": f"{kinds['c4']['dataset_path']}/0.jsonl",
            "steps": -1,
        }
        config = runs.make_config(data, tmp_path / dataset, validation=validation, **DP2)
        first, second = pools[2].run(runs.validate, config)
        assert first == second and first[0] == first[1]
        output[dataset] = first
    assert output["c4_validation"] == output["jsonl"]
