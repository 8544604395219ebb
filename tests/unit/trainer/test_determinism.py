"""debug.deterministic: torch is reported, with a warning or a refusal for what has no deterministic form."""

import os

import pytest
import torch
import torch.distributed as dist

from trainer.config.sections import Debug
from trainer.runtime import set_determinism


@pytest.fixture(autouse=True)
def left_as_it_was(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with torch.random.fork_rng(devices=[]):
        yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("warns", [False, True])
def test_deterministic(warns):
    set_determinism(Debug(deterministic=True, deterministic_warn_only=warns))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_seed_alone_leaves_torch_free_and_gives_each_rank_numbers_of_its_own():
    set_determinism(Debug(seed=5, deterministic_warn_only=True))
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
