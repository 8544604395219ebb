"""Gloo groups: one worker thread (of two, one frees the name that the other writes), the address, descriptors."""

import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from trainer.ranks import process_group
from trainer.ranks.process_group import _source_address, own_address, raise_descriptor_limit, use_one_worker


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


def test_what_a_later_torch_passes_reaches_its_options_or_torch_itself(monkeypatch):
    """torch 2.14 passes `enable_reconfigure`, for which its options have a field; older ones know neither."""
    seen = []
    construct = process_group._with_one_worker(lambda self, *args, **settings: seen.append((args, settings)))
    construct(None, "store", 0, 2, timeout=timedelta(seconds=7), of_a_later_torch=True)
    assert seen == [(("store", 0, 2), {"timeout": timedelta(seconds=7), "of_a_later_torch": True})]
    construct(None, "store", 0, 2, timedelta(seconds=7), True)
    assert seen.pop() == (("store", 0, 2, timedelta(seconds=7), True), {})

    class Options:
        def __init__(self):
            self._threads, self._devices, self._timeout, self.enable_reconfigure = 2, [], None, False

    class Gloo:
        _Options = Options

    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    monkeypatch.setattr(process_group, "_devices", lambda size: ["device"])
    construct(None, "store", 0, 2, timeout=timedelta(seconds=7), enable_reconfigure=True)
    (*_, options), settings = seen.pop()
    assert vars(options) == {
        "_threads": 1,
        "_devices": ["device"],
        "_timeout": timedelta(seconds=7),
        "enable_reconfigure": True,
    }
    assert settings == {}


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


@pytest.mark.parametrize(
    ("is_one_machine", "routes", "expected"),
    [
        (True, {"node1": "127.0.0.1"}, "127.0.0.1"),
        (False, {"node1": "10.0.0.2", "192.0.2.1": "172.16.0.2"}, "10.0.0.2"),
        (False, {"node1": "127.0.1.1", "192.0.2.1": "10.0.0.1"}, "10.0.0.1"),  # on node1 itself, as Debian names it
        (False, {"node1": "::1", "2001:db8::1": "fd00::1"}, "fd00::1"),
        (False, {"node1": "127.0.1.1"}, "127.0.1.1"),  # no network
        (False, {}, None),
    ],
)
def test_the_address_is_the_one_that_routes_to_the_first_machine(monkeypatch, is_one_machine, routes, expected):
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16" if is_one_machine else "8")
    monkeypatch.setattr(process_group, "_source_address", routes.get)
    assert own_address() == expected
    monkeypatch.delenv("MASTER_ADDR")
    assert own_address() is None


def test_the_route_is_the_systems():
    assert _source_address("localhost") in ("127.0.0.1", "::1") and _source_address("no such host") is None


def test_the_limit_of_descriptors_is_raised_as_far_as_allowed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65536) if hard > 0 else 65536, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
