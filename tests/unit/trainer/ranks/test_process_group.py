"""Which GPU is whose: given by the launcher, checked against what torch sees; and how long a collective may take."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from converters.common.errors import ConfigError
from trainer.config.sections import Comm, Parallelism
from trainer.job.job import resolve
from trainer.ranks import rendezvous
from trainer.ranks.mesh import make_meshes
from trainer.ranks.process_group import Timeouts, join_ranks, own_gpu


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)


def test_torchruns_number_comes_before_slurms(monkeypatch):
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert own_gpu() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_gpu() == torch.device("cuda", 1)


def test_a_slurm_task_that_sees_one_gpu_takes_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")  # as scripts/multinode_trainer.slurm sets it
    assert own_gpu() == torch.device("cuda", 0)
    monkeypatch.setenv("SLURM_LOCALID", "0")  # torchrun in one task: LOCAL_RANK is its own
    with pytest.raises(ConfigError, match="rank 3 .* no GPU: torch sees 1"):
        own_gpu()


@pytest.mark.parametrize(
    ("number", "message"),
    [(None, "not the number of this"), ("-1", "not the number of this"), ("2", "rank 2 .* no GPU: torch sees 2")],
)
def test_a_rank_without_a_gpu_of_its_own_is_reported(monkeypatch, number, message):
    if number is not None:
        monkeypatch.setenv("LOCAL_RANK", number)
    with pytest.raises(ConfigError, match=message):
        own_gpu()


@pytest.mark.parametrize("public", [True, False])
def test_every_group_gets_the_timeout_by_the_call_that_torch_has(monkeypatch, public):
    """torch 2.15 has a public one and warns of the other, which is all that 2.11 to 2.13 have."""
    message = []

    def set_timeout(timeout, group=None):
        message.append((timeout, group))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        meshes = make_meshes(resolve(Parallelism(tensor_parallel_degree=2), 4), "cpu")
        if public:
            monkeypatch.setattr(dist, "set_timeout", set_timeout, raising=False)
        else:
            monkeypatch.delattr(dist, "set_timeout", raising=False)
            monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", set_timeout)
        Timeouts(meshes, Comm(init_timeout_seconds=77))
        assert {timeout for timeout, _ in message} == {timedelta(seconds=77)}
        groups = [group for _, group in message]
        assert None in groups and meshes["tp"].get_group() in groups and meshes["fsdp"].get_group() in groups
    finally:
        dist.destroy_process_group()


def test_setting_the_timeout_warns_of_nothing(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Timeouts(make_meshes(resolve(Parallelism(), 1), "cpu"), Comm()).end_first_step()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("has_cpu_tensors", "expected"),
    [(False, ("nccl", torch.device("cuda", 1))), (True, ("cpu:gloo,cuda:nccl", None))],
)
def test_gloo_is_used_with_nccl_where_gradients_are_on_the_cpu(monkeypatch, has_cpu_tensors, expected):
    message = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **keys: message.append((*args, keys.get("device_id")))
    )
    monkeypatch.setattr(dist, "new_group", lambda **keys: keys["backend"])
    monkeypatch.setattr(rendezvous, "join_store", lambda timeout: (dist.HashStore(), rendezvous.Launched(0, 1)))
    ranks = join_ranks(init_timeout_secs=5, has_cpu_tensors=has_cpu_tensors)
    assert message == [expected]
    assert ranks.device == torch.device("cuda", 1) and ranks.agreement == "gloo"
