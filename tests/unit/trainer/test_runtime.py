"""Deterministic mode and seeding, and the garbage collector, which runs on all ranks at the same steps."""

import gc
import os

import pytest
import torch
import torch.distributed as dist

from trainer.config.sections import Debug
from trainer.runtime import GarbageCollection, set_determinism


@pytest.fixture
def restored_settings(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with torch.random.fork_rng(devices=[]):
        yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("restored_settings")
@pytest.mark.parametrize("warns", [False, True])
def test_deterministic(warns):
    set_determinism(Debug(deterministic=True, deterministic_warn_only=warns))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("restored_settings")
def test_a_seed_alone_does_not_switch_on_determinism_and_differs_per_rank():
    set_determinism(Debug(seed=5, deterministic_warn_only=True))
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


class Node:
    """One half of a reference cycle."""

    num_alive = 0

    def __init__(self):
        Node.num_alive += 1
        self.other = None

    def __del__(self):
        Node.num_alive -= 1


def make_cycle():
    a, b = Node(), Node()
    a.other, b.other = b, a


def test_it_collects_every_few_steps_and_is_off_between(capsys):
    assert gc.isenabled()
    with GarbageCollection(3, debug=False) as garbage:
        assert not gc.isenabled()
        alive = []
        for step in range(1, 7):
            make_cycle()
            garbage.collect(step)
            alive.append(Node.num_alive)
        assert alive == [2, 4, 0, 2, 4, 0]
    assert gc.isenabled() and capsys.readouterr().err == ""


def test_it_is_on_again_after_an_error():
    with pytest.raises(KeyError), GarbageCollection(3, debug=False):
        raise KeyError
    assert gc.isenabled()


def test_debugging_collects_after_each_step_and_counts(capsys):
    with GarbageCollection(100, debug=True) as garbage:
        garbage.collect(1)
        capsys.readouterr()
        make_cycle()
        garbage.collect(2)
        assert Node.num_alive == 0
        found = capsys.readouterr().err
        garbage.collect(3)
        assert capsys.readouterr().err.startswith("step 3: 0 objects")
    assert found.startswith("step 2: ") and int(found.split()[2]) >= 2
