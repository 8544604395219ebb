"""A user's module that cannot be imported: the reason is reported, whatever the module does."""

import pytest

from converters.errors import ConfigError
from trainer.config.custom_import import import_custom, where_to_look


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


def test_a_missing_path_is_said_to_be_relative_to_the_working_folder():
    with pytest.raises(ConfigError) as raised:
        import_custom("not_there_at_all")
    assert "relative to the working folder" in raised.value.hint


def test_an_unexpected_error_of_a_user_s_module_is_not_called_a_bug_of_titan(tmp_path):
    (tmp_path / "that_fails_later.py").write_text("def parameters(args):\n    return args.missing\n")
    import_custom(str(tmp_path / "that_fails_later.py"))
    import that_fails_later  # type: ignore[import-not-found]

    with pytest.raises(AttributeError) as raised:
        that_fails_later.parameters(0)
    assert "that_fails_later.py:2, which is not part of titan" in where_to_look(raised.value)
    assert "a bug in titan" in where_to_look(ValueError())
