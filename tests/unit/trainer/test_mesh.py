"""Meshes by name: which ranks meet on which axis."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from converters.layout import MeshShape
from trainer.mesh import make_meshes

DIMS = MeshShape(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)


@pytest.fixture
def meshes():
    """Of rank 21 = (pp 1, dp_replicate 0, dp_shard 1, cp 0, tp 1) of 32."""
    dist.init_process_group("fake", store=FakeStore(), rank=21, world_size=32)
    yield make_meshes(DIMS, "cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("pp", [5, 21]),
        ("dp_replicate", [21, 29]),
        ("fsdp", [17, 19, 21, 23]),  # dp_shard × cp
        ("batch", [17, 21, 25, 29]),  # dp_replicate × dp_shard
        ("cp", [21, 23]),
        ("loss", [17, 19, 21, 23, 25, 27, 29, 31]),  # batch × cp
        ("tp", [20, 21]),
    ],
)
def test_ranks_of_an_axis(meshes, name, ranks):
    assert meshes[name].mesh.tolist() == ranks
    assert meshes[name].mesh.tolist()[meshes[name].get_local_rank()] == 21
    assert dist.get_process_group_ranks(meshes[name].get_group()) == ranks


def test_fsdp_replicates_over_its_first_axis(meshes):
    assert meshes.fsdp.mesh.tolist() == [[17, 19, 21, 23], [25, 27, 29, 31]]
    assert meshes.fsdp.mesh_dim_names == ("dp_replicate", "fsdp")


def test_an_axis_is_the_same_object_each_time(meshes):
    """Compiled code holds for the very mesh that it was compiled with."""
    assert meshes["tp"] is meshes["tp"]


def test_an_unknown_name(meshes):
    with pytest.raises(KeyError, match="ep"):
        meshes["ep"]
