"""Faults F1 to F6: what is wrong with a config is reported at once, with its place and a remedy, before any rank."""

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.dist.processes import ranks
from trainer.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]


# --- F1: unknown keys and flags


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--parallelism.tensor_paralel_degree=2",), "did you mean `parallelism.tensor_parallel_degree`?"),
        (("--stepz", "5"), "did you mean `training.steps`?"),
        (("--jsn",), "has no option --jsn; did you mean --json?"),
        (("--world_size", "8"), "has no option --world_size; did you mean --world-size?"),
    ],
)
@pytest.mark.parametrize("command", [("train", "debug"), ("config", "check", "debug")], ids=" ".join)
def test_f1_an_unknown_key_is_reported_with_the_nearest_one(titan, command, words, output):
    done = titan(*command, *words)
    assert (done.returncode, done.stdout) == (2, "") and output in done.stderr, done.stderr


def test_f1_before_torch_is_imported():
    code = (
        "import sys; sys.argv = ['titan', 'train', 'debug', '--stepz', '5']\n"
        "from titan_tools.cli import run\nassert run() == 2\nassert not {'torch', 'numpy'} & {*sys.modules}"
    )
    secs = []
    for _ in range(3):  # of one core: others use this machine too
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        secs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    assert min(secs) < 1


# --- F4: files that are no TOML


def test_f4_a_broken_file_is_reported_with_line_and_column_and_nothing_runs(titan, monkeypatch, tmp_path):
    (tmp_path / "run.toml").write_bytes(b"!!python/object/apply:os.system ['touch canary']\n")  # YAML
    monkeypatch.chdir(tmp_path)
    done = titan("train", "run.toml")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "run.toml:1:" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


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
        (("debug", "--job.dump_folder", "s3://b/run"), "a folder, not an empty string or a URI"),
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
