"""What `titan train` refuses is refused before ranks start, without torch, and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from converters.common.errors import CheckpointError, ConfigError, DataError
from converters.store.location import locate
from tests.dist.runs import make_data
from titan_tools.launch import training
from trainer.checkpoints.recorded import BATCH, Recorded
from trainer.checkpoints.run_lock import only_run
from trainer.config.load import load_config
from trainer.data.datasets import open_dataset
from trainer.data.index import TRAIN
from trainer.data.samples import SourceSamples
from trainer.job import inputs
from trainer.job.chosen_model import chosen_model
from trainer.job.inputs import check_run
from trainer.job.job import resolve_job
from trainer.job.run_header import header_lines
from trainer.ranks.machine import HOST_CPU

ROOT = Path(__file__).resolve().parents[3]
OWN = Path("outputs/debug/checkpoint")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with data and the seed of another model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    make_data(tmp_path)
    return tmp_path


def _names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--training.dataset_path nowhere", "nowhere is no folder, so no token index"),
        ("--training.seq_len 16384", "too few for one batch of 8"),
        ("--job.dump_folder /proc/x", "job.dump_folder = '/proc/x' cannot be written to"),
        ("--job.save_config_file ../config.json", "leads out of job.dump_folder"),
        ("--checkpoint.initial_load_path nowhere", "nowhere: no such file or folder"),
        ("--checkpoint.load_step 7", f"{OWN} has no step 7 to load"),
        ("--model.converters quantize.linear.float8", "float8 (tensorwise) needs a GPU"),
        ("--profiling.enable_memory_snapshot", "there is no CUDA device here"),
        ("--compile.enable --compile.backend nothing", "compile.backend = 'nothing' is not a backend"),
    ],
    ids=lambda value: value.partition(" ")[0],
)
def test_what_needs_no_rank_is_refused_before_ranks_start(titan, folder, words, message):
    before = _names(folder)
    code, out, err = titan("train", "debug", "--validation.no_enable", *words.split())
    assert (code, out) == (2, "") and message in err
    assert err.startswith("titan train debug: ") and "starting" not in err
    assert _names(folder) == before


def test_an_unknown_backend_is_wrong_on_every_machine(titan, folder):
    code, out, err = titan("config", "check", "debug", "--compile.enable", "--compile.backend", "nothing")
    assert (code, out) == (2, "") and "compile.backend = 'nothing' is not a backend" in err


def test_initial_weights_of_another_model(titan, folder):
    assert titan("seed", "debug", "seed", "--model.flavor", "debugmodel")[0] == 0
    before = _names(folder)
    for command in (("train", "--validation.no_enable"), ("config", "check")):
        words = ("debug", "--checkpoint.initial_load_path", "seed")
        code, _, err = titan(*command[:1], *command[1:] * (command[0] == "config"), *words, "--validation.no_enable")
        assert code == 2 and "seed has another model than the config" in err
    assert _names(folder) == before


def test_a_full_disk(titan, folder, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1 << 20))
    before = _names(folder)
    code, _, err = titan("train", "debug", "--validation.no_enable")
    assert code == 2 and f"{OWN}: needs 15.0 MiB, 1.0 MiB are free" in err
    code, out, err = titan("config", "check", "debug", "--validation.no_enable")
    assert code == 0 and f"WARNING: not on this machine alone: {OWN}: needs 15.0 MiB" in err
    assert "fine on 8 ranks (pp=2,dp_shard=2,tp=2), but not on this machine alone\n" in out
    assert _names(folder) == before


def _job(*words):
    return resolve_job(load_config("debug", ["--validation.no_enable", *words]))


def test_folders_of_others(folder):
    OWN.mkdir(parents=True)
    with only_run(OWN), pytest.raises(CheckpointError, match="another run saves to"):
        check_run(_job(), HOST_CPU)
    (OWN / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="holds no checkpoint of a run, but other files"):
        check_run(_job(), HOST_CPU)


def test_a_checkpoint_that_cannot_be_resumed_from(titan, folder, monkeypatch):
    assert titan("seed", "debug", OWN / "step-5")[0] == 0
    with pytest.raises(CheckpointError, match="holds only weights, so a run cannot resume"):
        check_run(_job(), HOST_CPU)
    weights_only = ("--checkpoint.exclude_from_loading", "optimizer,lr_scheduler,dataloader,train_state")
    with pytest.raises(CheckpointError, match="has another model than the config"):
        check_run(_job(*weights_only, "--model.flavor", "debugmodel"), HOST_CPU)
    assert check_run(_job(*weights_only), HOST_CPU).resumes_from == locate(OWN / "step-5")
    with pytest.raises(CheckpointError, match="weights in float32, and the run keeps them in bfloat16"):
        check_run(_job(*weights_only, "--training.dtype", "bfloat16"), HOST_CPU)

    recorded = Recorded(locate(OWN / "step-5"), {BATCH: 12}, is_partial=False)
    monkeypatch.setattr(inputs, "first_recorded", lambda *_, **__: recorded)
    free = (*weights_only, "--training.global_batch_size", "-1")
    with pytest.raises(ConfigError, match="the run had 12 samples per step up to step-5"):
        check_run(_job(*free), HOST_CPU)
    kept = check_run(_job(*free, "--training.local_batch_size", "2"), HOST_CPU)
    assert kept.job.samples_per_step == 12
    assert "step         12 samples of 256 tokens: 3,072 tokens, in 3 passes" in header_lines(kept, device="the CPU")


def test_a_damaged_step_is_left_to_loading_which_takes_the_one_before(titan):
    assert titan("seed", "debug", OWN / "step-5")[0] == 0
    metadata = OWN / "step-5" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[::-1])  # of the same size
    assert check_run(_job(), HOST_CPU).resumes_from is None
    metadata.write_bytes(b"")
    with pytest.raises(CheckpointError, match="can be used:\n  step-5: .*changed or damaged"):
        check_run(_job(), HOST_CPU)


def test_another_order_of_the_data(titan, monkeypatch):
    assert titan("seed", "debug", OWN / "step-5")[0] == 0
    monkeypatch.setattr(inputs, "refuse_unfit_step", lambda *_, **__: None)  # as if it had all sections
    source = open_dataset("tokens", "data", vocab_size=2048)
    samples = SourceSamples(source, TRAIN, seq_len=256, seed=42)
    state = {"version": 1, "fingerprint": samples.fingerprint_of(samples.cut), "seed": 42, "consumed_samples": 8}
    monkeypatch.setattr(inputs, "read_data_position", lambda path: state)
    assert check_run(_job(), HOST_CPU).resumes_from == locate(OWN / "step-5")
    for words, message in {
        ("--debug.seed", "7"): "begun with seed 42",
        ("--training.seq_len", "128"): "seq_len 256",
    }.items():
        with pytest.raises(DataError, match=message):
            check_run(_job(*words), HOST_CPU)


def test_an_export_folder_with_files_of_others(folder):
    (folder / "outputs/debug/export-hf").mkdir(parents=True)
    (folder / "outputs/debug/export-hf/notes.txt").touch()
    with pytest.raises(CheckpointError, match="export-hf: exists already"):
        check_run(_job("--checkpoint.last_save_in_hf"), HOST_CPU)


def test_more_validation_than_there_is():
    words = (
        "--training.seq_len",
        "32",
        "--validation.seq_len",
        "32",
        "--validation.enable",
        "--validation.dataset_path",
    )
    job = resolve_job(load_config("debug", [*words, "data"]))
    with pytest.raises(ConfigError, match="validation.steps = 16, but the held-out part of data has 5 batches of 8"):
        check_run(job, HOST_CPU)


def test_the_tokenizer_is_read_once_for_all_checks(folder, monkeypatch):
    """One of 128,000 tokens takes a second."""
    reads = []
    monkeypatch.setattr("trainer.next_token.inputs.tokenizer_folder", lambda *_: reads.append(1) or folder / "data")
    monkeypatch.setattr(inputs, "chosen_model", lambda job: reads.append(2) or chosen_model(job))
    check_run(_job("--training.document_mask", "eos", "--checkpoint.last_save_in_hf"), HOST_CPU)
    assert sorted(reads) == [1, 2]


def test_the_first_lines_of_a_run():
    checked = check_run(_job(), HOST_CPU)
    assert header_lines(checked, device="the CPU") == [
        "model        llama3 debug_gqa, 1,311,872 parameters",
        "mesh         8 ranks on the CPU: pp=2,dp_shard=2,tp=2",
        "step         8 samples of 256 tokens: 2,048 tokens",
        "precision    float32",
        "checkpoints  outputs/debug/checkpoint, every 50 steps",
        "metrics      outputs/debug/metrics.jsonl, TensorBoard in outputs/debug/tb",
    ]
    words = (
        "--checkpoint.no_enable",
        "--training.mixed_precision_param",
        "bfloat16",
        "--metrics.no_enable_tensorboard",
    )
    other = header_lines(replace(checked, job=_job(*words)), device="the CPU")
    assert other[3:] == [
        "precision    bfloat16, weights in float32",
        "checkpoints  none: checkpoint.enable is false",
        "metrics      outputs/debug/metrics.jsonl",
    ]


def test_refusals_need_no_torch(folder):
    """And `config check` says what it cannot check without it."""
    (folder / "without" / "torch").mkdir(parents=True)
    (folder / "without" / "torch" / "__init__.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    path = os.pathsep.join((str(folder / "without"), str(ROOT)))
    environment = {k: v for k, v in os.environ.items() if k != "RANK"} | {"PYTHONPATH": path}

    def run(*words):
        command = [sys.executable, "-P", "-m", "titan_tools", *words, "--validation.no_enable"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    done = run("train", "debug", "--checkpoint.initial_load_path", "nowhere")
    assert done.returncode == 2 and "error: nowhere: no such file or folder" in done.stderr
    done = run("config", "check", "debug", "--compile.enable")
    assert (
        done.returncode == 0 and "not checked: this machine's GPUs and compiler: torch is not installed" in done.stderr
    )
