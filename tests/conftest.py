"""Fixtures of many folders: a command line run in this process, and torch on one thread."""

import gc
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import pytest
import typer

from tests.clean_environment import forget_pythonwarnings  # before what reads the environment
from titan_tools import cli

# All commands with their options take 30 ms to build, more than many a command line does, and are the same each time
typer.main.get_command = lru_cache(maxsize=8)(typer.main.get_command)

with suppress(ImportError):  # a machine with a GPU may have only what tests/gpu needs
    from hypothesis import settings

    # The same examples each time, however slow the machine is: a rare one that fails is no fault of the change that is
    # tested. `--hypothesis-profile=default` looks for others.
    settings.register_profile("titan", settings.get_profile("default"), derandomize=True, deadline=None, database=None)
    settings.load_profile("titan")


def pytest_configure(config):
    """Hear Ctrl-C, and let what tests start hear it: a shell has its background jobs ignore it, CI's may be one.

    Warnings are set here, for pytest takes back what a conftest sets while it is imported.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forget_pythonwarnings()


def pytest_collection_finish(session):
    """Exclude what is imported by now from garbage collection: a full one takes 0.5 s otherwise."""
    gc.collect()
    gc.freeze()


TOLD, COUNTED = "message", "counted"


@pytest.fixture(scope="module", autouse=True)
def families_of_this_file():
    """What a file registers is not known to the next one in the same process."""
    from converters.families import registry as families_registry
    from trainer.models import registry as models_registry

    before = [(each._FAMILIES, set(each._FAMILIES)) for each in (families_registry, models_registry)]
    yield
    for families, known in before:
        for name in families.keys() - known:
            del families[name]


@pytest.fixture
def tell(request):
    """`tell(line)`: stands in the summary behind pytest's output, whether or not the test passes, also under xdist."""
    return lambda line: request.node.user_properties.append((TOLD, line))


@pytest.fixture
def count(request):
    """`count(group, outcome)`: a case of a group. How many came to which outcome stands in the summary."""
    return lambda group, outcome: request.node.user_properties.append((COUNTED, (group, outcome)))


def pytest_terminal_summary(terminalreporter):
    """The lines that tests print, and how many cases of each group came to which outcome."""
    reports = [r for each in terminalreporter.stats.values() for r in each if getattr(r, "when", None) == "call"]
    lines = [line for report in reports for name, line in report.user_properties if name == TOLD]
    counts = Counter(tuple(case) for report in reports for name, case in report.user_properties if name == COUNTED)
    lines += [f"{group}: {number:,} {outcome}" for (group, outcome), number in sorted(counts.items())]
    if lines:
        terminalreporter.section("reported by tests")
        for line in lines:
            terminalreporter.line(line)


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def titan(monkeypatch, capsys):
    """Run a command line in this process as `titan` does, not as a rank of a launch. It never prints a traceback."""
    before = dict(os.environ)  # restored afterwards: commands set variables for ranks
    for name in ("RANK", "WORLD_SIZE", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["titan", *map(str, arguments)])
        capsys.readouterr()
        code = cli.run()
        out = capsys.readouterr()
        assert "Traceback (most recent call last)" not in out.err, out.err
        return Done(code, out.out, out.err)

    yield run
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def store(request):
    """The kind of the store that `place` is in: a test that runs in both is parametrized by it, indirectly."""
    return getattr(request, "param", "folder")


@pytest.fixture
def place(store, tmp_path, monkeypatch):
    """A place for checkpoints: a folder, or a location of the pretend store."""
    if store == "folder":
        return tmp_path
    from converters.store.location import Location
    from tests import pretend_store

    monkeypatch.setenv(pretend_store.ROOT, str(tmp_path / "pretend"))
    return Location(f"{pretend_store.SCHEME}://bucket/runs")


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """An HF folder of a tiny Llama for tests that only read it; files that want another have an `hf` of their own."""
    from tests.models.llama import write as write_llama

    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder)
    return folder


@pytest.fixture
def untouched(monkeypatch):
    """Nothing of `titan infer` may get as far as weights or ranks."""
    from titan_tools.infer import loading, run

    monkeypatch.setattr(run, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were read"))


@pytest.fixture(scope="module")
def one_thread():
    """Two threads that wait for each other over tiny matrices are slow where other processes run."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
