"""Faults of the installation are one message that names the distribution and a command, never a traceback."""

import hashlib
import sys
from base64 import urlsafe_b64encode
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import packaging.requirements  # noqa: F401  before the import path is another
import pytest

from titan_tools import __main__, installation
from titan_tools.installation import Problem, explain, find_foreign_package, note_on_torch

OTHER = "raise SystemExit('a package of somebody else ran')\n"


class Site:
    """A folder of installed distributions, and the only one that titan sees."""

    def __init__(self, folder: Path):
        self.folder = folder

    def install(self, name, version, files=(), requires=(), direct_url=None):
        """`files`: path and text. Written over what is there, as pip does."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        record = []
        for path, text in dict(files).items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            code = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={code},{len(text)}")
        (info / "RECORD").write_text("\n".join(record))
        needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        if direct_url:
            (info / "direct_url.json").write_text(direct_url)


OURS = {f"{package}/{file}": "" for package in ("trainer", "converters") for file in ("__init__.py", "names.py")}
FROM_FOLDER = '{"url": "file:///src/my%20titan", "dir_info": {}}'
REINSTALL = "-m pip install --force-reinstall --no-deps '/src/my titan'"


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    monkeypatch.setattr(installation, "_HOME", folder)
    monkeypatch.setattr(sys, "path", [str(folder)])
    # not what is imported in this process already
    monkeypatch.setattr(installation, "find_spec", lambda name: PathFinder.find_spec(name))
    site = Site(folder)
    site.install("titan-tools", "0.1.0", OURS, direct_url=FROM_FOLDER)
    return site


def test_files_that_another_distribution_overwrote_name_it_and_a_command(site):
    site.install("trainer", "0.0.36", {"trainer/__init__.py": OTHER})
    problem = find_foreign_package()
    assert "trainer/__init__.py is not titan's: the distribution trainer 0.0.36 overwrote it" in problem.message
    assert "-m pip uninstall -y trainer && " in problem.tries[0] and problem.tries[0].endswith(REINSTALL)


def test_any_overwritten_file_explains_an_error(site):
    site.install("My_Converters", "2", {"converters/names.py": OTHER})
    problem = explain(ImportError("no such name"))
    assert "converters/names.py is not titan's: the distribution My_Converters 2 overwrote it" in problem.message


def test_a_package_between_titans_files_that_hides_one_of_them_is_named(site):
    site.install("converters", "1.0", {"converters/__init__.py": "", "converters/names/__init__.py": OTHER})
    problem = explain(ImportError("no such name"))
    assert "names/__init__.py is not titan's: the distribution converters 1.0 installed it, which" in problem.message
    assert problem.message.endswith("converters/names.py") and problem.tries[0].endswith(REINSTALL)


def test_files_that_the_removal_of_another_distribution_took_are_installed_again(site):
    (site.folder / "trainer" / "__init__.py").unlink()
    for problem in (find_foreign_package(), explain(ImportError())):
        assert "trainer/__init__.py does not exist" in problem.message and problem.tries[0].endswith(REINSTALL)


def test_a_distribution_before_an_editable_titan_is_named(site, monkeypatch, tmp_path):
    other = Site(tmp_path / "earlier")
    other.install("trainer", "0.0.36", {"trainer/__init__.py": OTHER})
    monkeypatch.setattr(sys, "path", [str(other.folder), str(site.folder)])
    problem = find_foreign_package()
    assert problem.message.endswith("earlier/trainer/__init__.py, of the distribution trainer 0.0.36")
    assert problem.tries[0].endswith("-m pip uninstall -y trainer")


@pytest.mark.parametrize("file", ["trainer/__init__.py", "trainer.py"])
def test_a_folder_or_file_that_shadows_titan_is_named(site, monkeypatch, tmp_path, file):
    folder = tmp_path / "work"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text(OTHER)
    monkeypatch.setattr(sys, "path", [str(folder), str(site.folder)])
    monkeypatch.setattr(sys, "argv", ["titan", "models", "--json"])
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert find_foreign_package().tries == ("env -u PYTHONPATH titan models --json",)
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(folder)
    problem = find_foreign_package()
    assert str(folder / file) in problem.message and problem.tries[0].endswith("-P -m titan_tools models --json")


def test_an_unfit_dependency_is_named_with_what_is_needed(monkeypatch, tmp_path):
    needs = ["typer>=0.29", "nothing>=1", "pytest>=99; extra == 'test'", "rich"]
    site = Site(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    site.install("titan-tools", "0.1.0", OURS, requires=needs)
    site.install("typer", "0.12.5")
    site.install("rich", "15", requires=["pygments>=2"])
    problem = explain(AttributeError("TyperException"))
    assert problem.message == "titan-tools needs typer>=0.29: 0.12.5 is installed"
    assert problem.tries[0].endswith("-m pip install 'typer>=0.29'")  # what is missing on purpose has no part in it
    problem = explain(ImportError())
    assert "titan-tools needs nothing>=1: not installed; rich needs pygments>=2: not installed" in problem.message
    assert problem.tries[0].endswith("-m pip install 'typer>=0.29' 'nothing>=1' 'pygments>=2'")


def test_a_torch_that_was_not_tested_is_one_line_and_no_traceback(site, monkeypatch, tmp_path):
    assert note_on_torch() == "" and explain(RuntimeError("a bug of titan's")) is None
    tested, later = Site(tmp_path / "tested"), Site(tmp_path / "later")
    tested.install("torch", "2.15.1+cu132")
    later.install("torch", "2.16.0a0+git1")
    monkeypatch.setattr(sys, "path", [str(site.folder), str(tested.folder)])
    assert note_on_torch() == "" and explain(RuntimeError("a bug of titan's")) is None
    monkeypatch.setattr(sys, "path", [str(site.folder), str(later.folder)])
    assert note_on_torch() == "torch 2.16 was not tested with titan; 2.15 was"
    try:
        raise AttributeError("torch has no such thing")
    except AttributeError as error:
        problem = explain(error)
    assert problem.message.startswith(f"AttributeError: torch has no such thing ({__file__}:")
    assert (problem.hint, problem.exit_code) == (note_on_torch(), 3)


def test_the_command_line_prints_the_fault(titan, monkeypatch):
    monkeypatch.setattr(installation, "NEWEST_TESTED_TORCH", (2, 0))
    monkeypatch.setattr("trainer.config.load.load_config", lambda *_, **__: 1 / 0)
    done = titan("train", "debug")
    note, error, hint, tried = done.stderr.splitlines()
    assert note == hint.removeprefix("hint: ") and "was not tested with titan; 2.0 was" in note
    assert error.startswith("error: ZeroDivisionError") and tried.endswith("install 'torch<2.1'")
    assert done.returncode == 3
    monkeypatch.setenv("RANK", "1")  # of somebody else's launcher: rank 0 says it
    assert "not tested" not in titan("train", "debug").stderr.splitlines()[0]


def test_an_error_of_an_imported_module_is_not_put_down_to_torch(titan, monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "NEWEST_TESTED_TORCH", (2, 0))
    (tmp_path / "of_the_user.py").write_text("def load(*_, **__):\n    return 1 / 0\n")
    monkeypatch.setattr("trainer.config.load.load_config", lambda *_, **__: sys.modules["of_the_user"].load())
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = titan("--import", tmp_path / "of_the_user.py", "train", "debug")
    assert "of_the_user.py:2: ZeroDivisionError" in done.stderr and done.returncode == 2
    sys.modules.pop("of_the_user", None)


def test_a_command_line_that_cannot_be_imported_is_explained(monkeypatch, capsys):
    monkeypatch.delattr("titan_tools.cli")
    monkeypatch.setitem(sys.modules, "titan_tools.cli", None)
    monkeypatch.setattr(installation, "explain", lambda error: Problem("too old", tries=("newer",)))
    with pytest.raises(SystemExit) as raised:
        __main__.main()
    assert raised.value.code == 2 and capsys.readouterr().err == "error: too old\ntry: newer\n"


def test_only_titans_own_packages_are_let_through(monkeypatch, tmp_path):
    assert __main__._are_titans("trainer", "converters")
    monkeypatch.setattr(__main__, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "x.py")))
    assert not __main__._are_titans("trainer")
