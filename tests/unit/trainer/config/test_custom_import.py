"""A user's module that cannot be imported: the reason is told, whatever the module does."""

import pytest

from converters.errors import ConfigError
from trainer.config.custom_import import import_custom


def test_a_module_that_exits_is_an_error_of_the_config(tmp_path):
    (tmp_path / "that_exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="cannot be imported: SystemExit: 3"):
        import_custom(str(tmp_path / "that_exits.py"))


def test_a_file_of_the_working_folder_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "of_mine_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        import_custom("of_mine_here")
    assert "of_mine_here.py" in raised.value.hint
