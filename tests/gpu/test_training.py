"""Training on a GPU: compiled, in float8, offloaded, saved through pinned memory, profiled."""

import json

import pytest
import torch

from tests.gpu.running import read_losses, titan, write_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = ("--training.mixed_precision_param", "bfloat16")
# 64 tokens in chunks of 16: what the matrix units take
FLOAT8 = ("--model.converters", "quantize.linear.float8", "--training.loss_chunks", "4")
ALL_GATHER = (
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
)

VALIDATION = ("--validation.enable", "--validation.dataset", "tokens", "--validation.seq_len", "32")
VALIDATION += ("--validation.freq", "2", "--validation.local_batch_size", "2", "--validation.steps", "2")

CASES = [
    (["--compile.enable"], 1e-4),
    (["--compile.enable", "--training.loss", "plain"], 1e-4),
    (["--compile.enable", "--activation_checkpoint.mode", "selective"], 1e-4),
    (
        ["--compile.enable", "--activation_checkpoint.mode", "selective"]
        + ["--activation_checkpoint.selective_ac_option", "op"],
        1e-4,
    ),
    (["--compile.enable", "--activation_checkpoint.mode", "memory_budget"], 1e-4),
    (["--training.enable_cpu_offload"], 1e-4),
    ([*BF16], 3e-2),
    ([*BF16, "--compile.enable"], 3e-2),
    ([*BF16, "--compile.enable", *FLOAT8], 5e-2),
    ([*BF16, "--compile.enable", *FLOAT8, "--activation_checkpoint.mode", "full"], 5e-2),
    ([*BF16, "--compile.enable", *FLOAT8, "--activation_checkpoint.mode", "selective"], 5e-2),
    ([*BF16, "--compile.enable", *FLOAT8, "--quantize.linear.float8.recipe_name", "rowwise"], 5e-2),
    ([*BF16, "--compile.enable", *FLOAT8, "--quantize.linear.float8.recipe_name", "rowwise_with_gw_hp"], 5e-2),
    ([*BF16, "--compile.enable", *FLOAT8, *ALL_GATHER], 5e-2),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The config, and its losses in fp32 without anything special."""
    folder = tmp_path_factory.mktemp("job")
    config = write_job(folder)
    titan("train", config, "--nproc", 1)
    return config, read_losses(folder / "whole")


def _losses(job, folder, *options):
    titan("train", job[0], "--nproc", 1, "--job.dump_folder", folder, *options)
    return list(read_losses(folder).values())


@pytest.mark.parametrize(
    ("options", "tolerance"),
    CASES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_losses_are_those_of_the_plain_run(job, tmp_path, options, tolerance):
    assert _losses(job, tmp_path / "run", *options) == pytest.approx(list(job[1].values()), abs=tolerance)


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_what_is_saved_in_the_background_is_what_is_saved_in_between(job, tmp_path, mode):
    deterministic = ("--debug.deterministic",)
    _losses(job, tmp_path / "between", *deterministic)
    _losses(job, tmp_path / "background", *deterministic, "--checkpoint.async_mode", mode)
    for step in (1, 2, 3):
        titan("diff", *(tmp_path / name / f"checkpoint/step-{step}" for name in ("between", "background")))  # 0: equal


def test_validation_in_compiled_code_gives_the_loss_of_eager_code(job, tmp_path):
    data = ("--validation.dataset_path", job[0].parent / "data")
    found = []
    for name, options in (("eager", ()), ("compiled", ("--compile.enable",))):
        _losses(job, tmp_path / name, *VALIDATION, *data, *options)
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found.append([record["validation_loss"] for record in records if "validation_loss" in record])
    eager, compiled = found
    assert len(eager) == 2 and compiled == pytest.approx(eager, abs=1e-4)


def test_traces_and_memory_snapshots_are_written(job, tmp_path):
    options = ["enable_profiling", "enable_memory_snapshot", "profile_freq=2", "profiler_warmup=1"]
    _losses(job, tmp_path / "run", *(f"--profiling.{option}" for option in options))
    for name in ("profile_traces", "memory_snapshot"):
        written = [path for path in (tmp_path / "run" / name).rglob("*") if path.is_file()]
        assert written and all(path.stat().st_size > 100 for path in written)
