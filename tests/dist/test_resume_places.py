"""What a run finds in its checkpoint folder, and what it leaves there; random states; whose folder it is."""

import json

from converters.common.names import RUN_LOCK
from tests.dist import runs
from trainer.checkpoints.run_lock import only_run
from trainer.job.job import resolve_job
from trainer.seed import seed

FSDP2 = runs.FSDP2


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_comparison_of_steps_sees_plain_values(whole):
    folder = whole / "checkpoint"
    assert runs.differences(folder / "step-2", folder / "step-2") == []
    differing = {output.split(":")[0] for output in runs.differences(folder / "step-2", folder / "step-4")}
    assert {"train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch"} <= differing
    assert any(name.startswith("dataloader.") for name in differing) and "norm.weight" in differing


def test_going_back_keeps_what_it_saves_and_tells_of_newer_steps(pools, data, whole, tmp_path):
    runs.begin_from(tmp_path, whole, 2, 4)
    (tmp_path / "checkpoint" / "step-4").rename(tmp_path / "checkpoint" / "step-8")
    runs.begin_from(tmp_path, whole, 4)
    checkpoint = {"load_step": 2, "keep_latest_k": 2}
    heard = pools[2].run(runs.run_and_hear, runs.make_config(data, tmp_path, checkpoint=checkpoint, **FSDP2))
    assert [error for error, _ in heard] == ["", ""]
    assert "are used at the next start: [8, 4]" in heard[0][1] and "saved " in heard[0][1] and heard[1][1] == ""
    assert _names(tmp_path / "checkpoint") == [RUN_LOCK, "step-2", "step-4", "step-8"]
    assert runs.differences(tmp_path / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []


def test_the_first_step_is_saved_on_request_the_last_one_always_and_to_be_resumed(pools, data, tmp_path):
    settings = {"interval": 100, "folder": "steps"}
    first = settings | {"enable_first_step_checkpoint": True}
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, steps=2, checkpoint=first, **FSDP2)) == ["", ""]
    assert _names(tmp_path / "steps") == [RUN_LOCK, "step-1", "step-2"] and not (tmp_path / "checkpoint").exists()
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, steps=3, checkpoint=settings, **FSDP2)) == ["", ""]
    assert _names(tmp_path / "steps") == [RUN_LOCK, "step-1", "step-2", "step-3"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]  # none was taken twice
    other = tmp_path / "other"
    assert pools[2].run(runs.run, runs.make_config(data, other, steps=2, checkpoint=settings, **FSDP2)) == ["", ""]
    assert _names(other / "steps") == [RUN_LOCK, "step-2"]


def test_the_only_step_may_stand_aside(pools, data, whole, tmp_path):
    runs.begin_from(tmp_path, whole, 2)
    (tmp_path / "checkpoint" / "step-2").rename(tmp_path / "checkpoint" / ".old-step-2")
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, **FSDP2)) == ["", ""]
    assert runs.read_losses(tmp_path).keys() == {3, 4}
    assert _names(tmp_path / "checkpoint") == [RUN_LOCK, "step-2", "step-4"]


def test_a_folder_in_use_is_refused_on_every_rank_before_anything_is_swept(pools, data, whole, tmp_path):
    runs.begin_from(tmp_path, whole, 4)
    (tmp_path / "checkpoint" / ".tmp-being-saved").mkdir()
    with only_run(tmp_path / "checkpoint"):
        output = pools[2].run(runs.run, runs.make_config(data, tmp_path, **FSDP2))
        assert all(t.startswith("CheckpointError: another run saves to") for t in output)
        reading = runs.make_config(data, tmp_path, checkpoint={"load_only": True}, **FSDP2)
        assert pools[2].run(runs.run, reading) == ["", ""]  # it loads only, and clears nothing away
    assert _names(tmp_path / "checkpoint") == [".titan-lock", ".tmp-being-saved", "step-4"]
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, **FSDP2)) == ["", ""]
    assert _names(tmp_path / "checkpoint") == [RUN_LOCK, "step-4"]


def test_a_manifest_spares_reading_every_item(pools, data, tmp_path):
    config = runs.make_config(data, tmp_path, steps=1, checkpoint={"initial_load_path": str(tmp_path / "seed")})
    seed(resolve_job(config), tmp_path / "seed")
    assert pools[1].run(runs.run_by_the_manifest_alone, config) == [""]


def test_random_numbers_continue_on_as_many_ranks_and_restart_on_others(pools, data, tmp_path):
    config = runs.make_config(data, tmp_path, parallelism={"data_parallel_replicate_degree": 2})
    drawn = pools[2].run(runs.save_and_draw, config)
    assert drawn[0] != drawn[1]
    assert pools[2].run(runs.load_and_draw, config) == [(drawn[0], ""), (drawn[1], "")]
    ((alone, talk),) = pools[1].run(runs.load_and_draw, runs.make_config(data, tmp_path))
    assert "random number states of 2 ranks do not fit 1 ranks: they are seeded again" in talk and alone not in drawn
