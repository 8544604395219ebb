"""Gloo groups have one worker thread: of two, one frees the name that the other writes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from trainer.process_group import use_one_worker


@pytest.fixture
def one_worker(monkeypatch):
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)  # put back afterwards
    use_one_worker()
    use_one_worker()


@pytest.mark.parametrize("interface", [None, "lo", "lo,lo"])
def test_every_group_has_one_worker_and_its_timeout(one_worker, monkeypatch, tmp_path, interface):
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    else:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        other = dist.new_group(backend="gloo", timeout=timedelta(seconds=78))
        for group, secs in ((dist.group.WORLD, 77), (other, 78)):
            options = group._get_backend(torch.device("cpu")).options
            assert (options._threads, options._timeout) == (1, timedelta(seconds=secs))
            assert len(options._devices) == (2 if interface == "lo,lo" else 1)
    finally:
        dist.destroy_process_group()


def test_collectives_whose_names_are_kept_differently_overlap(one_worker, tmp_path):
    """With two workers glibc finds its heap corrupted within seconds of this, and ends the process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        backend, out = dist.group.WORLD._get_backend(torch.device("cpu")), torch.zeros(2)
        works = []
        for number in range(1000):
            works.append(backend.allreduce([torch.ones(2)]))
            works.append(backend.allgather_coalesced([[out]], [torch.full((2,), float(number))]))
        for work in works:
            work.wait()
        assert out.tolist() == [999, 999]  # in order
        assert funcol.wait_tensor(funcol.all_reduce(out, "sum", dist.group.WORLD)).tolist() == [999, 999]
    finally:
        dist.destroy_process_group()
