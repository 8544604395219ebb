"""A process group without peers: one rank of any job on one machine, its collectives only allocate."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@contextmanager
def fake_ranks(world_size: int, *, rank: int) -> Iterator[None]:
    """Within, this process is `rank` of so many. Needs a process without a process group; leaves it so."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # what DTensor remembers of a mesh names its groups, which are gone now
