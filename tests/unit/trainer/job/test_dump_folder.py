"""The dump folder: what a run writes there before its first step."""

import json
from dataclasses import replace

import pytest

from converters.common.errors import ConfigError
from trainer.config.load import load_config
from trainer.job.dump_folder import make_dump_folder, save_config


def config_with(folder, name):
    return load_config("debug", [f"--job.dump_folder={folder}", f"--job.save_config_file={name}", "--training.steps=7"])


def test_the_merged_config_is_saved_with_its_origins_and_replaced_by_the_next_run(tmp_path):
    for name in ("config.json", "made/config.json"):
        save_config(config_with(tmp_path, name))
        saved = json.loads((tmp_path / name).read_text())
        assert saved["config"]["training"]["steps"] == 7
        assert saved["origins"]["training.steps"] == "command line"
        assert saved["origins"]["optimizer.lr"].startswith("preset debug:")
    config = config_with(tmp_path, "config.json")
    save_config(replace(config, training=replace(config.training, steps=8)))
    assert json.loads((tmp_path / "config.json").read_text())["config"]["training"]["steps"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "made"]


def test_nothing_is_saved_unless_asked(tmp_path):
    save_config(load_config("debug", [f"--job.dump_folder={tmp_path}"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../config.json", "/tmp/config.json"])
def test_it_stays_in_its_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="leads out of"):
        save_config(config_with(tmp_path / "run", name))


def test_a_folder_that_cannot_be_written_to_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_dump_folder(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_config(config_with(tmp_path, "file/config.json"))
