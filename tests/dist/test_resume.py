"""Runs that stop and resume: bit-equal in one layout, the same numbers in another, and never from damaged weights."""

import re
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.common.box import Box
from converters.common.names import RUN_LOCK
from converters.families.llama3 import FLAVORS, LLAMA3
from converters.store.digest import TensorDigest
from converters.store.manifest import check_files, read_manifest
from tests.dist import runs
from tests.uploaded import SLOW_STORES, runs_in_store
from trainer.job.job import resolve_job
from trainer.seed import seed

FSDP2 = runs.FSDP2  # accumulates twice
TP2 = {"parallelism": {"tensor_parallel_degree": 2}}
PP2 = {"parallelism": {"pipeline_parallel_degree": 2}}
CP2 = {"parallelism": {"context_parallel_degree": 2}}
# rank 0 holds the embedding and its copy, the output
V2 = {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}}
LAYOUTS = {"fsdp2": FSDP2, "tp2": TP2, "pp2": PP2, "v2": V2, "cp2": CP2}
SAME = [
    ("two_layers", "fsdp2"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("debug_tied", "v2"), ("debug_gqa", "tp2"), ("debug_tied", "pp2"))
    ),
]


@pytest.fixture(autouse=True, params=SLOW_STORES)
def store(request, monkeypatch):
    runs_in_store(request, monkeypatch)


@pytest.fixture(scope="module")
def whole_runs(pools, data, tmp_path_factory):
    """Dump folders of runs that were never stopped, by (flavor, layout), made when first asked for."""
    made = {}

    def get(flavor, name):
        if (flavor, name) not in made:
            dump = tmp_path_factory.mktemp(f"{flavor}-{name}")
            assert pools[2].run(runs.run, runs.make_config(data, dump, flavor=flavor, **LAYOUTS[name])) == ["", ""]
            made[flavor, name] = dump
        return made[flavor, name]

    return get


def _flip_a_bit(step_folder):
    path = step_folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("flavor", "name"), SAME)
def test_going_on_in_the_same_layout_is_bit_equal(pools, data, whole_runs, tmp_path, flavor, name):
    whole = whole_runs(flavor, name)
    runs.begin_from(tmp_path, whole, 2)
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, flavor=flavor, **LAYOUTS[name])) == ["", ""]
    expected = runs.read_losses(whole)
    assert runs.read_losses(tmp_path) == {step: expected[step] for step in (3, 4)}
    resumed = tmp_path / "checkpoint" / "step-4"
    assert runs.differences(resumed, whole / "checkpoint" / "step-4") == []
    assert check_files(resumed) == []


@pytest.mark.parametrize(("flavor", "name"), SAME)
def test_stock_dcp_reads_what_ranks_have_written(pools, data, whole_runs, flavor, name):
    step = whole_runs(flavor, name) / "checkpoint" / "step-4"
    sums = read_manifest(step).tensors
    loaded = {fqn: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for fqn, s in sums.items()}
    loaded |= {"train_state.step": 0, "lr_scheduler.last_epoch": 0, "optimizer.param_groups.norm.weight.betas": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group here
        dcp.load(loaded, checkpoint_id=str(step))
    assert loaded["train_state.step"] == loaded["lr_scheduler.last_epoch"] == 4
    assert loaded["optimizer.param_groups.norm.weight.betas"] == (0.9, 0.95)
    for fqn, expected in sums.items():
        digest = TensorDigest(expected.dtype, expected.shape)
        digest.update(Box.whole(expected.shape), loaded[fqn].numpy())
        assert digest.hexdigest() == expected.digest, fqn
    parameters = {p.fqn for p in LLAMA3.parameters(FLAVORS[flavor])}
    assert {fqn for fqn in sums if fqn.startswith("optimizer.state.")} == {
        f"optimizer.state.{fqn}.{kind}" for fqn in parameters for kind in ("step", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize(
    "name", ["v2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2", "pp2", "cp2"))]
)
def test_another_layout_loads_the_same_bits_and_continues(pools, data, whole_runs, tmp_path, name):
    whole = whole_runs("debug_tied", "fsdp2")
    config = runs.make_config(data, tmp_path, flavor="debug_tied", **LAYOUTS[name])
    source = whole / "checkpoint" / "step-2"
    progress = pools[2].run(runs.copy_step, config, source, tmp_path / "copy")
    assert [p.step for p in progress] == [2, 2]
    assert runs.differences(tmp_path / "copy", source, without_rng=True) == []

    runs.begin_from(tmp_path, whole, 2)
    assert pools[2].run(runs.run, config) == ["", ""]
    expected, seen = runs.read_losses(whole), runs.read_losses(tmp_path)
    assert set(seen) == {3, 4}
    assert all(abs(seen[step] - expected[step]) <= 5e-6 for step in seen)


def test_an_unset_global_batch_is_kept_on_another_number_of_ranks(pools, data, whole_runs, tmp_path):
    whole = whole_runs("two_layers", "fsdp2")
    runs.begin_from(tmp_path, whole, 2)
    unset = {"global_batch_size": -1}  # 2 samples per step on one rank
    ((error, heard),) = pools[1].run(runs.run_and_hear, runs.make_config(data, tmp_path, training=unset))
    assert error == "" and "training.global_batch_size = 4 is kept from step-2: 2 forward and backward passes" in heard
    assert "changed since" not in heard
    expected, seen = runs.read_losses(whole), runs.read_losses(tmp_path)
    assert seen.keys() == {3, 4} and all(abs(seen[step] - expected[step]) <= 5e-6 for step in seen)


def test_what_the_config_changes_is_printed_and_another_optimizer_is_refused(pools, data, whole_runs, tmp_path):
    runs.begin_from(tmp_path, whole_runs("two_layers", "fsdp2"), 2)
    changed = {"training": {"max_norm": 0.5, "global_batch_size": 2}, "lr_scheduler": {"warmup_steps": 3}}
    config = runs.make_config(data, tmp_path, optimizer={"name": "Adam", "lr": 1e-3}, **changed)
    ((error, _),) = pools[1].run(runs.run_and_hear, config)
    assert error.startswith("ConfigError: step-2 was trained with AdamW, and is to be resumed with Adam")
    assert not (tmp_path / "metrics.jsonl").exists()  # no step was taken
    new_moments = {"checkpoint": {"exclude_from_loading": ("optimizer",)}}
    config = runs.make_config(data, tmp_path, optimizer={"name": "Adam", "lr": 1e-3}, **changed, **new_moments)
    ((error, heard),) = pools[1].run(runs.run_and_hear, config)
    assert error == ""
    assert {line.removeprefix("changed since step-2: ") for line in heard.splitlines() if "changed" in line} == {
        'optimizer.name = "Adam", was "AdamW"',
        "optimizer.lr = 0.001, was 0.01",
        "training.max_norm = 0.5, was 1.0",
        "training.global_batch_size = 2, was 4",
        "lr_scheduler.warmup_steps = 3, was 2",
    }


def test_a_step_before_a_damaged_one_keeps_its_own_global_batch(pools, data, whole_runs, tmp_path):
    runs.begin_from(tmp_path, whole_runs("two_layers", "fsdp2"), 2)
    assert pools[1].run(runs.run, runs.make_config(data, tmp_path, training={"global_batch_size": 8})) == [""]
    _flip_a_bit(tmp_path / "checkpoint" / "step-4")
    unset = {"training": {"global_batch_size": -1}, "steps": 5}
    (error,) = pools[1].run(runs.run, runs.make_config(data, tmp_path, **unset))
    assert "step-2 was loaded in place of a damaged step and had 4 samples per step" in error and "8" in error
    config = runs.make_config(data, tmp_path, **unset, checkpoint={"load_step": 2})
    ((error, heard),) = pools[1].run(runs.run_and_hear, config)
    assert error == "" and "training.global_batch_size = 4 is kept from step-2" in heard


def test_a_damaged_newest_step_is_passed_over_and_replaced(pools, data, whole_runs, tmp_path, capfd):
    whole = whole_runs("two_layers", "fsdp2")
    runs.begin_from(tmp_path, whole, 2, 4)
    _flip_a_bit(tmp_path / "checkpoint" / "step-4")
    (tmp_path / "checkpoint" / ".tmp-killed").mkdir()
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, **FSDP2)) == ["", ""]
    assert runs.read_losses(tmp_path).keys() == {3, 4}
    assert runs.differences(tmp_path / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == [RUN_LOCK, "step-2", "step-4"]


def test_nothing_good_to_load_is_an_error_on_every_rank(pools, data, whole_runs, tmp_path):
    runs.begin_from(tmp_path, whole_runs("two_layers", "fsdp2"), 2, 4)
    config = runs.make_config(data, tmp_path, **FSDP2)
    _flip_a_bit(tmp_path / "checkpoint" / "step-4")
    (tmp_path / "checkpoint" / "step-2" / ".metadata").unlink()
    for output in pools[2].run(runs.run, config):
        assert (
            "can be used" in output
            and "step-4: __0_0.distcp: its bytes" in output
            and "step-2: it has no .metadata" in output
        )

    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "old-step-9-bak").mkdir()
    assert all("old-step-9-bak" in output for output in pools[2].run(runs.run, config))
    assert not (tmp_path / "metrics.jsonl").exists()  # no step was taken


def test_a_step_by_number_is_taken_or_refused(pools, data, whole_runs, tmp_path):
    runs.begin_from(tmp_path, whole_runs("two_layers", "fsdp2"), 2, 4)
    config = runs.make_config(data, tmp_path, **FSDP2, checkpoint={"load_step": 3})
    assert all("no step 3" in output and "4, 2" in output for output in pools[2].run(runs.run, config))
    config = runs.make_config(data, tmp_path, **FSDP2, checkpoint={"load_step": 2, "load_only": True})
    assert pools[2].run(runs.run, config) == ["", ""]
    assert runs.read_losses(tmp_path).keys() == {3, 4}


def test_a_checkpoint_of_another_model_is_refused(pools, data, whole_runs, tmp_path):
    runs.begin_from(tmp_path, whole_runs("two_layers", "fsdp2"), 2)
    output = pools[2].run(runs.run, runs.make_config(data, tmp_path, flavor="debug_tied", **FSDP2))
    assert all("tied: False in the checkpoint, True in the config" in t and "rope_scaling" in t for t in output)


def test_other_data_is_refused(pools, data, whole_runs, tmp_path):
    runs.begin_from(tmp_path, whole_runs("two_layers", "fsdp2"), 2)
    keys = {**FSDP2["training"], "seq_len": 2 * runs.SEQ_LEN}
    config = runs.make_config(data, tmp_path, **(FSDP2 | {"training": keys}))
    assert all("seq_len 32" in output for output in pools[2].run(runs.run, config))
    config = runs.make_config(
        data, tmp_path, **(FSDP2 | {"training": keys}), checkpoint={"exclude_from_loading": ("dataloader",)}
    )
    assert pools[2].run(runs.run, config) == ["", ""]


def test_a_request_to_stop_on_one_rank_saves_and_ends_all(pools, data, whole_runs, tmp_path):
    whole = whole_runs("two_layers", "fsdp2")
    config = runs.make_config(data, tmp_path, **FSDP2)
    output = pools[2].run(runs.run_until_asked_to_stop, config)
    assert all(t.startswith("Preempted: stopped on request after step 1, which is saved") for t in output)
    assert pools[2].run(runs.run, config) == ["", ""]
    assert runs.read_losses(tmp_path) == runs.read_losses(whole)
    assert runs.differences(tmp_path / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []


def test_initial_weights_that_are_damaged_or_elsewhere_are_refused(pools, data, tmp_path):
    seed(resolve_job(runs.make_config(data, tmp_path)), tmp_path / "seed")
    _flip_a_bit(tmp_path / "seed")
    checkpoint = {"initial_load_path": str(tmp_path / "seed")}
    output = pools[2].run(runs.run, runs.make_config(data, tmp_path, checkpoint=checkpoint, **FSDP2))
    assert all("seed: changed or damaged" in t and "__0_0.distcp: its bytes have changed" in t for t in output)
    (tmp_path / "seed" / "titan_manifest.json").unlink()  # as other tools leave it: each item has its CRC32 still
    output = pools[2].run(runs.run, runs.make_config(data, tmp_path, checkpoint=checkpoint, **FSDP2))
    assert all("seed is damaged" in t and "its bytes have changed (CRC32)" in t for t in output)
    checkpoint = {"initial_load_path": str(tmp_path / "nowhere")}
    output = pools[2].run(runs.run, runs.make_config(data, tmp_path, checkpoint=checkpoint, **FSDP2))
    assert all("nowhere: no such file or folder" in t for t in output)


def test_a_checkpoint_that_does_not_say_its_model_is_taken_as_the_configs(pools, data, whole_runs, tmp_path):
    seed(resolve_job(runs.make_config(data, tmp_path)), tmp_path / "seed")
    (tmp_path / "seed" / "titan_model.json").unlink()  # torchtitan's checkpoints have none
    (tmp_path / "seed" / "titan_manifest.json").unlink()
    checkpoint = {"initial_load_path": str(tmp_path / "seed"), "load_only": True}
    config = runs.make_config(data, tmp_path, steps=1, checkpoint=checkpoint, **FSDP2)
    assert pools[2].run(runs.run, config) == ["", ""]
    assert runs.read_losses(tmp_path)[1] == runs.read_losses(whole_runs("two_layers", "fsdp2"))[1]


def test_a_dump_folder_that_cannot_be_is_reported_before_the_first_step(pools, data, tmp_path):
    (tmp_path / "file").touch()
    output = pools[2].run(runs.run, runs.make_config(data, tmp_path / "file", **FSDP2))
    assert all(t.startswith("ConfigError: job.dump_folder = ") and "File exists" in t for t in output)


def test_a_disk_without_room_is_reported_before_the_first_step(pools, data, tmp_path):
    output = pools[2].run(runs.run_on_a_full_disk, runs.make_config(data, tmp_path, **FSDP2))
    assert all(re.search(r"^CheckpointError.*needs [\d.]+ MiB, [\d.]+ \w+ are free", t) for t in output), output
    assert not list(tmp_path.glob("**/step-*")) and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_model_only_last_step_says_what_it_lacks(pools, data, tmp_path):
    last = {"last_save_model_only": True, "keep_latest_k": 2}
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path, steps=3, checkpoint=last, **FSDP2)) == ["", ""]
    output = pools[2].run(runs.run, runs.make_config(data, tmp_path, **FSDP2))
    assert all("step-3 holds only weights" in t and "checkpoint.last_save_model_only = true saves" in t for t in output)


def test_a_whole_state_may_be_the_start_of_another_run(pools, data, whole_runs, tmp_path):
    whole = whole_runs("two_layers", "fsdp2")
    checkpoint = {"initial_load_path": str(whole / "checkpoint" / "step-2"), "initial_load_model_only": False}
    config = runs.make_config(data, tmp_path, checkpoint=checkpoint, **FSDP2)
    assert pools[2].run(runs.run, config) == ["", ""]
    assert runs.differences(tmp_path / "checkpoint" / "step-4", whole / "checkpoint" / "step-4") == []


@pytest.mark.parametrize(
    ("flavor", "parallelism"),
    [
        ("debug_gqa", {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
        ("debug_tied", {"data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2}),
        pytest.param(
            "debug_gqa", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_clipping_over_all_meshes_is_torchs_on_whole_gradients(pools, data, tmp_path, flavor, parallelism):
    batch = {"global_batch_size": -1}
    config = runs.make_config(data, tmp_path, flavor=flavor, parallelism=parallelism, training=batch)
    for norms in pools[4].run(runs.clip_twice, config, 0.1):
        assert norms["ours"] == pytest.approx(norms["torch"], rel=1e-5)
        assert norms["after"] == pytest.approx(0.1, rel=1e-4) and norms["torch"] > 0.1
