"""titan config: what a user sees, and the exit codes."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def titan(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "titan_tools", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def test_show_prints_values_with_their_origins(titan, tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nsteps = 7\n[quantize.linear.mx]\nrecipe_name = 'x'\n")
    done = titan("config", "show", "run.toml", "--optimizer.lr", "1e-3", "--checkpoint.enable")
    assert done.returncode == 0
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert lines["training.steps"] == ["7", "run.toml:2"]
    assert lines["optimizer.lr"] == ["0.001", "command", "line"]
    assert lines["checkpoint.enable"] == ["true", "command", "line"]
    assert lines["training.seq_len"] == ["2048", "default"]
    assert (
        done.stderr == "not read: quantize.linear.mx.recipe_name (run.toml:4): read only with"
        ' model.converters = ["quantize.linear.mx"] or its kin, which is not covered\n'
    )


def test_show_as_json(titan):
    done = titan("config", "show", "debug", "--training.steps=3", "--json")
    shown = json.loads(done.stdout)
    assert shown["config"]["training"]["steps"] == 3
    assert shown["origins"]["training.steps"] == "command line"
    assert shown["origins"]["model.flavor"].startswith("preset debug:")


def test_check_of_a_good_config(titan):
    done = titan("config", "check", "debug")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fine on 8 ranks" in done.stdout
    assert (
        json.loads(titan("config", "check", "llama3_70b", "--world-size", "256", "--json").stdout)["world_size"] == 256
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["debug", "--training.stepz", "5"], "did you mean `training.steps`?"),
        (["debug", "--world-size", "6"], "but there are 6"),
        (["debug", "--training.seq_len", "255", "--parallelism.tensor_parallel_degree", "3"], "does not divide"),
        (["debug", "--metrics.enable_wandb"], "not covered yet"),
        (["nowhere.toml"], "no such config file"),
        (["--training.steps", "5"], "comes before the overrides"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_check_of_a_bad_config_is_exit_2_and_no_traceback(titan, arguments, told):
    done = titan("config", "check", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and told in done.stderr and "Traceback" not in done.stderr


def test_all_problems_of_a_layout_are_told_at_once(titan):
    done = titan("config", "check", "debug", "--training.seq_len", "255", "--training.global_batch_size", "9")
    assert "training.seq_len = 255" in done.stderr and "training.global_batch_size = 9" in done.stderr


def test_init_lists_and_writes_presets(titan, tmp_path):
    assert "llama3_405b" in titan("config", "init").stdout
    assert "llama3_405b" in json.loads(titan("config", "init", "--json").stdout)["presets"]
    assert titan("config", "init", "debug").returncode == 0
    assert titan("config", "check", "debug.toml").returncode == 0
    assert json.loads(titan("config", "init", "llama3_8b", "my.toml", "--json").stdout)["written"] == "my.toml"
    (tmp_path / "my.toml").write_text("mine")
    again = titan("config", "init", "llama3_8b", "my.toml")
    assert again.returncode == 2 and "exists already" in again.stderr
    assert (tmp_path / "my.toml").read_text() == "mine"
    assert titan("config", "init", "llama3_9b").returncode == 2


OLD = "# mine\n[training]\ncompile = true  # faster\nsteps = 3\n"
NEW = "# mine\n[training]\nsteps = 3\n\n[compile]\nenable = true  # faster\n"


def test_upgrade_tells_every_change_and_writes_where_it_is_asked_to(titan, tmp_path):
    old = tmp_path / "old.toml"
    old.write_text(OLD)
    shown = titan("config", "upgrade", "old.toml")
    assert (shown.returncode, shown.stdout) == (0, NEW)
    assert "old.toml:3: training.compile is compile.enable now" in shown.stderr
    checked = titan("config", "upgrade", "old.toml", "--check")
    assert (checked.returncode, checked.stdout, old.read_text()) == (1, "", OLD)
    assert titan("config", "upgrade", "old.toml", "new.toml").returncode == 0
    assert (tmp_path / "new.toml").read_text() == NEW and old.read_text() == OLD
    for again in (("old.toml", "new.toml"), ("old.toml", "old.toml")):
        done = titan("config", "upgrade", *again)
        assert done.returncode == 2 and "exists already" in done.stderr
    told = json.loads(titan("config", "upgrade", "old.toml", "--in-place", "--json").stdout)
    assert told["written"] == "old.toml" and len(told["changes"]) == 1
    assert old.read_text() == NEW
    assert titan("config", "upgrade", "old.toml", "--check").returncode == 0


def test_upgrade_writes_nothing_where_something_has_no_translation(titan, tmp_path):
    (tmp_path / "old.toml").write_text(OLD + "steppes = 4\n")
    done = titan("config", "upgrade", "old.toml", "new.toml")
    assert done.returncode == 2 and "training.steppes: no such key" in done.stderr
    assert not (tmp_path / "new.toml").exists()
    assert titan("config", "upgrade", "nowhere.toml").returncode == 2
    assert titan("config", "upgrade", "old.toml", "new.toml", "--check").returncode == 2
