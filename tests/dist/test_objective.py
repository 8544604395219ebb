"""An objective that is no language model's, in a package outside of titan (towers), in every layout that it supports.

It predicts the way from images to noise, by two towers with blocks of two kinds.
"""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from converters.common.errors import UnsupportedError
from converters.model.model_info import ModelInfo
from converters.store.location import locate
from tests.dist import runs
from tests.state_bytes import state_bytes, traced_state_bytes
from titan_tools.infer.model.load import load_model
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import gpu_kernels
from trainer.checkpoints.recorded import read_recorded
from trainer.config import sections
from trainer.config.custom_import import import_custom
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import DEFAULT_GPU

TOWERS = Path(__file__).parent / "towers"
TOML = f"""
[model]
name = "towers"
flavor = "tiny"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[training]
local_batch_size = 2
global_batch_size = 8
steps = 4
mixed_precision_param = "float32"
[images]
noise_power = 0.5
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = 2
keep_latest_k = 0
[validation]
enable = true
local_batch_size = 2
freq = 4
steps = 4
[metrics]
log_freq = 1
[experimental]
custom_import = "{TOWERS}"
"""
REPLICAS, CP = "--parallelism.data_parallel_replicate_degree", "--parallelism.context_parallel_degree"
PP, SCHEDULE = "--parallelism.pipeline_parallel_degree", "--parallelism.pipeline_parallel_schedule"
AC, COMPILE = "--activation_checkpoint.mode", ["--compile.enable", "--compile.backend=aot_eager"]
SELECTIVE, OPTION = f"{AC}=selective", "--activation_checkpoint.selective_ac_option"
LAYOUTS = {  # one rank accumulates four passes, two ranks two
    "fsdp 2": (2, []),
    "replicas 2": (2, [f"{REPLICAS}=2"]),
    "fsdp 2 cp 2, recomputed": (4, [f"{CP}=2", f"{AC}=full"]),
    "compiled, fsdp 2": (2, COMPILE),
    "pp 2": (2, [f"{PP}=2"]),
}
SLOW_LAYOUTS = {
    "hsdp 2x2": (4, [f"{REPLICAS}=2"]),
    "fsdp 2, one pass": (2, ["--training.local_batch_size=4"]),
    "cp 2": (2, [f"{CP}=2"]),
    "fsdp 2, every 2nd block recomputed": (2, [SELECTIVE, f"{OPTION}=2"]),
    "fsdp 2, operations kept": (2, [SELECTIVE, f"{OPTION}=op"]),
    "compiled, replicas 2 cp 2": (4, [*COMPILE, f"{REPLICAS}=2", f"{CP}=2"]),
    "fsdp 2 pp 2, recomputed": (4, [f"{PP}=2", f"{AC}=full"]),
    "cp 2 pp 2": (4, [f"{PP}=2", f"{CP}=2"]),
    "pp 2, two stages of a rank": (2, [f"{PP}=2", f"{SCHEDULE}=Interleaved1F1B"]),
    "compiled, pp 2": (2, [*COMPILE, f"{PP}=2"]),
    "compiled, operations kept": (2, [*COMPILE, SELECTIVE, f"{OPTION}=op"]),
}


@pytest.fixture(scope="module")
def toml(tmp_path_factory):
    path = tmp_path_factory.mktemp("towers") / "towers.toml"
    path.write_text(TOML)
    return path


WRONG = {
    "no state": (
        lambda data: delattr(data.Loader, "state_dict"),
        "the loader of the Data that `open_data` returns has no",
    ),
    "no split": (lambda data: delattr(data.Pictures, "split"), "a batch of the data has no split"),
    "a state of each rank": (
        lambda data: setattr(data.Loader, "state_dict", lambda self: {"place": 100 + self._own.start}),
        "dataloader.place differs between ranks",
    ),
    "one batch for two": (
        lambda data: setattr(data.Pictures, "split", lambda self, size: [self]),
        "a rank's samples of a step are split into 1 batches of 2, not 2",
    ),
}


def run(toml, dump, *words):
    """Case: a run; the error it ends with, if any. The section is forgotten: other runs do not have it."""
    try:
        return runs.run(load_config(toml, [f"--job.dump_folder={dump}", *words]))
    finally:
        forget()


def run_with_wrong_data(toml, dump, name):
    """Case: the same with data that are wrong in one way."""
    try:
        config = load_config(toml, [f"--job.dump_folder={dump}"])
        WRONG[name][0](import_module("towers.data"))
        return runs.run(config)
    finally:
        forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == TOWERS.name]:
        del sys.modules[name]
    sections.registered_sections.clear()
    sections.kinds.cache_clear()


@pytest.fixture
def forgotten():
    """For a test that imports the package in this process."""
    yield
    forget()


def records_of(dump):
    return list(map(json.loads, (dump / "metrics.jsonl").read_text().splitlines()))


@pytest.fixture(scope="module")
def one_rank(pools, toml):
    dump = toml.parent / "one"
    assert pools[1].run(run, toml, dump) == [""]
    return dump


def test_the_loss_falls_and_is_told_in_images(one_rank):
    losses, records = runs.read_losses(one_rank), records_of(one_rank)
    assert losses.keys() == {1, 2, 3, 4} and losses[4] < losses[1] - 1
    assert [r["nimages_seen"] for r in records if "loss" in r] == [8, 16, 24, 32]
    (validation,) = (record for record in records if "validation_loss" in record)
    assert validation.keys() == {"step", "validation_loss"} and 0 < validation["validation_loss"] < losses[1]
    step = records[0]
    assert step["images_per_sec"] == pytest.approx(8 / step["step_secs"]) and step["max_loss"] == step["loss"]
    assert not [name for name in step if "token" in name or name in ("mfu", "tflops_per_rank")]


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
def test_a_layout_has_the_losses_of_one_rank(pools, toml, one_rank, tmp_path, name):
    num_ranks, words = (LAYOUTS | SLOW_LAYOUTS)[name]
    assert set(pools[num_ranks].run(run, toml, tmp_path, *words)) == {""}
    for found, expected in zip(records_of(tmp_path), records_of(one_rank), strict=True):
        assert found.keys() == expected.keys()
        for metric in {"loss", "validation_loss", "grad_norm", "nimages_seen"} & found.keys():
            assert found[metric] == pytest.approx(expected[metric], rel=1e-5), (name, metric)


@pytest.mark.parametrize("words", [[f"{CP}=2"], pytest.param([], marks=pytest.mark.slow)], ids=["cp 2", "fsdp 2"])
def test_a_resumed_run_is_bit_equal(pools, forgotten, toml, tmp_path, words):
    import_custom(str(TOWERS))
    for name, steps in (("whole", 4), ("resumed", 2), ("resumed", 4)):
        keys = [f"--training.steps={steps}", "--lr_scheduler.total_steps=4", *words]
        assert pools[2].run(run, toml, tmp_path / name, *keys) == ["", ""]
    whole, resumed = (tmp_path / name / "checkpoint" / "step-4" for name in ("whole", "resumed"))
    assert [each for each in runs.differences(whole, resumed) if "settings" not in each] == []
    assert runs.read_losses(tmp_path / "resumed") == runs.read_losses(tmp_path / "whole")


def test_its_checkpoint_is_described_by_its_own_numbers(titan, forgotten, one_rank, tmp_path):
    step = one_rank / "checkpoint" / "step-4"
    recorded = read_recorded(locate(str(step)), units_per_sample=1).settings
    assert recorded["training.steps"] == 4 and recorded["validation.steps"] == 4
    text_settings = {"training.seq_len", "training.dataset", "training.dataset_streams", "training.document_mask"}
    assert not recorded.keys() & {*text_settings, "tokenizer"}
    numbers = {"dim": 32, "num_image_blocks": 3, "num_condition_blocks": 2, "num_heads": 4, "hidden": 64}
    with_towers = ("--import", str(TOWERS))
    _, out, _ = titan(*with_towers, "models", "--json")
    (listed,) = (family for family in json.loads(out)["families"] if family["family"] == "towers")
    (flavor,) = listed["flavors"]
    assert "infer" not in listed["commands"] and "train" in listed["commands"]
    assert {key: value for key, value in flavor.items() if key in numbers} == numbers and "tied" not in flavor
    assert titan(*with_towers, "models")[0] == 0
    assert titan(*with_towers, "inspect", step, "--json")[1].count("num_image_blocks") == 1
    described = ", ".join(f"{name} {value}" for name, value in numbers.items())
    for command in (
        ["inspect", step],
        ["verify", step],
        ["convert", "auto", step, tmp_path / "out.pt", "--to", "torch"],
    ):
        code, out, err = titan(*with_towers, *command)
        assert code == 0 and f"towers, {described}" in out + err, out + err
    code, _, err = titan(*with_towers, "infer", step, "--prompt", "x")
    assert code == 2 and "models of family 'towers' learn images, not the next token" in err, err


@pytest.mark.parametrize("wrong", WRONG)
def test_data_that_break_their_protocol_end_the_run(pools, toml, tmp_path, wrong):
    said = pools[2].run(run_with_wrong_data, toml, tmp_path, wrong)
    assert all(WRONG[wrong][1] in text for text in said), said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--parallelism.tensor_parallel_degree=2"], "tensor_parallel_degree = 2 is not supported by what models of"),
        ([f"{PP}=8"], "5 layers cannot be split into 8 pipeline stages"),
        (["--training.seq_len=64"], "training.seq_len = 64 is not read by what models of family towers learn"),
        (["--parallelism.disable_loss_parallel"], "parallelism.disable_loss_parallel = true is not read by what"),
        (["--compile.components=loss"], 'compile.components = ["loss"] is not read by what models of family towers'),
        (["--model.converters=quantize.linear.float8"], 'model.converters = ["quantize.linear.float8"] is not read'),
        (["--images.size=7"], "images.size = 7 is odd; nearest: 6 or 8"),
        ([f"{CP}=3"], "context_parallel_degree = 3 does not divide 16 patches"),
    ],
)
def test_what_the_objective_does_not_support_is_refused(titan, forgotten, toml, words, text):
    code, _, err = titan("config", "check", toml, *words)
    assert code == 2 and text in err, err


def test_it_is_checked_shown_dry_run_and_estimated(titan, forgotten, toml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = titan("config", "show", toml, "--images.size=16")
    assert code == 0 and [line for line in out.splitlines() if line.split()[:2] == ["images.size", "16"]], out + err
    code, out, err = titan("config", "check", toml, "--world-size", "4")
    assert code == 0 and "fine on 4 ranks" in out, out + err

    words = ("--world-size", "4", f"{CP}=2", "--training.local_batch_size=1", "--json")
    code, out, err = titan("train", toml, "--dry-run", *words)
    assert code == 0, err
    report = json.loads(out)
    assert (report["images_per_step"], report["num_accumulated"], report["num_stages"]) == (8, 4, 1)
    assert report["stages"]["0"][:3] == ["patches", "condition", "condition_blocks.0"]
    calls = {(each["axis"], each["kind"]): each["calls"] for each in report["collectives"]}
    num_groups = 2 + 5 + 1  # first units, blocks, and the last ones together
    assert calls["fsdp = all ranks", "reduce-scatter"] == 4 * num_groups
    assert calls["cp", "all-gather"] == 4 * 3  # keys and values of three blocks with attention

    code, out, err = titan("estimate-memory", toml, *words)
    assert code == 0, err
    assert json.loads(out)["mesh"]["cp"] == 2
    job = resolve_job(load_config(toml, [f"{CP}=2", "--training.local_batch_size=1"]), 4)
    trace = capture(job, rank=0, kernels=gpu_kernels(DEFAULT_GPU))
    assert traced_state_bytes(trace, job) == state_bytes(job, 0)
    modules = {block.point.module for block in trace.blocks if block.part == "activations"}
    assert {"condition_blocks.1", "image_blocks.2", "patches"} <= modules
    with pytest.raises(UnsupportedError, match="models of family 'towers' learn images, not the next token"):
        load_model(None, ModelInfo("towers", job.args), dtype=torch.float32, device=torch.device("cpu"))


def test_blocks_may_have_the_name_of_a_decoders_layers(titan, forgotten, toml, tmp_path, monkeypatch):
    shutil.copytree(TOWERS, tmp_path / "towers", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "towers").glob("*.py"):
        file.write_text(
            file.read_text().replace("image_blocks.", "layers.").replace("self.image_blocks", "self.layers")
        )
    renamed = tmp_path / "towers.toml"
    renamed.write_text(toml.read_text().replace(str(TOWERS), str(tmp_path / "towers")))
    reports = []
    for config in (toml, renamed):
        monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(TOWERS.parent)])
        code, out, err = titan("estimate-memory", config, "--world-size", "4", f"{PP}=2", "--json")
        assert code == 0, err
        reports.append(json.loads(out.replace("image_blocks.", "layers.")))
        forget()
    assert reports[0] == reports[1]
