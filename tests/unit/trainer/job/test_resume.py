"""What a resumed run keeps of its checkpoint, what it refuses, and what it prints of changes."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from converters.common.errors import CheckpointError, ConfigError
from converters.model.model_info import ModelInfo
from converters.tokenizers.assets import find_assets
from tests.models.llama import write_tokenizer
from trainer.checkpoints.recorded import BATCH, NUM_STREAMS, OPTIMIZER_KIND, Recorded
from trainer.config.load import by_section, load_config
from trainer.config.sections import Config, Model
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.job.resume import _NO_SETTINGS, refuse_other_job, resumed_job, say_changes, settings_of

STEP = Path("checkpoint/step-50")
INFO = ModelInfo("llama3", resolve_job(Config(model=Model(flavor="debug_gqa")), 1).args)


def job_of(world_size: int = 1, **sections: dict) -> Job:
    config = Config(model=Model(flavor="debug_gqa"))
    config = replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in sections.items()})
    return resolve_job(config, world_size)


def recorded(job: Job | None = None, **settings: object) -> Recorded:
    return Recorded(STEP, settings_of(job, INFO) if job else settings, is_partial=job is None)


def changes(was: Job, now: Job, capsys) -> list[str]:
    capsys.readouterr()
    say_changes(recorded(was), settings_of(now, INFO))
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("ranks", "local", "passes"), [(1, 4, 2), (2, 2, 2), (4, 1, 2), (1, 8, 1), (8, 1, 1)])
def test_an_unset_global_batch_is_kept_on_other_ranks(capsys, ranks, local, passes):
    was = job_of(2, training={"local_batch_size": 4})
    job = resumed_job(job_of(ranks, training={"local_batch_size": local}), recorded(was))
    assert (job.samples_per_step, job.num_accumulated) == (8, passes)
    line = capsys.readouterr().err
    if passes > 1:
        assert "training.global_batch_size = 8 is kept from step-50: 2 forward and backward passes per step" in line
    else:
        assert line == ""


@pytest.mark.parametrize(
    ("ranks", "local", "tries"),
    [
        (3, 4, ["--training.global_batch_size 12, to go"]),
        (1, 16, ["--training.local_batch_size 8, to keep 8", "--training.global_batch_size 16, to go"]),
        (2, 3, ["--training.local_batch_size 2, to keep 8", "--training.global_batch_size 6", "--training.global_"]),
    ],
)
def test_a_global_batch_that_does_not_divide_is_refused_with_what_to_write(ranks, local, tries):
    was = job_of(2, training={"local_batch_size": 4})
    with pytest.raises(ConfigError, match="the run had 8 samples per step up to step-50") as caught:
        resumed_job(job_of(ranks, training={"local_batch_size": local}), recorded(was))
    assert len(caught.value.tries) == len(tries)
    assert all(now.startswith(expected) for now, expected in zip(caught.value.tries, tries, strict=True))


def test_a_local_batch_that_keeps_the_global_one_holds_whole_microbatches():
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 4}
    now = job_of(2, training={"local_batch_size": 12}, parallelism=pipeline)
    with pytest.raises(ConfigError) as caught:
        resumed_job(now, recorded(job_of(training={"local_batch_size": 8})))
    assert caught.value.tries[0] == "--training.local_batch_size 8, to keep 8 samples per step"


def test_a_global_batch_that_is_set_wins_and_is_printed(capsys):
    was, now = job_of(2, training={"local_batch_size": 4}), job_of(training={"global_batch_size": 16})
    assert resumed_job(now, recorded(was)) == now
    assert changes(was, now, capsys) == ["changed since step-50: training.global_batch_size = 16, was 8"]


def test_a_new_run_says_that_it_keeps_no_batch(capsys):
    left = Recorded(STEP, {}, is_partial=False, left_batch=8)
    now = job_of(training={"local_batch_size": 4}, checkpoint={"exclude_from_loading": ("train_state",)})
    assert resumed_job(now, left) == now
    assert capsys.readouterr().err == (
        "training.global_batch_size = 4 in this new run, not 8 as up to step-50: checkpoint.exclude_from_loading has"
        " train_state\n"
    )
    resumed_job(job_of(training={"local_batch_size": 8}), left)
    resumed_job(now, left, say=lambda line: None)  # the check before the ranks start, which say it themselves
    assert capsys.readouterr().err == ""


def test_the_streams_of_c4_are_kept_and_must_divide(capsys):
    c4 = {"dataset": "c4", "local_batch_size": 1, "global_batch_size": 960}
    was = job_of(96, training=c4)
    assert resumed_job(job_of(48, training=c4), recorded(was)).config.training.dataset_streams == 96
    assert capsys.readouterr().err == "training.dataset_streams = 96 is kept from step-50\n"
    with pytest.raises(ConfigError, match="reads c4 in 96 streams .* of 64 does not divide; degrees that do: 1, 2, 3"):
        resumed_job(job_of(64, training=c4), recorded(was))
    with pytest.raises(ConfigError, match="64 streams"):  # of an earlier titan
        resumed_job(job_of(96, training=c4), recorded(**{NUM_STREAMS: 64}))
    anew = recorded(**{BATCH: 960})  # without the data's position the number is free
    assert resumed_job(job_of(64, training=c4), anew).config.training.dataset_streams is None


@pytest.mark.parametrize(("dataset", "num_lines"), [("c4", 1), ("jsonl", 0)])
def test_another_reader_of_the_tokenizer_is_a_line_where_ids_are_not_kept(
    capsys, tmp_path, monkeypatch, dataset, num_lines
):
    write_tokenizer(tmp_path)
    job, info = job_of(training={"dataset": dataset}), replace(INFO, assets=find_assets(tmp_path))
    was = Recorded(STEP, settings_of(job, info), is_partial=False)
    say_changes(was, settings_of(job, info))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("trainer.next_token.objective.READER_VERSION", 99)
    say_changes(was, settings_of(job, info))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == num_lines and all("tokenizer = " in line and "version 99" in line for line in lines)


@pytest.mark.parametrize("excluded", [(), ("optimizer",)])
def test_another_kind_of_optimizer_needs_new_moments(excluded):
    now = job_of(optimizer={"name": "Adam"}, checkpoint={"exclude_from_loading": ("rng", *excluded)})
    if excluded:
        assert resumed_job(now, recorded(job_of())) == now
        return
    with pytest.raises(ConfigError, match="step-50 was trained with AdamW, and is to be resumed with Adam") as caught:
        resumed_job(now, recorded(job_of()))
    assert caught.value.tries[0] == "--optimizer.name AdamW"
    assert caught.value.tries[1].startswith("--checkpoint.exclude_from_loading rng,optimizer,")


def test_every_change_is_a_line_and_layouts_are_none(capsys):
    was = job_of(2, training={"local_batch_size": 4})
    layout = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    assert changes(was, job_of(4, training={"local_batch_size": 8}, parallelism=layout), capsys) == []
    now = job_of(
        2,
        training={
            "local_batch_size": 4,
            "steps": 20000,
            "max_norm": 0.5,
            "seq_len": 1024,
            "dataset": "tokens",
            "dataset_mix": (("a", 0.5), ("b", 0.5)),
            "mixed_precision_param": "float32",
            "dtype": "bfloat16",
            "loss": "plain",
        },
        optimizer={"lr": 1e-4, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-6},
        lr_scheduler={"warmup_steps": 10, "decay_type": "cosine"},
        model={"converters": ("quantize.linear.float8",)},
        debug={"seed": 7},
        float8={"emulate": True},
    )
    lines = changes(was, now, capsys)
    assert {line.removeprefix("changed since step-50: ") for line in lines} == {
        'training.dataset = "tokens", was "c4_test"',
        'training.dataset_mix = [["a", 0.5], ["b", 0.5]], was []',
        "training.steps = 20000, was 10000",
        "lr_scheduler.total_steps = 20000, was 10000",  # unset: the schedule is longer, too
        "training.max_norm = 0.5, was 1.0",
        "training.seq_len = 1024, was 2048",
        'training.mixed_precision_param = "float32", was "bfloat16"',
        'training.dtype = "bfloat16", was "float32"',
        'optimizer.state_dtype = "bfloat16", was "float32"',
        'training.loss = "plain", was "chunked"',
        "optimizer.lr = 0.0001, was 0.0008",
        "optimizer.beta2 = 0.99, was 0.95",
        "optimizer.weight_decay = 0.0, was 0.1",
        "optimizer.eps = 1e-06, was 1e-08",
        "lr_scheduler.warmup_steps = 10, was 200",
        'lr_scheduler.decay_type = "cosine", was "linear"',
        'model.converters = ["quantize.linear.float8"], was []',
        "debug.seed = 7, was 0",
    }


def test_a_tokenizer_of_other_content_is_a_change_and_another_folder_is_none(tmp_path, capsys):
    files = [tmp_path / name / "tokenizer.json" for name in ("a", "moved", "other")]
    for file, text in zip(files, ("one", "one", "two"), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    a, moved, other = (settings_of(job_of(), replace(INFO, assets={"tokenizer.json": file})) for file in files)
    say_changes(Recorded(STEP, a, is_partial=False), moved)
    assert capsys.readouterr().err == ""
    say_changes(Recorded(STEP, a, is_partial=False), other)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('changed since step-50: tokenizer = "tokenizer.json ')


def test_an_earlier_checkpoint_says_what_is_not_compared(capsys):
    say_changes(recorded(**{"optimizer.lr": 1e-3, OPTIMIZER_KIND: "AdamW"}), settings_of(job_of(), INFO))
    first, second = capsys.readouterr().err.splitlines()
    assert "does not record its run's settings" in first and "optimizer.lr" in first and "training" not in first
    assert second == "changed since step-50: optimizer.lr = 0.0008, was 0.001"
    job = job_of()
    assert resumed_job(job, recorded()) == job
    assert "does not say how many samples its steps had; they have 8 now" in capsys.readouterr().err


def test_a_step_in_place_of_a_damaged_one_must_have_its_batch():
    job, other = job_of(training={"global_batch_size": 16}), job_of()
    refuse_other_job(job, job, STEP)
    with pytest.raises(CheckpointError, match="step-50 was loaded in place of a damaged step") as caught:
        refuse_other_job(job, other, STEP)
    assert caught.value.tries == ("--checkpoint.load_step 50",)


def test_each_key_that_is_not_recorded_exists_and_changes_nothing_that_is_learned():
    keys = [
        f"{section}.{f.name}" for section, record in by_section(load_config("debug")).items() for f in fields(record)
    ]
    assert [beginning for beginning in _NO_SETTINGS if not any(key.startswith(beginning) for key in keys)] == []
    left_out = {key for key in keys if key.startswith(_NO_SETTINGS)}
    assert {key for key in left_out if key.startswith(("training.", "optimizer.", "lr_scheduler.", "debug."))} == {
        "training.local_batch_size",
        "training.enable_cpu_offload",
        "training.gc_freq",
        "training.gc_debug",
        "training.dataloader.pin_memory",
    }
