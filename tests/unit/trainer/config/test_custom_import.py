"""A user's module that cannot be imported: the reason is reported, whatever the module does."""

import importlib
import json
import sys

import pytest
import torch

from converters.common.errors import ConfigError
from converters.common.extensions import ExtensionError
from trainer.config import custom_import
from trainer.config.custom_import import error_of_import, import_custom, where_to_look


@pytest.fixture(autouse=True)
def nothing_stays_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(custom_import, "_imported", set())
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):  # not what they import, such as torch's
            sys.modules.pop(name)


def import_written(path, text):
    """The module of a file, imported as a user's."""
    path.write_text(text)
    import_custom(str(path))
    return importlib.import_module(path.stem)


def shown(call, *args):
    """What is shown of the error of a call."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011, B017  of whatever kind
        call(*args)
    found = error_of_import(raised.value)
    return found and (found[0].message, found[1])


def test_a_module_that_exits_is_an_error_of_the_module(tmp_path):
    (tmp_path / "that_exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(ExtensionError, match="cannot be imported: SystemExit: 3"):
        import_custom(str(tmp_path / "that_exits.py"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nnothing\n", "NameError: name 'nothing' is not defined ({}:2)"),
        ("import not_there_at_all\n", "ModuleNotFoundError: No module named 'not_there_at_all' ({}:1)"),
        ("x = 1\ndef\n", "SyntaxError: invalid syntax ({}:2)"),
        ("import json\n\njson.loads('x')\n", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({}:3)"),
        (
            "from trainer.api import register_loss\nregister_loss('plain', max)\n",
            "loss 'plain' is built in; choose another name ({}:2)",
        ),
    ],
)
def test_an_error_of_an_import_names_file_and_line(tmp_path, text, said):
    path = tmp_path / "that_fails_now.py"
    with pytest.raises(ExtensionError) as raised:
        import_written(path, text)
    assert raised.value.message.endswith("cannot be imported: " + said.format(path))


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


def test_an_unexpected_error_of_a_module_is_the_module_s(tmp_path):
    path = tmp_path / "that_fails_later.py"
    module = import_written(path, "import json\ndef parameters(args):\n    return json.loads(args)\n")
    message, trace = shown(module.parameters, "x")
    assert message == f"{path}:3: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert f'File "{path}", line 3, in parameters' in trace and "test_custom_import" not in trace
    assert trace.count("File") == 2  # and the line of json that raised it
    assert shown(json.loads, "x") is None
    assert str(tmp_path) in where_to_look() and "or in what" in where_to_look()


def test_without_an_import_an_unexpected_error_is_titan_s():
    assert where_to_look() == "this is a bug in titan; the traceback is above"


def test_a_neighbour_of_the_module_is_the_user_s_and_what_lies_between_is_not(tmp_path, monkeypatch):
    (tmp_path / "its_neighbour.py").write_text("def fail():\n    1 / 0\n")
    installed = tmp_path / "venv" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "of_others.py").write_text("def fail():\n    1 / 0\n")
    monkeypatch.setattr(custom_import, "_NOT_THEIRS", [installed])
    monkeypatch.syspath_prepend(installed)
    module = import_written(tmp_path / "with_neighbours.py", "import its_neighbour, of_others\n")
    assert shown(module.its_neighbour.fail)[0].startswith(f"{tmp_path / 'its_neighbour.py'}:2: ZeroDivisionError")
    assert shown(module.of_others.fail) is None


def test_an_error_that_titan_raised_from_theirs_is_theirs(tmp_path):
    module = import_written(tmp_path / "that_is_wrapped.py", "def fail():\n    raise SystemExit('no more')\n")

    def wrapping():
        try:
            module.fail()
        except SystemExit as error:
            raise RuntimeError("a library's own") from error

    assert shown(wrapping)[0] == f"{tmp_path / 'that_is_wrapped.py'}:2: SystemExit: no more"


def test_what_the_compiler_cannot_trace_is_at_the_user_s_line(tmp_path):
    module = import_written(tmp_path / "not_traceable.py", "def forward(x):\n    print(x.sum().item())\n    return x\n")
    compiled = torch.compile(module.forward, backend="eager", fullgraph=True)
    assert shown(compiled, torch.ones(2))[0].startswith(f"{tmp_path / 'not_traceable.py'}:2: ")


def test_a_call_that_does_not_fit_and_a_missing_attribute_are_at_the_definition(tmp_path):
    path = tmp_path / "with_a_layer.py"
    module = import_written(path, "class Layer:\n    def forward(self, x):\n        return x\n")
    message, trace = shown(lambda: module.Layer().forward(1, 2))
    assert message.startswith(f"{path}:2: TypeError: Layer.forward() takes 2 positional arguments but 3 were given")
    assert "test_custom_import.py" in trace  # no line of theirs to start from
    assert shown(lambda: module.Layer().weight)[0].startswith(f"{path}:1: AttributeError: 'Layer' object has no attr")
    assert shown(lambda: None.weight) is None and shown(lambda: json.loads()) is None
