"""titan estimate-memory from the command line: presets, JSON, verdicts as exit codes, all problems at once."""

import contextlib
import io
import json
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from converters.common.errors import ConfigError
from converters.common.sizes import GIB
from titan_tools.memory import report
from titan_tools.memory.allocator_settings import allocator_of_environment, unmodelled_settings
from titan_tools.memory.command import estimate_from_command_line, find_gpu
from titan_tools.memory.report import _module_rows
from titan_tools.memory.trace.events import PARTS, StepPoint
from titan_tools.memory.verdict import Verdict, assumptions_of
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS, Gpu


def in_a_process(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "titan_tools", "estimate-memory", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run(capsys, preset: str, *overrides: str, world_size=None, gpu=None) -> tuple[int, dict]:
    code = estimate_from_command_line(preset, overrides, world_size=world_size, gpu_text=gpu, as_json=True)
    return code, json.loads(capsys.readouterr().out)


# --- what it says


TINY = [f"--parallelism.{key}" for key in ("data_parallel_shard_degree=2", "tensor_parallel_degree=1")]
TINY += ["--parallelism.pipeline_parallel_degree=1", "--training.mixed_precision_param=bfloat16"]


@pytest.fixture(scope="module")
def tiny() -> dict:
    """What `--json` prints of the debug model in a pipeline of two ranks."""
    words = [*TINY, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"]
    settings = {"world_size": 4, "gpu_text": "h200", "allocator": "expandable", "as_json": True}
    with contextlib.redirect_stdout(io.StringIO()) as err:
        assert estimate_from_command_line("debug", words, **settings) == 0
    return json.loads(err.getvalue())


def test_every_pipeline_rank_is_reported(tiny):
    assert [rank["pp_rank"] for rank in tiny["per_rank"]] == [0, 1]
    for view in ("per_rank", "step1", "steady"):
        for rank in tiny[view]:
            parts = rank["breakdown_gib"]
            assert set(parts) == {*PARTS, "fragmentation", "idle_pools"}
            # each part is rounded to 1e-4 GiB
            assert sum(parts.values()) == pytest.approx(rank["reserved_gib"], abs=1e-3)
            assert sum(parts[part] for part in PARTS) == pytest.approx(rank["allocated_gib"], abs=1e-3)
            assert rank["allocated_gib"] <= rank["active_gib"] <= rank["reserved_gib"]
            low, high = rank["nvidia_smi_gib"]
            assert rank["reserved_gib"] < low < high
    assert tiny["peak"]["reserved_gib"] == max(rank["reserved_gib"] for rank in tiny["per_rank"])
    assert tiny["assumptions"] and tiny["allocator"] == "expandable"


def test_the_verdict_is_that_of_the_gpu(tiny):
    ((name, judged),) = tiny["verdicts"].items()
    assert (name, judged["verdict"], judged["fits"]) == ("h200", "fits", True)
    assert judged["margin_gib"] == pytest.approx(judged["usable_gib"] - judged["needed_gib"][1], abs=0.02)


def test_the_tables_name_the_instant_and_its_parts(capsys):
    settings = {"world_size": 2, "gpu_text": None, "allocator": "classic", "as_json": False}
    assert estimate_from_command_line("debug", TINY, **settings) == 0
    text = capsys.readouterr().out
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True would reserve " in text
    for wanted in ("Peaks per pipeline rank", "optimizer states", "= allocated", "fragmentation", "= reserved"):
        assert wanted in text
    for wanted in ("Activations by module", "layers.0 … layers.", "b200", "Assumptions"):
        assert wanted in text


def test_layers_that_differ_less_than_is_shown_have_one_row():
    by_module = {"": 5, **{f"layers.{layer}": GIB + layer for layer in range(3)}, "layers.3": 2 * GIB, "norm": 2 * GIB}
    rows = [("batch, positions", "0.00", "0.00"), ("layers.0 … layers.2", "1.00", "3.00")]
    assert _module_rows(by_module) == [*rows, ("layers.3", "2.00", "2.00"), ("norm", "2.00", "2.00")]


@pytest.mark.parametrize(("gpu", "code"), [("1.9", 0), ("0.6", 1), ("1.2GiB", 5)])
def test_the_exit_code_is_the_verdict_on_a_gpu(gpu, code, capsys):
    """The debug model reserves less than 0.1 GiB; CUDA's context takes 0.5, and NCCL 0.2 to 1."""
    found_code, found = run(capsys, "debug", *TINY, world_size=2, gpu=gpu)
    ((_, judged),) = found["verdicts"].items()
    wanted = {0: "fits", 1: "does not fit", 5: "too close to call"}
    assert (found_code, judged["verdict"]) == (code, wanted[code]), judged


def test_the_allocator_is_that_of_the_environment(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_of_environment() == "expandable"  # as in training
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert allocator_of_environment() == "classic"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512, expandable_segments:True")
    assert allocator_of_environment() == "expandable"
    assert unmodelled_settings() == ["max_split_size_mb:512"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert not unmodelled_settings()
    assert allocator_of_environment() == "classic"


def test_a_picture_and_a_snapshot_are_written_whole(tmp_path, capsys):
    picture, snapshot = tmp_path / "step.png", tmp_path / "step.pickle"
    settings = {"world_size": 2, "gpu_text": "h200", "as_json": True}
    estimate_from_command_line("debug", TINY, **settings, timeline=picture, snapshot=snapshot)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert set(pickle.loads(snapshot.read_bytes())) >= {"segments", "device_traces"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.pickle", "step.png"]


@pytest.mark.parametrize(
    ("judged", "drawn"),
    [
        ([("only", 80, "does not fit")], "only"),
        ([("large", 180, "fits"), ("small", 80, "too close to call"), ("middle", 140, "fits")], "middle"),
        ([("large", 180, "does not fit"), ("small", 80, "does not fit")], "large"),
    ],
)
def test_the_picture_has_the_line_of_the_smallest_gpu_that_fits(monkeypatch, judged, drawn):
    limits = []
    monkeypatch.setattr(report, "draw_timeline", lambda *args, limit, **more: limits.append(limit))
    verdicts = [Verdict(Gpu(name, gib, 90, 32), verdict, (0.0, 0.0)) for name, gib, verdict in judged]
    job = SimpleNamespace(family=SimpleNamespace(name="llama3"), dims="dp_shard=8")
    rank = SimpleNamespace(pp_rank=0, steady=SimpleNamespace(point=StepPoint(2, "clip")))
    found = SimpleNamespace(fullest_rank=rank, verdicts=verdicts, job=job, fullest=None)
    report.draw(found, Path("step.png"))
    assert limits == [(drawn, {name: gib for name, gib, _ in judged}[drawn] << 30)]


def test_a_gpu_without_float8_is_an_error():
    words = ["--model.converters=quantize.linear.float8"]
    with pytest.raises(ConfigError, match="compute capability 8.9 or higher, and a100-80 has 8.0"):
        estimate_from_command_line("llama3_8b", words, world_size=8, gpu_text="a100-80", as_json=False)


def test_paths_that_cannot_be_written_are_reported_with_all_other_problems(tmp_path):
    with pytest.raises(ConfigError) as caught:
        estimate_from_command_line(
            "debug",
            TINY,
            world_size=2,
            gpu_text="h101",
            as_json=False,
            allocator="greedy",
            timeline=tmp_path,
            snapshot=tmp_path / "missing" / "step.pickle",
        )
    for wanted in ("h101", "is a folder", "missing is not a folder", "--allocator 'greedy' is not one of classic"):
        assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("timeline", "snapshot", "wanted"),
    [
        ("step.foo", None, "must end in .png or .svg or .pdf"),
        ("step", None, "must end in .png or .svg or .pdf"),
        ("step.png", "step.png", "name the same file"),
        (None, "pipe", "is a device or a pipe"),
    ],
)
def test_files_that_cannot_be_written_are_reported_before_the_estimate(tmp_path, timeline, snapshot, wanted):
    os.mkfifo(tmp_path / "pipe")
    settings = {"world_size": 2, "gpu_text": None, "as_json": False}
    paths = {"timeline": timeline and tmp_path / timeline, "snapshot": snapshot and tmp_path / snapshot}
    with pytest.raises(ConfigError, match=wanted):
        estimate_from_command_line("debug", TINY, **settings, **paths)


@pytest.mark.slow
def test_what_libraries_say_at_import_is_not_shown():
    done = in_a_process("debug", "--world-size=2", *TINY, "--model.converters=quantize.linear.float8")
    assert done.returncode == 0
    assert all(line.endswith(" …") for line in done.stderr.splitlines())  # what is done


@pytest.fixture
def examples(titan) -> list[list[str]]:
    lines = [line.strip() for line in titan("estimate-memory", "--help").stdout.splitlines()]
    return [line.split()[2:] for line in lines if line.startswith("titan estimate-memory ")]


@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_help_leads_with_examples_that_run(titan, examples, number, tmp_path, monkeypatch):
    assert len(examples) == 3
    monkeypatch.chdir(tmp_path)
    done = titan("estimate-memory", *examples[number])
    assert done.returncode == 0, done.stderr


# --- refusals


def test_an_open_number_of_ranks_is_the_one_that_config_check_takes(titan):
    words = ("--parallelism.tensor_parallel_degree", "2", "--model.flavor", "debug_gqa", "--training.seq_len", "64")
    code, out, err = titan("estimate-memory", "llama3_1b", *words)
    assert code == 0 and "on 2 ranks" in out
    note, *work = err.splitlines()
    assert note.startswith("estimated for 2 ranks: parallelism.data_parallel_shard_degree = -1 uses all")
    assert work == ["llama3 debug_gqa on 2 ranks: importing torch …", "tracing a training step …"]
    assert "fine on 2 ranks" in titan("config", "check", "llama3_1b", *words)[1]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("a100-80", ["a100-80", "A100-80GB", "NVIDIA A100-SXM4-80GB", "A100 80GB PCIe"]),
        ("h200", ["H200", "NVIDIA H200"]),
        ("rtx4090", ["rtx4090", "4090", "NVIDIA GeForce RTX 4090"]),
        ("a6000", ["a6000", "RTX A6000", "rtx_a6000"]),
        ("mi300x", ["mi300x", "AMD Instinct MI300X"]),
        ("gb300", ["GB300", "gb300"]),
        ("gh200-96", ["gh200"]),
    ],
)
def test_names_of_gpus_as_people_write_them(name, texts):
    assert [find_gpu(text) for text in texts] == [GPUS[name]] * len(texts)


@pytest.mark.parametrize(("text", "types"), [("h100", ("h100-80", "h100-96")), ("A100", ("a100-80", "a100-40"))])
def test_a_name_of_several_gpus_is_refused_with_each(text, types):
    with pytest.raises(ConfigError, match="is the name of several types") as error:
        find_gpu(text)
    assert error.value.tries == tuple(f"--gpu {name}" for name in types)


def test_a_gpu_may_be_given_by_its_memory_and_an_unknown_one_is_refused():
    assert find_gpu("80").usable_gib == 80
    with pytest.raises(ConfigError, match="neither a GPU type nor") as error:
        find_gpu("tpu-v5p")
    assert "total_memory" in error.value.hint and error.value.tries == ("--gpu 47.5",)


def test_every_gpu_is_found_by_its_own_name_and_verdicts_of_amds_say_what_stands_for_them():
    assert [find_gpu(name) for name in GPUS] == [*GPUS.values()]
    lines = assumptions_of(GPUS["mi300x"], "classic", num_communicators=1, uses_cp=False, has_symmetric_memory=False)
    assert any("ROCm's allocator" in line for line in lines)
    lines = assumptions_of(GPUS["h200"], "classic", num_communicators=1, uses_cp=False, has_symmetric_memory=False)
    assert not any("ROCm" in line for line in lines)


def test_all_problems_are_reported_at_once_with_near_choices(titan):
    words = ["--world-size", "100", "--gpu", "h101", "--parallelism.tensor_parallel_degree", "3"]
    code, out, err = titan("estimate-memory", "llama3_70b", *words)
    assert code == 2
    for wanted in ("h101", "types: a100-80", "--world-size 99", "--world-size 102", "possible: 1, 2, 4, 8", "seq_len"):
        assert wanted in err
    assert out == ""


def test_fixed_degrees_name_the_one_world_size_that_fits():
    with pytest.raises(ConfigError) as caught:
        resolve_job(load_config("debug"), world_size=6)
    assert caught.value.tries == ("--world-size 8",)


@pytest.mark.parametrize("gpu", ["tpu", "-5", "0", "nan", "inf", ""])
def test_an_unknown_gpu_is_an_error(gpu):
    with pytest.raises(ConfigError, match="neither a GPU type nor a number"):
        estimate_from_command_line("llama3_8b", [], world_size=8, gpu_text=gpu, as_json=False)


def test_a_refusal_says_what_to_try_and_that_works(titan):
    words = [*TINY, "--world-size", "2", "--debug.no_deterministic", "--debug.deterministic", "true"]
    code, out, err = titan("estimate-memory", "debug", *words, "--gpu", "0.5", "--json")
    assert (code, json.loads(out)["error"]["exit_code"]) == (2, 2)
    error, reason, hint, line = err.splitlines()
    assert error.startswith("error:") and "debug.deterministic" in reason and hint.startswith("hint:")
    tried = shlex.split(line.removeprefix("try: titan "))
    assert tried[:2] == ["estimate-memory", "debug"]
    assert [word for word in tried if "deterministic" in word] == ["--debug.deterministic=false"]
    code, out, _ = titan(*tried)
    assert code in (0, 1, 5)
    err = json.loads(out)
    assert err["verdicts"].keys() == {"0.5 GiB"}
    assert "kernels of h100-80" in err["assumptions"][0]


def test_a_file_that_is_no_config_is_an_error(titan, tmp_path):
    path = tmp_path / "weights.toml"
    path.write_bytes(b"\x80\x04\x95junk")
    for wrong in (path, tmp_path, tmp_path / "missing.toml"):
        code, _, err = titan("estimate-memory", wrong, "--world-size", "8")
        assert code == 2, wrong
        assert err.startswith("error:")


@pytest.mark.slow
def test_torchs_remarks_on_a_step_are_left_out(titan, caplog):
    """Float8's gathered weights make DTensor say, under TP, that two messages could be one."""
    float8 = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    asked = [f"--quantize.linear.float8.{name}" for name in float8]
    layout = ["--world-size", "4", "--parallelism.tensor_parallel_degree=2"]
    model = ["--model.flavor=debug_gqa", "--training.seq_len=64", "--compile.enable=false"]
    code, _, err = titan("estimate-memory", "llama3_8b_float8", *layout, *model, *asked)
    assert (code, err, caplog.records) == (0, "", [])
