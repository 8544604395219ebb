"""What training needs at least, and who is refused for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from converters.common.errors import ConfigError
from converters.families.registry import get_family
from trainer.config.sections import Config, Model, Optimizer, Parallelism, Training
from trainer.job import memory_bound
from trainer.job.job import resolve_job
from trainer.ranks import agree

GIB = 1024**3


def job_of(flavor: str = "8B", *, training: dict | None = None, optimizer: dict | None = None, **degrees: int):
    config = Config(
        model=Model(name="llama3", flavor=flavor),
        training=Training(**(training or {})),
        optimizer=Optimizer(**(optimizer or {})),
        parallelism=Parallelism(**{"data_parallel_shard_degree": 1} | degrees),
    )
    return resolve_job(config)


def bytes_of_all(job) -> int:
    return sum(memory_bound.state_bytes(job, range(job.dims.world_size)))


@pytest.mark.parametrize(
    ("training", "optimizer", "per_parameter"),
    [({}, {}, 16), ({"dtype": "bfloat16"}, {}, 8), ({}, {"state_dtype": "bfloat16"}, 12)]
    + [({"dtype": "bfloat16"}, {"state_dtype": "float32"}, 12)],
)
def test_bytes_of_each_parameter(training, optimizer, per_parameter):
    job = job_of(training=training, optimizer=optimizer)
    assert memory_bound.state_bytes(job, [0])[0] == job.num_parameters * per_parameter


def test_ranks_that_share_the_model_hold_it_once_and_replicas_hold_copies():
    whole = bytes_of_all(job_of())
    shared = {"data_parallel_shard_degree": 3, "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}
    norms = 2 * 32 * 4096 * 16 + 4096 * 16  # which tensor parallelism does not share
    assert bytes_of_all(job_of(**shared)) == whole + norms
    assert bytes_of_all(job_of(data_parallel_replicate_degree=4)) == 4 * whole


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline():
    tied = get_family("llama3").flavors["1B"]
    one, two = job_of("1B"), job_of("1B", pipeline_parallel_degree=2)
    assert bytes_of_all(two) - bytes_of_all(one) == tied.vocab_size * tied.dim * 16


def test_a_host_without_the_memory_is_refused(monkeypatch):
    def error(num_gib: int, **degrees: int) -> ConfigError | None:
        monkeypatch.setattr(memory_bound, "available_bytes", lambda: num_gib * GIB)
        return memory_bound.too_large_for_host(job_of(**degrees))

    refused, narrow, copies = error(19), error(60), error(120, data_parallel_replicate_degree=2)
    assert refused.exit_code == 2
    assert refused.message == "training needs at least 119.7 GiB of memory on this machine: 19.0 GiB available"
    assert refused.hint.startswith("weights, gradients and optimizer states of a rank alone")
    assert refused.tries[0].startswith("7 times as many ranks") and refused.tries[-1].startswith("--ignore-memory")
    assert narrow.tries[0] == "--training.dtype bfloat16, which needs at least 59.8 GiB"
    assert "239.3 GiB" in copies.message and "of 2 ranks" in copies.hint
    assert not any("times as many" in line for line in copies.tries)  # each rank holds a whole copy
    assert error(120) is None
    monkeypatch.setattr(memory_bound, "available_bytes", lambda: None)
    assert memory_bound.too_large_for_host(job_of()) is None


def _ranks(monkeypatch, found, *, own: int = 0, device: str = "cpu"):
    """This rank among others, which `found` stands for: (machine, available) of each."""

    def on_each(group, work):
        own_result = work()
        return [own_result if each is None else each for each in found]

    monkeypatch.setattr(agree, "on_each", on_each)
    return SimpleNamespace(device=SimpleNamespace(type=device), agreement=SimpleNamespace(rank=lambda: own))


def test_each_machine_holds_its_own_ranks(monkeypatch):
    """Half of an 8B model is 59.9 GiB: one machine of the two has less, or neither."""
    job = job_of(data_parallel_shard_degree=4)
    left, right = ("left", "", ""), ("right", "", "")
    room = [(left, 60 * GIB), (left, 60 * GIB), (right, 60 * GIB), (right, 60 * GIB)]
    memory_bound.require_on_ranks(job, _ranks(monkeypatch, room))
    with pytest.raises(ConfigError, match=r"59\.8 GiB of memory on right: 50\.0 GiB available"):
        memory_bound.require_on_ranks(job, _ranks(monkeypatch, [*room[:3], (right, 50 * GIB)]))
    unknown = [(machine, None) for machine, _ in room]
    memory_bound.require_on_ranks(job, _ranks(monkeypatch, unknown))


def test_each_gpu_holds_its_own_rank(monkeypatch):
    import torch

    free = 35 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    job = job_of(data_parallel_shard_degree=4)
    memory_bound.require_on_ranks(job, _ranks(monkeypatch, [None], device="cuda", own=1))
    free = 29 * GIB
    with pytest.raises(ConfigError, match=r"29\.9 GiB of memory on the GPU of rank 1: 29\.0 GiB available"):
        memory_bound.require_on_ranks(job, _ranks(monkeypatch, [None], device="cuda", own=1))
    offloaded = replace(job, config=replace(job.config, training=Training(enable_cpu_offload=True)))
    here = ("here", "", "")
    memory_bound.require_on_ranks(offloaded, _ranks(monkeypatch, [(here, 120 * GIB)] * 4, device="cuda"))
