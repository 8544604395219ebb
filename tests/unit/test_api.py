"""The public API: names, torch-free imports, and the examples of every docstring."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from converters.containers.registry import CONTAINERS
from converters.families import registry as families
from converters.formats.registry import FORMATS
from trainer.config import sections
from trainer.data import datasets, kinds
from trainer.loss import registry as losses
from trainer.models import registry as models
from trainer.observability import sinks

ROOT = Path(__file__).resolve().parents[2]
APIS = ("converters.api", "trainer.api", "titan_tools.api")


def documented(api: str) -> list[str]:
    """The functions that the module itself defines."""
    module = importlib.import_module(api)
    return [name for name in module.__all__ if getattr(getattr(module, name), "__module__", "") == api]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, hf):
    """A working directory with the checkpoint and the config that the examples name."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "my-model").symlink_to(hf)
    (folder / "run.toml").write_text('[model]\nname = "llama3"\nflavor = "debug_gqa"\n')
    return folder


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Remove what an example registers."""
    for module, name in (
        (families, "_FAMILIES"),
        (models, "_FAMILIES"),
        (datasets, "_OPENERS"),
        (losses, "_REGISTERED"),
        (sinks, "_REGISTERED"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    before, registered = list(kinds.known_kinds), dict(sections.registered_sections)
    yield
    CONTAINERS.pop("my_files", None)
    FORMATS.pop("my_format", None)
    kinds.known_kinds[:] = before
    sections.registered_sections.clear()
    sections.registered_sections.update(registered)
    sections.kinds.cache_clear()


@pytest.mark.parametrize("api", APIS)
def test_every_function_has_an_example(api):
    module = importlib.import_module(api)
    assert documented(api), api
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    assert [name for name in documented(api) if ">>>" not in getattr(module, name).__doc__] == []


@pytest.mark.parametrize(("api", "name"), [(api, name) for api in APIS for name in documented(api)])
def test_example(api, name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    module = importlib.import_module(api)
    examples = doctest.DocTestFinder().find(getattr(module, name), name, globs=dict(vars(module)))
    runner, output = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), []
    for example in examples:
        runner.run(example, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


def test_imports_of_the_apis_load_no_torch():
    code = f"import sys, {', '.join(APIS)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
