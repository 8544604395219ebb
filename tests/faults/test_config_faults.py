"""Faults F1 to F6: what is wrong with a config is reported at once, with its place and a remedy, before any rank."""

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from converters.common.errors import ConfigError
from converters.families.registry import get_family
from tests.dist.processes import ranks
from trainer.config.load import load_config, origins
from trainer.job.job import resolve_job

ROOT = Path(__file__).resolve().parents[2]


# --- F1: unknown keys and flags


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--parallelism.tensor_paralel_degree=2",), "did you mean `parallelism.tensor_parallel_degree`?"),
        (("--stepz", "5"), "did you mean `training.steps`?"),
        (("--training.tensor_parallel_degree", "2"), "is called `parallelism.tensor_parallel_degree` now"),
        (("--jsn",), "has no option --jsn; did you mean --json?"),
        (("--world_size", "8"), "has no option --world_size; did you mean --world-size?"),
        (("--checkpiont.interval", "5"), "did you mean `checkpoint.interval`?"),
        (("--quantize.linear.float8.filter_fqn", "output"), "did you mean `quantize.linear.float8.filter_fqns`?"),
    ],
)
@pytest.mark.parametrize("command", [("train", "debug"), ("config", "check", "debug")], ids=" ".join)
def test_f1_an_unknown_key_is_reported_with_the_nearest_one(titan, command, words, output):
    done = titan(*command, *words)
    assert (done.returncode, done.stdout) == (2, "") and output in done.stderr, done.stderr


def test_f1_before_torch_is_imported():
    code = (
        "import sys; sys.argv = ['titan', 'train', 'debug', '--stepz', '5']\n"
        "from titan_tools.cli import run\nassert run() == 2\nassert 'torch' not in sys.modules"
    )
    secs = []
    for _ in range(3):  # of one core: others use this machine too
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        secs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    assert min(secs) < 1


# --- F2: wrong types, ranges, choices


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("optimizer.lr", "abc", "a number ≥ 0"),
        ("optimizer.lr", "-1", "a number ≥ 0"),
        ("optimizer.lr", "nan", "a number ≥ 0"),
        ("optimizer.lr", "inf", "a number ≥ 0"),
        ("training.steps", "-5", "a whole number ≥ 1"),
        ("training.steps", "1.5", "a whole number ≥ 1"),
        ("training.seq_len", "0", "a whole number ≥ 1 and ≤ 134,217,728"),
        ("training.local_batch_size", "0", "a whole number ≥ 1"),
        ("training.dtype", "float16", "one of float32, bfloat16"),
        ("lr_scheduler.decay_type", "linaer", "one of linear, sqrt, cosine"),
        ("lr_scheduler.decay_ratio", "1.5", "a number ≥ 0 and ≤ 1"),
        ("optimizer.beta1", "1", "a number ≥ 0 and < 1"),
        ("checkpoint.keep_latest_k", "1", "a whole number ≥ 0, not 1"),
        ("checkpoint.interval", "0", "a whole number ≥ 1"),
        ("checkpoint.enable", "maybe", "true or false"),
        ("checkpoint.async_mode", "thread", "one of disabled, async, async_with_pinned_mem"),
        ("parallelism.data_parallel_shard_degree", "0", "a whole number ≥ 1, or -1"),
        ("parallelism.tensor_parallel_degree", "-1", "a whole number ≥ 1"),
        ("activation_checkpoint.memory_budget", "2", "a number ≥ 0 and ≤ 1"),
        ("compile.components", "model,los", "a list, each item one of model, loss"),
        ("quantize.linear.float8.recipe_name", "colwise", "one of tensorwise, rowwise, rowwise_with_gw_hp"),
        ("debug.seed", "-1", "a whole number ≥ 0 and ≤ 9,223,372,036,854,775,807"),
    ],
)
def test_f2_a_wrong_value_is_reported_with_its_place_and_what_may_be(tmp_path, key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        load_config("debug", [f"--{key}={value}"])
    assert caught.value.message.startswith(f"command line: {key} = ")
    assert caught.value.message.endswith(f"must be {allowed}")
    section, _, name = key.rpartition(".")
    path = tmp_path / "run.toml"
    path.write_text(f"# a comment\n[{section}]\n{name} = {_as_toml(value)}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message.startswith(f"{path}:3: {key} = ")


def _as_toml(value: str) -> str:
    is_number = value.lstrip("-").replace(".", "").isdigit() or value in ("nan", "inf")
    return value if is_number else f'"{value}"'


# --- F3: layouts. (world size, what is changed, words of every problem that must be reported)

_PP2 = {"pp": 2}
_UNKNOWN = '[["tok_embeddings","layers.0"],["layers.9","norm","output"]]'
_SWAPPED = '[["tok_embeddings","layers.1","layers.0"],["layers.2","layers.3","norm","output"]]'
LAYOUTS: list[tuple[int, dict, tuple[str, ...]]] = [
    # the product of the degrees is not the number of ranks
    (6, {"fsdp": 4}, ("needs 4 ranks", "there are 6")),
    (8, {"fsdp": 3}, ("needs 3 ranks", "there are 8", "data_parallel_shard_degree = 8 would fit")),
    (8, {"fsdp": 2, "tp": 2, "pp": 4}, ("needs 16 ranks", "data_parallel_shard_degree = 1 would fit")),
    (3, {"tp": 2, "fsdp": -1}, ("multiply to 2", "2, 4")),
    (10, {"tp": 4, "fsdp": -1}, ("multiply to 4", "8, 12")),
    (1, {"pp": 2, "fsdp": -1}, ("multiply to 2", "2")),
    (12, {"rep": 5, "fsdp": -1}, ("multiply to 5", "10, 15")),
    (4, {"rep": 2, "fsdp": 2, "cp": 2}, ("needs 8 ranks", "dp_replicate 2 × dp_shard 2 × cp 2")),
    # heads, key/value heads, feed-forward, vocabulary over tp
    (3, {"tp": 3, "seq": 63}, ("8 attention heads", "4 key/value heads", "2,048 vocabulary", "possible: 1, 2, 4")),
    (8, {"tp": 8}, ("does not divide 4 key/value heads; possible: 1, 2, 4",)),
    (16, {"tp": 16}, ("8 attention heads, 4 key/value heads; possible: 1, 2, 4",)),
    (5, {"tp": 5, "seq": 65}, ("384 feed-forward columns",)),
    (3, {"tp": 3}, ("attention heads", "seq_len = 64 is not a multiple of 3 (tp); nearest: 63 or 66")),
    (32, {"tp": 32, "flavor": "70B"}, ("does not divide 8 key/value heads; possible: 1, 2, 4, 8",)),
    # sequences over tp and twice cp
    (2, {"tp": 2, "seq": 63}, ("seq_len = 63 is not a multiple of 2 (tp); nearest: 62 or 64",)),
    (2, {"cp": 2, "seq": 66}, ("not a multiple of 4 (tp × 2·cp); nearest: 64 or 68",)),
    (4, {"cp": 2, "tp": 2, "seq": 60}, ("not a multiple of 8 (tp × 2·cp); nearest: 56 or 64",)),
    (8, {"cp": 8, "seq": 8}, ("not a multiple of 16 (tp × 2·cp); nearest: 16",)),
    (3, {"cp": 3}, ("not a multiple of 6 (tp × 2·cp); nearest: 60 or 66",)),
    (2, {"tp": 2, "valid_seq": 31}, ("validation.seq_len = 31 is not a multiple of 2 (tp); nearest: 30 or 32",)),
    (4, {"tp": 2, "cp": 2, "seq": 62, "valid_seq": 20}, ("training.seq_len = 62", "validation.seq_len = 20")),
    # batches
    (2, {"global": 12}, ("global_batch_size = 12 is not a multiple of 16", "nearest: 16")),
    (4, {"global": 40}, ("not a multiple of 32", "nearest: 32 or 64")),
    (4, {"rep": 2, "fsdp": 2, "global": 1}, ("global_batch_size = 1 is not a multiple of 32", "nearest: 32")),
    (2, {"cp": 2, "global": 12}, ("not a multiple of 8", "nearest: 8 or 16")),
    # stages
    (8, {"pp": 8}, ("4 layers cannot be split into 8 pipeline stages", "at most 6 stages")),
    (2, _PP2 | {"per_stage": 2}, ("needs 2 stages, the split has 3",)),
    (2, _PP2 | {"schedule": "Interleaved1F1B", "per_stage": 3}, ("Interleaved1F1B", "the split has 2")),
    (4, {"pp": 4, "schedule": "Interleaved1F1B"}, ("4 layers cannot be split into 8 pipeline stages",)),
    (2, _PP2 | {"per_stage": 1}, ("the split has 6",)),
    (2, _PP2 | {"modules": _UNKNOWN}, ("unknown: layers.9", "missing")),
    (2, _PP2 | {"modules": _SWAPPED}, ("not in model order",)),
    # microbatches
    (2, _PP2 | {"micro": 3}, ("= 3 does not divide training.local_batch_size = 8; possible: 1, 2, 4, 8",)),
    (2, _PP2 | {"schedule": "Interleaved1F1B", "batch": 5}, ("Interleaved1F1B", "4 or 6")),
    (2, _PP2 | {"schedule": "Interleaved1F1B", "batch": 7}, ("Interleaved1F1B", "6 or 8")),
    (4, {"pp": 4, "schedule": "ZBVZeroBubble", "per_stage": 1}, ("needs 8 stages", "the split has 6")),
    # several at once, of different kinds
    (16, {"pp": 2, "tp": 8, "seq": 60, "micro": 3}, ("key/value heads", "seq_len = 60", "microbatch_size = 3")),
    (6, {"fsdp": 2, "tp": 2, "seq": 63, "global": 9}, ("needs 4 ranks", "seq_len = 63", "global_batch_size = 9")),
    (7, {"tp": 3, "fsdp": -1, "seq": 64}, ("multiply to 3", "attention heads", "seq_len = 64")),
    (8, {"pp": 8, "batch": 3, "micro": 2, "global": 5}, ("cannot be split into 8", "possible: 1, 3", "multiple of 3")),
]  # fmt: skip

_KEYS = {
    "fsdp": "parallelism.data_parallel_shard_degree",
    "rep": "parallelism.data_parallel_replicate_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "per_stage": "parallelism.pipeline_parallel_layers_per_stage",
    "modules": "parallelism.module_fqns_per_model_part",
    "micro": "parallelism.pipeline_parallel_microbatch_size",
    "batch": "training.local_batch_size",
    "global": "training.global_batch_size",
    "seq": "training.seq_len",
    "valid_seq": "validation.seq_len",
    "flavor": "model.flavor",
}


def words_of(changes: dict) -> list[str]:
    base = {"flavor": "debug_gqa", "seq": 64, "batch": 8, "rep": 1, "tp": 1, "cp": 1, "pp": 1, "fsdp": -1, "micro": 1}
    words = [f"--{_KEYS[name]}={value}" for name, value in (base | changes).items()]
    return [*words, "--validation.enable"] if "valid_seq" in changes else words


def test_f3_the_table_has_forty_layouts():
    assert len(LAYOUTS) >= 40


@pytest.mark.parametrize(
    ("world_size", "changes", "output"), LAYOUTS, ids=[f"{world} {changes}"[:60] for world, changes, _ in LAYOUTS]
)
def test_f3_a_bad_layout_is_reported_with_all_its_problems_and_what_would_do(tmp_path, world_size, changes, output):
    path = tmp_path / "empty.toml"
    path.write_text("")
    config = load_config(path, words_of(changes))
    with pytest.raises(ConfigError) as caught:
        resolve_job(config, world_size)
    text = "\n".join((caught.value.message, caught.value.hint, *caught.value.tries))
    assert [words for words in output if words not in text] == [], text


def test_f3_the_same_layouts_without_the_fault_are_fine(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    gpipe = _PP2 | {"schedule": "GPipe", "batch": 1}
    for changes in ({"fsdp": 2}, {"tp": 4}, {"cp": 2}, _PP2, {"rep": 2, "fsdp": 2}, gpipe):
        config = load_config(path, words_of(changes))
        resolve_job(config, args=get_family("llama3").flavors["debug_gqa"])


# --- F4: files that are no TOML


@pytest.mark.parametrize(
    ("data", "output"),
    [
        (b"[training]\nsteps = = 3\n", ":2:9: "),
        (b"[training]\nsteps = 3\n[training]\n", ":3:"),
        (b"[training\nsteps = 3\n", ":1:10: "),
        (b"training:\n  steps: 3\n", ":1:"),  # YAML
        (b"!!python/object/apply:os.system ['touch canary']\n", ":1:"),
        (b'{"training": {"steps": 3}}', ":1:"),  # JSON
        (b"[training]\nsteps = 3\nx = '\xff'\n", ":3: byte 26 is not UTF-8"),
        ("[training]\nsteps = 3\n".encode("utf-16"), "it looks like UTF-16"),
        (b"\x80\x04\x95cos\nsystem\n", "is not UTF-8"),  # a pickle
        (b"# " + b"x" * (1 << 20), "larger than"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["syntax", "twice", "open header", "yaml", "yaml tag", "json", "latin-1", "utf-16", "pickle", "huge", "deep"],
)
def test_f4_a_broken_file_is_reported_with_line_and_column_and_nothing_runs(titan, monkeypatch, tmp_path, data, output):
    (tmp_path / "run.toml").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    done = titan("train", "run.toml")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert output in done.stderr and "run.toml" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_f4_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    assert load_config(tmp_path / "run.toml").training.steps == 3


# --- F5: several places say something


def test_f5_the_command_line_goes_before_the_file_before_the_default_and_each_is_named(titan, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 7\nseq_len = 64\n")
    done = titan("config", "show", str(path), "--training.steps", "9")
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert lines["training.steps"] == ["9", "command line"]
    assert lines["training.seq_len"] == ["64", f"{path}:3"]
    assert lines["training.local_batch_size"] == ["8", "default"]


def test_f5_the_last_of_two_on_the_command_line_counts_and_the_environment_does_not(tmp_path, monkeypatch):
    for name in ("TRAINING_STEPS", "training.steps", "STEPS", "TITAN_TRAINING_STEPS"):
        monkeypatch.setenv(name, "11")
    config = load_config("debug", ["--training.steps=8", "--training.steps=9"])
    assert config.training.steps == 9
    assert load_config("debug").training.steps == 100
    assert {s.origin.split(":")[0] for s in origins(config).values()} == {"default", "preset debug", "command line"}


# --- F6: paths

ONE_RANK = [f"--parallelism.{name}_parallel_degree=1" for name in ("tensor", "pipeline")]
ONE_RANK += ["--parallelism.data_parallel_shard_degree=1", "--validation.no_enable"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("nowhere.toml",), "no such config file"),
        (("debgu",), "titan config show debug"),
        (("folder",), "is a folder, not a config file"),
        (("--training.steps", "debug"), "the config comes before the overrides"),
        pytest.param(("debug", "--training.dataset_path", "nowhere"), "nowhere", marks=pytest.mark.slow),
        (("debug", "--job.dump_folder", ""), "a folder, not an empty string"),
        (("debug", "--experimental.custom_import", "./nowhere.py"), "there is no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_f6_a_wrong_path_is_reported_by_the_key_that_names_it(titan, monkeypatch, tmp_path, words, output):
    _make_places(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = titan("train", *words, *(ONE_RANK if words[0] == "debug" else ()))
    assert done.returncode == 2, done.stderr
    told_as_error = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "try: ", "hint: "))]
    assert output in "\n".join(told_as_error) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--training.dataset_path", "nowhere"), "nowhere"),
        (("--training.dataset_path", "file"), "file"),
        (("--training.dataset_path", "folder"), "folder"),
        (("--model.hf_assets_path", "nowhere"), "is not a folder"),
        (("--job.dump_folder", "file/run"), "job.dump_folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_f6_a_rank_tells_a_wrong_path_to_its_launcher(tmp_path, words, output):
    """What the command above prints; a rank that is forked has nothing to import."""
    _make_places(tmp_path)
    config = load_config("debug", [*words, *ONE_RANK])
    with ranks(config, 1, tmp_path, partial(_stand_in, tmp_path)) as running:
        ended = running.wait()[0]
    assert ended.exit_code == 2 and ended.output["traceback"] == "", ended.output
    assert output in "\n".join((ended.output["message"], ended.output["hint"] or "", *ended.output["tries"]))


def _make_places(folder):
    (folder / "folder").mkdir()
    (folder / "folder" / "run.toml").write_text("")
    (folder / "file").write_text("")


def _stand_in(folder, rank):
    os.chdir(folder)
