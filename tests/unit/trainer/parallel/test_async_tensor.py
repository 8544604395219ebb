"""Async tensor parallelism: what it needs, and what it switches on. No GPU has run it here."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from trainer.config.load import load_config
from trainer.parallel.async_tensor import async_tensor_machine_problems, async_tensor_problems, enable_async_tp

ON, TP2 = "--parallelism.enable_async_tensor_parallel", "--parallelism.tensor_parallel_degree=2"
COMPILED = "--compile.enable"


@pytest.mark.parametrize(
    ("words", "tp", "message"),
    [
        ([ON, TP2, COMPILED], 2, []),
        ([TP2], 2, []),
        ([ON, COMPILED], 1, ["tensor_parallel_degree is 1"]),
        ([ON, TP2], 2, ["--compile.enable"]),
        ([ON, TP2, COMPILED, "--compile.components=loss"], 2, ["not compiled"]),
        ([ON, TP2, COMPILED, "--compile.backend=aot_eager"], 2, ["--compile.backend inductor"]),
        ([ON], 1, ["tensor_parallel_degree is 1", "not compiled"]),
    ],
)
def test_what_it_needs_is_reported_at_once(words, tp, message):
    config = load_config("debug", words)
    problems = async_tensor_problems(config.parallelism, config.compile, tp=tp)
    assert len(problems) == len(message)
    assert all(part in problem for part, problem in zip(message, problems, strict=True))


def test_it_needs_gpus():
    config = load_config("debug", [ON, TP2, COMPILED]).parallelism
    (problem,) = async_tensor_machine_problems(config, torch.device("cpu"))
    assert "cpu" in problem
    assert async_tensor_machine_problems(config, torch.device("cuda")) == []
    assert async_tensor_machine_problems(load_config("debug", [TP2]).parallelism, torch.device("cpu")) == []


def test_the_pass_is_switched_on_for_the_group_without_a_warning(monkeypatch):
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory as symmetric

    announced = []

    def announce(name):
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        announced.append(name)

    monkeypatch.setattr(symmetric, "enable_symm_mem_for_group", announce)
    with inductor.patch(_micro_pipeline_tp=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        enable_async_tp(SimpleNamespace(group_name="tp"))
        assert inductor._micro_pipeline_tp and announced == ["tp"]
