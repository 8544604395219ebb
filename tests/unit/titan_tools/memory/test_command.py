"""titan estimate-memory from the command line: presets, JSON, verdicts as exit codes, all problems at once."""

import contextlib
import io
import json
import os
import pickle
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from converters.common.errors import ConfigError
from converters.common.sizes import GIB
from converters.families import registry
from converters.families.llama3 import LLAMA3
from titan_tools.memory import estimate as estimate_module
from titan_tools.memory import report
from titan_tools.memory.allocator_settings import allocator_of_environment, unmodelled_settings
from titan_tools.memory.command import estimate_from_command_line, find_gpu
from titan_tools.memory.constants import PARTS
from titan_tools.memory.formula.activations import activations_of
from titan_tools.memory.formula.closed_form import instants, peak_instant
from titan_tools.memory.formula.coverage import formula_gaps
from titan_tools.memory.formula.rank import Instant
from titan_tools.memory.formula.run_shape import run_shape
from titan_tools.memory.report import _module_rows
from titan_tools.memory.suggestions import changes
from titan_tools.memory.verdict import Verdict, assumptions_of
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.loss import registry as loss_registry
from trainer.models import registry as models
from trainer.ranks.gpus import GPUS, Gpu


def in_a_process(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "titan_tools", "estimate-memory", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def formula_of(preset: str, *overrides: str, world_size: int | None = None) -> Instant:
    """The closed form's peak, of the rank where it is highest."""
    shape = run_shape(resolve_job(load_config(preset, overrides), world_size=world_size))
    ranks = (peak_instant(shape, pp_rank=rank, gpu=GPUS["h100-80"]) for rank in range(shape.mesh.pp))
    return max(ranks, key=lambda instant: instant.total_bytes)


def peak_bytes(preset: str, *overrides: str, world_size: int | None = None) -> int:
    return formula_of(preset, *overrides, world_size=world_size).total_bytes


def gaps_of_formula(preset: str, *overrides: str) -> str:
    config = load_config(preset, overrides)
    return "\n".join(formula_gaps(resolve_job(config, world_size=8)))


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


@pytest.fixture
def estimated_once(monkeypatch):
    """An estimate that is shown in two ways is made once."""
    own, made = estimate_module.estimate, []

    def estimate(*args, **kwargs):
        made[:] = made or [own(*args, **kwargs)]
        return made[0]

    monkeypatch.setattr(estimate_module, "estimate", estimate)


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
    assert estimate_from_command_line("debug", TINY, world_size=2, gpu_text=None, as_json=False) == 0
    text = capsys.readouterr().out
    for wanted in ("Peaks per pipeline rank", "optimizer states", "= allocated", "fragmentation", "= reserved"):
        assert wanted in text
    for wanted in ("Activations by module", "layers.0 … layers.", "b200", "The two engines", "Assumptions"):
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


def test_disagreeing_engines_are_reported(capsys, monkeypatch, estimated_once):
    own = estimate_module.peak_instant

    def off(*args, **kwargs):
        instant = own(*args, **kwargs)
        return replace(instant, parts=instant.parts | {"optimizer": instant.parts["optimizer"] * 3})

    monkeypatch.setattr(estimate_module, "peak_instant", off)
    _, found = run(capsys, "debug", *TINY, world_size=2)
    assert found["closed_form"]["agrees"] is False and found["closed_form"]["differs_by"][0] > 0.02
    estimate_from_command_line("debug", TINY, world_size=2, gpu_text=None, as_json=False)
    assert "WARNING" in (text := capsys.readouterr().out) and "most of it in optimizer states" in text


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
    found = SimpleNamespace(fullest_rank=SimpleNamespace(pp_rank=0), verdicts=verdicts, job=job, fullest=None)
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


# --- properties


@pytest.mark.parametrize("preset", ["llama3_1b", "llama3_8b", "llama3_70b"])
def test_more_ranks_never_raise_what_a_rank_holds(preset):
    def held(**degrees):
        words = [f"--parallelism.{key}={value}" for key, value in degrees.items()]
        return formula_of(preset, *words, world_size=64).parts["parameters"]

    by_tp = [held(tensor_parallel_degree=tp, data_parallel_replicate_degree=32 // tp) for tp in (1, 2, 4, 8)]
    assert by_tp == sorted(by_tp, reverse=True)
    by_shard = [held(tensor_parallel_degree=1, data_parallel_replicate_degree=64 // n) for n in (2, 4, 16, 64)]
    assert by_shard == sorted(by_shard, reverse=True)


def test_doubling_the_batch_doubles_activations():
    one, two = (
        activations_of(
            run_shape(resolve_job(load_config("llama3_8b", [f"--training.local_batch_size={n}"]), world_size=8))
        )
        for n in (1, 2)
    )
    assert [2 * size for size in one.kept] == list(two.kept)
    assert (2 * one.hidden, 2 * one.final_norm) == (two.hidden, two.final_norm)


@pytest.mark.parametrize("tp", [1, 8])
def test_checkpointing_more_never_costs_memory(tp):
    modes = ("none", "selective --activation_checkpoint.selective_ac_option=op", "full")
    kept = [
        sum(
            activations_of(
                run_shape(
                    resolve_job(
                        load_config(
                            "llama3_8b",
                            f"--parallelism.tensor_parallel_degree={tp} --activation_checkpoint.mode {mode}".split(),
                        ),
                        world_size=64,
                    )
                )
            ).kept
        )
        for mode in modes
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def test_selective_by_number_is_between_none_and_full():
    none, every_4th, every_2nd, full = (
        peak_bytes("llama3_8b", *words, world_size=8)
        for words in (
            ["--activation_checkpoint.mode=none"],
            ["--activation_checkpoint.selective_ac_option=4"],
            ["--activation_checkpoint.selective_ac_option=2"],
            ["--activation_checkpoint.mode=full"],
        )
    )
    assert none > every_4th > every_2nd > full


def test_accumulation_adds_the_gradients_of_earlier_passes():
    once = peak_bytes("llama3_8b", "--training.local_batch_size=1", world_size=8)
    twice = peak_bytes("llama3_8b", "--training.local_batch_size=1", "--training.global_batch_size=16", world_size=8)
    shards = 8_030_261_248 * 4 / 8
    assert (twice - once) == pytest.approx(shards, rel=0.001)


@pytest.mark.parametrize("keeps_buffers", [True, False])
def test_a_first_stage_keeps_as_many_microbatches_as_stages_follow(keeps_buffers):
    def kept(schedule):
        words = f"""--parallelism.pipeline_parallel_degree=4 --parallelism.pipeline_parallel_schedule={schedule}
            --training.local_batch_size=16 --activation_checkpoint.mode=full --parallelism.tensor_parallel_degree=1"""
        shape = run_shape(resolve_job(load_config("llama3_8b", words.split()), world_size=32))
        shape = replace(shape, keeps_buffers=keeps_buffers)
        return [
            max(i.parts.get("activations", 0) for i in instants(shape, pp_rank=rank, gpu=GPUS["h200"]))
            for rank in range(3)
        ]

    # 8, 9 and 8 layers, each keeping its input; the first block's is the receive buffer, the stage's output is kept too
    per_microbatch = [8 + 1, 9, 8]
    one_input, rotary = 8192 * 4096 * 2, 8192 * 128 * 4
    kept_by_one = [one_input * each + rotary for each in per_microbatch]
    # from torch 2.15 on the output is freed once it is sent, which 1F1B waits for after the next forward
    sent = (0, 0, 0) if keeps_buffers else (2, 1, 0)
    expected = [n * each - m * one_input for n, each, m in zip((4, 3, 2), kept_by_one, sent, strict=True)]
    assert kept("1F1B") == expected
    assert kept("GPipe") == [16 * each for each in kept_by_one]


def test_a_larger_validation_batch_counts():
    small = peak_bytes("llama3_8b", world_size=8)
    words = ["--validation.enable", "--validation.local_batch_size=32", "--validation.seq_len=8192"]
    found = formula_of("llama3_8b", *words, "--training.loss=plain", world_size=8)
    assert found.when == "validation"
    assert found.total_bytes > small
    # bf16 logits, their fp32 cast and log_softmax's result
    assert found.parts["logits_and_loss"] == 32 * 8192 * 128256 * 10
    assert formula_of("llama3_8b", *words, world_size=8).total_bytes == small  # in chunks of the same size


def test_pieces_take_less_than_whole_logits():
    def loss_bytes(*words):
        return formula_of("llama3_8b", *words, world_size=8).parts["logits_and_loss"]

    whole, pieces, more = (
        loss_bytes(f"--training.{words}") for words in ("loss=plain", "loss=chunked", "loss_chunks=16")
    )
    assert whole == 8192 * 128256 * 12
    assert pieces < 0.45 * whole
    assert more < pieces


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_loss_in_pieces_does_not_grow_with_the_microbatches_in_flight(schedule):
    def loss_bytes(num_samples, loss):
        words = f"--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule={schedule}".split()
        words += [f"--training.local_batch_size={num_samples}", f"--training.loss={loss}"]
        shape = run_shape(resolve_job(load_config("llama3_8b", words), world_size=8))
        moments = instants(shape, pp_rank=1, gpu=GPUS["h200"])
        return max(moment.parts.get("logits_and_loss", 0) for moment in moments)

    assert loss_bytes(4, "chunked") == loss_bytes(8, "chunked") < loss_bytes(4, "plain")
    grown = loss_bytes(8, "plain") - loss_bytes(4, "plain")
    assert grown == (4 * 8192 * 128256 * 4 if schedule == "GPipe" else 0)


# --- what to change


def test_changes_save_what_the_closed_form_says_of_the_changed_config():
    words = ["--activation_checkpoint.mode=none", "--training.local_batch_size=2", "--training.loss=plain"]
    config = load_config("llama3_8b", words)
    found = changes(resolve_job(config, world_size=16), GPUS["h200"])
    saved = [change.saved_bytes for change in found]
    assert saved == sorted(saved, reverse=True) and len(found) >= 3
    assert any("activation_checkpoint.mode=full" in change.words for change in found)
    now = peak_bytes("llama3_8b", *words, world_size=16)
    for change in found:
        assert peak_bytes("llama3_8b", *words, *change.words.split(), world_size=16) == now - change.saved_bytes
        assert change.saved_bytes > 0.02 * now


def test_changes_of_a_run_whose_config_names_its_ranks_need_no_number_of_them():
    words = ["--parallelism.data_parallel_replicate_degree=2", "--training.global_batch_size=-1"]
    config = load_config("debug", words)
    found = changes(resolve_job(config), GPUS["h200"])
    assert any("shard_degree" in change.words for change in found)
    for change in found:
        resolve_job(load_config("debug", [*words, *change.words.split()]))


def test_a_lean_run_gets_no_suggestions():
    words = ["--activation_checkpoint.mode=full", "--parallelism.fsdp_reshard_after_forward=always"]
    config = load_config("llama3_8b", [*words, "--optimizer.state_dtype=bfloat16"])
    found = changes(resolve_job(config, world_size=8), GPUS["h200"])
    assert not any("activation_checkpoint" in change.words or "reshard" in change.words for change in found)


# --- refusals


def test_an_open_number_of_ranks_is_the_one_that_config_check_takes(titan):
    words = ("--parallelism.tensor_parallel_degree", "2", "--model.flavor", "debug_gqa", "--training.seq_len", "64")
    code, out, err = titan("estimate-memory", "llama3_1b", *words)
    assert code == 0 and "on 2 ranks" in out
    note, *work = err.splitlines()
    assert note.startswith("estimated for 2 ranks: parallelism.data_parallel_shard_degree = -1 uses all")
    assert work == [
        "llama3 debug_gqa on 2 ranks: importing torch …",
        "tracing a training step …",
        "looking for settings that need less memory …",
    ]
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
        run_shape(resolve_job(load_config("debug"), world_size=6))
    assert caught.value.tries == ("--world-size 8",)


@pytest.mark.parametrize("gpu", ["tpu", "-5", "0", "nan", "inf", ""])
def test_an_unknown_gpu_is_an_error(gpu):
    with pytest.raises(ConfigError, match="neither a GPU type nor a number"):
        estimate_from_command_line("llama3_8b", [], world_size=8, gpu_text=gpu, as_json=False)


def test_the_closed_form_says_nothing_of_another_family(monkeypatch):
    monkeypatch.setitem(registry._FAMILIES, "cousin", replace(LLAMA3, name="cousin"))
    monkeypatch.setitem(models._FAMILIES, "cousin", models._FAMILIES["llama3"])
    assert "cousin" in gaps_of_formula("llama3_8b", "--model.name=cousin")


def test_the_closed_form_says_nothing_of_a_larger_validation_in_fp32():
    assert "larger validation" in gaps_of_formula("debug", "--validation.seq_len=512")
    assert "validation" not in gaps_of_formula("debug")
    assert "validation" not in gaps_of_formula("debug", "--validation.seq_len=512", TINY[-1])


def test_the_closed_form_says_nothing_of_a_loss_of_ones_own(monkeypatch):
    monkeypatch.setattr(loss_registry, "_REGISTERED", {})
    loss_registry.register_loss("mine", lambda logits_BLV, targets_BL: logits_BLV.sum())
    assert "training.loss = 'mine': " in gaps_of_formula("llama3_8b", "--training.loss=mine")


def test_gaps_of_the_closed_form_are_reported_with_the_trace(capsys, estimated_once, monkeypatch):
    monkeypatch.setattr(estimate_module, "formula_gaps", lambda job: ["training.loss: of one's own"])
    _, found = run(capsys, "debug", *TINY, world_size=2)
    assert found["peak"]["allocated_gib"] > 0
    assert found["closed_form"]["agrees"] is None and found["closed_form"]["gaps"] == ["training.loss: of one's own"]
    estimate_from_command_line("debug", TINY, world_size=2, gpu_text=None, as_json=False)
    assert "trace only; the closed form does not describe training.loss: of one's own" in capsys.readouterr().out


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
