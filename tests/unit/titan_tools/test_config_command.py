"""`titan config`: output and exit codes."""

import json
import shutil

import pytest

from tests.torchtitan_release import ROOT, write_first_run, write_tokenizer
from trainer.config.toml_file import read_toml

CONFIGS = ROOT / "tests/unit/trainer/config/configs"

OWN_TEXT = ("--validation.dataset_path", "none", "--model.hf_assets_path", "data")


@pytest.fixture
def titan(titan, tmp_path, monkeypatch):
    """Run in the test's folder."""
    monkeypatch.chdir(tmp_path)
    return titan


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
        ' model.converters = ["quantize.linear.mx"], which is not covered\n'
    )


def test_show_as_json(titan):
    done = titan("config", "show", "debug", "--training.steps=3", "--json")
    shown = json.loads(done.stdout)
    assert shown["config"]["training"]["steps"] == 3
    assert shown["origins"]["training.steps"] == "command line"
    assert shown["origins"]["model.flavor"].startswith("preset debug:")


def test_check_of_a_good_config(titan):
    done = titan("config", "check", "debug")
    assert done.returncode == 0 and "fine on 8 ranks" in done.stdout
    assert done.stderr == "not checked: data is no folder, so no token index (named by a default or a preset)\n"
    assert (
        json.loads(titan("config", "check", "llama3_70b", "--world-size", "256", "--json").stdout)["world_size"] == 256
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["debug", "--training.stepz", "5"], "did you mean `training.steps`?"),
        (["debug", "--world-size", "6"], "but there are 6"),
        (["debug", "--training.seq_len", "255", "--parallelism.tensor_parallel_degree", "3"], "does not divide"),
        (["debug", "--checkpoint.initial_load_in_hf_quantized"], "needs checkpoint.initial_load_in_hf"),
        (["nowhere.toml"], "no such config file"),
        (["--training.steps", "5"], "comes before the overrides"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_check_of_a_bad_config_is_exit_2_and_no_traceback(titan, arguments, message):
    done = titan("config", "check", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "tried"),
    [
        ("train --job.config_file run.toml --training.steps 3", "titan train run.toml --training.steps 3"),
        ("train --job.config-file=run.toml", "titan train run.toml"),
        ("seed --job.config_file run.toml out", "titan seed run.toml out"),
        ("estimate-memory --job.config_file run.toml", "titan estimate-memory run.toml"),
        ("config check --training.steps 5", "titan config check CONFIG --training.steps 5"),
        ("seed debug out --dry-run", "titan train CONFIG --dry-run"),
        ("seed debug --training.steps 5", "titan seed debug OUT --training.steps 5"),
        ("seed debug --training.steps 5 out", "titan seed debug out --training.steps 5"),
        ("seed debug --training.steps=5 out --workers 2", "titan seed debug out --training.steps=5"),
        ("seed --training.steps 5 debug out", "titan seed CONFIG --training.steps 5 debug out"),
        ("config show debug --nproc 4", "titan train CONFIG --nproc"),
    ],
)
def test_a_misplaced_option_names_the_right_command(titan, tmp_path, arguments, tried):
    code, out, err = titan(*arguments.split())
    assert (code, out) == (2, "") and err.splitlines()[-1] == f"try: {tried}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train debug", "seed debug", "seed debug out", "estimate-memory debug"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--training.nonsense 1", "--training.nonsense: no such key; did you mean `training.loss`?"),
        ("--training.steps x", "training.steps = 'x': must be a whole number ≥ 1"),
    ],
)
def test_a_wrong_override_is_named_whatever_else_is_missing(titan, tmp_path, command, words, message):
    code, out, err = titan(*command.split(), *words.split())
    assert (code, out) == (2, "") and err == f"error: command line: {message}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--training.dataset_path", "/nope"], "/nope is no folder, so no token index"),
        (["--job.dump_folder", "/proc/x"], "job.dump_folder = '/proc/x' cannot be written to"),
        (["--model.hf_assets_path", "/nope"], "model.hf_assets_path = '/nope' is not a folder"),
        (["--validation.enable", "--validation.dataset", "text", "--validation.dataset_path", "/nope"], "no tokenizer"),
        (["--validation.enable", "--validation.dataset", "c4_validation"], "c4_validation is text"),
        (["--checkpoint.initial_load_path", "/nope"], "/nope: no such file or folder"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_check_refuses_what_training_refuses(titan, tmp_path, overrides, message):
    """The words of training, which runs the same checks."""
    code, out, err = titan("config", "check", "debug", *overrides)
    assert (code, out) == (2, "") and message in err
    assert list(tmp_path.iterdir()) == []  # a dump folder that was tried is gone again


def test_check_refuses_an_initial_checkpoint_that_training_refuses(titan, tmp_path):
    assert titan("seed", "debug", "seed")[0] == 0
    initial = ("--checkpoint.initial_load_path", "seed")
    assert titan("config", "check", "debug", *initial)[0] == 0
    code, _, err = titan("config", "check", "debug", *initial, "--model.flavor", "debugmodel")
    assert code == 2 and "seed has another model than the config:\n  dim: 128 in the checkpoint" in err
    code, _, err = titan("config", "check", "debug", *initial, "--checkpoint.initial_load_in_hf")
    assert code == 2 and "checkpoint.initial_load_in_hf: seed is dcp with native names" in err


def test_check_lists_what_it_did_not_check(titan, tmp_path):
    (tmp_path / "a.txt").write_text("Some words of a text. " * 5000)
    assert titan("data", "prepare", "a.txt", "--vocab-size", "270", "--held-out", "0.4")[0] == 0
    assert titan("config", "check", "debug")[2] == ""
    code, _, err = titan("config", "check", "debug", "--validation.dataset", "c4_validation", *OWN_TEXT)
    assert code == 0 and err == "not checked: dataset = 'c4_validation' is on the hub, which was not contacted\n"
    assert titan("data", "prepare", "a.txt", "--vocab-size", "270", "--held-out", "0", "--overwrite")[0] == 0
    code, _, err = titan("config", "check", "debug", "--validation.enable")
    assert code == 2 and "no held-out part to validate on" in err and "--validation.no_enable" in err
    code, _, err = titan("config", "check", "qwen3_0.6b", "--training.dataset_path", "a.txt")
    assert code == 2 and "a.txt is no folder" in err


SHIPPED = {
    "llama3": ("debug_model", "8b", "70b", "405b"),
    "llama4": ("debug_model", "17bx16e", "17bx128e"),
    "qwen3": ("0.6b", "1.7b", "32b", "moe_debug"),
    "deepseek_v3": ("debug", "16b", "671b"),
    "gpt_oss": ("debug",),
}
PUBLISHED = {  # numbers of GPUs in torchtitan's documents
    "llama3_8b": (8, 64, 128),
    "llama3_70b": (256,),
    "llama3_405b": (512,),
    "deepseek_v3_671b": (512,),
}


def test_torchtitans_files_are_fine_unchanged(titan, tmp_path):
    """All model files of v0.2.2 but Flux's three, where the tokenizers that they name have been downloaded."""
    write_first_run(tmp_path)
    for family, name in ((family, name) for family, names in SHIPPED.items() for name in names):
        path = CONFIGS / f"{family}_{name}.toml"
        assets = read_toml(path)["model.hf_assets_path"].value
        write_tokenizer(tmp_path / assets)
        for size in (None, *PUBLISHED.get(path.stem, ())):
            code, out, err = titan("config", "check", path, *(("--world-size", str(size)) if size else ()))
            assert code == 0 and f"fine on {size or ''}" in out, err


def test_check_of_torchtitans_debug_config_finds_its_text(titan, tmp_path, monkeypatch):
    monkeypatch.chdir(write_first_run(tmp_path).parent)
    code, out, err = titan("config", "check", "debug_model.toml")
    assert (code, out) == (0, "debug_model.toml: fine on 1 rank (dp_shard=1)\n") and "not checked" not in err
    shutil.rmtree("tests/assets/c4_test")
    code, _, err = titan("config", "check", "debug_model.toml")
    assert code == 2 and "dataset = 'c4_test' needs dataset_path" in err


def test_all_problems_of_a_layout_are_reported_at_once(titan):
    done = titan("config", "check", "debug", "--training.seq_len", "255", "--training.global_batch_size", "9")
    assert "training.seq_len = 255" in done.stderr and "training.global_batch_size = 9" in done.stderr


def test_init_lists_and_writes_presets(titan, tmp_path):
    assert "llama3_405b" in titan("config", "init").stdout
    assert "llama3_405b" in json.loads(titan("config", "init", "--json").stdout)["presets"]
    assert titan("config", "init", "debug").returncode == 0
    refused = titan("config", "check", "debug.toml")  # as training would be: the file names ./data
    assert refused.returncode == 2 and refused.stderr.count("holds") + refused.stderr.count("is no folder") == 1
    assert "try: titan data prepare --out data" in refused.stderr
    assert json.loads(titan("config", "init", "llama3_8b", "my.toml", "--json").stdout)["written"] == "my.toml"
    (tmp_path / "my.toml").write_text("mine")
    again = titan("config", "init", "llama3_8b", "my.toml")
    assert again.returncode == 2 and "exists already" in again.stderr
    assert (tmp_path / "my.toml").read_text() == "mine"
    assert titan("config", "init", "llama3_9b").returncode == 2
    assert titan("config", "init", "multinode_trainer.slurm").returncode == 0  # part of the package
    script = tmp_path / "multinode_trainer.slurm"
    assert script.read_text().startswith("#!") and script.stat().st_mode & 0o100


OLD = "# mine\n[training]\ncompile = true  # faster\nsteps = 3\n"
NEW = "# mine\n[training]\nsteps = 3\n\n[compile]\nenable = true  # faster\n"


def test_upgrade_reports_every_change_and_writes_the_target(titan, tmp_path):
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
    old.chmod(0o640)
    report = json.loads(titan("config", "upgrade", "old.toml", "--in-place", "--json").stdout)
    assert report["written"] == "old.toml" and len(report["changes"]) == 1
    assert old.read_text() == NEW and old.stat().st_mode & 0o777 == 0o640
    assert titan("config", "upgrade", "old.toml", "--check").returncode == 0


def test_upgrade_writes_nothing_if_a_key_has_no_translation(titan, tmp_path):
    (tmp_path / "old.toml").write_text(OLD + "steppes = 4\n")
    done = titan("config", "upgrade", "old.toml", "new.toml")
    assert done.returncode == 2 and "training.steppes: no such key" in done.stderr
    assert not (tmp_path / "new.toml").exists()
    assert titan("config", "upgrade", "nowhere.toml").returncode == 2
    assert titan("config", "upgrade", "old.toml", "new.toml", "--check").returncode == 2
