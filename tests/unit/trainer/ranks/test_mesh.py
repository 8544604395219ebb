"""Meshes by name: which ranks each axis has, and which axes share a communicator."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from converters.layout.mesh_shape import MeshShape
from trainer.ranks.mesh import ALL_RANKS, communicators, make_meshes
from trainer.ranks.process_group import fake_ranks

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


@pytest.mark.parametrize("dims", [DIMS, MeshShape(pp=4, dp_shard=4, ep=2, tp=2), MeshShape(pp=2, tp=2)])
def test_communicators_are_called_the_same_on_every_fake_rank(dims):
    """An estimate runs code that it compiled for one pipeline rank on others: groups' names are in it."""
    named = []
    for rank in range(0, dims.world_size, 3):
        with fake_ranks(dims.world_size, rank=rank):
            meshes = make_meshes(dims, "cpu")
            grids = [grid for grid in (meshes.parameters, meshes.data, meshes.experts) if grid is not None]
            named.append([grid[name].get_group().group_name for grid in grids for name in grid.mesh_dim_names])
    assert len(named) > 1 and all(names == named[0] for names in named)


@pytest.mark.parametrize(
    ("degrees", "users"),
    [
        ({}, {}),
        ({"dp_shard": 4}, {ALL_RANKS: ("fsdp", "batch")}),
        ({"dp_replicate": 4}, {ALL_RANKS: ("dp_replicate", "batch")}),
        ({"tp": 4}, {ALL_RANKS: ("tp",)}),
        ({"dp_shard": 2, "tp": 2}, {ALL_RANKS: (), "fsdp": ("fsdp", "batch"), "tp": ("tp",)}),
        ({"pp": 2, "tp": 2}, {ALL_RANKS: (), "pp": ("pp",), "tp": ("tp",)}),
        ({"cp": 4}, {ALL_RANKS: ("fsdp",), "cp": ("cp",)}),
        ({"dp_shard": 2, "cp": 2}, {ALL_RANKS: ("fsdp",), "cp": ("cp",), "batch": ("batch",)}),
        (
            {"dp_replicate": 2, "dp_shard": 2},
            {ALL_RANKS: ("batch",), "dp_replicate": ("dp_replicate",), "fsdp": ("fsdp",)},
        ),
    ],
    ids=str,
)
def test_axes_over_the_same_ranks_share_a_communicator(degrees, users):
    assert communicators(MeshShape(**degrees)) == users


@pytest.mark.parametrize("degrees", [*itertools.product((1, 2), repeat=5)])
def test_groups_are_those_of_the_communicators_and_of_no_other(degrees):
    dims = MeshShape(*degrees)
    with fake_ranks(dims.world_size, rank=dims.world_size - 1):
        meshes = make_meshes(dims, "cpu")
        sizes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "fsdp": dims.fsdp, "tp": dims.tp}
        sizes |= {"batch": dims.batch, "cp": dims.cp}
        groups = {axis: meshes[axis].get_group() for axis in sizes}
        for axis, size in sizes.items():
            assert groups[axis].size() == size
            assert dist.get_process_group_ranks(groups[axis]) == meshes[axis].mesh.tolist()
        communicating = {group for group in groups.values() if group.size() > 1}
        assert communicating | {dist.group.WORLD} == {*meshes.groups.values(), dist.group.WORLD}
        ranks = [tuple(dist.get_process_group_ranks(group)) for axis, group in meshes.groups.items() if axis != "cp"]
        assert len(ranks) == len(set(ranks))


def test_nccl_that_is_bound_to_a_device_is_split_once_for_all_groups_of_an_axis(monkeypatch):
    """One call of all ranks instead of one for each group; only on CUDA, so split_group is replaced."""
    asked = []

    def split(split_ranks, group_desc):
        asked.append((group_desc, split_ranks))
        world.bound_device_id = None  # or torch would split the fake group, too
        group, _ = dist.new_subgroups_by_enumeration(split_ranks)
        world.bound_device_id = torch.device("cuda", 0)
        return group

    with fake_ranks(8, rank=5):
        monkeypatch.setattr(dist, "split_group", split)
        world = dist.group.WORLD
        world.bound_device_id = torch.device("cuda", 0)
        make_meshes(MeshShape(dp_shard=4, tp=2), "cpu")
    fsdp = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert asked == [("mesh_fsdp", fsdp), ("mesh_tp", [[0, 1], [2, 3], [4, 5], [6, 7]])]


def test_an_axis_of_degree_1_keeps_what_is_summed_over_it(tmp_path):
    """Its group has a size and a rank, and no peers; with gloo and NCCL it is the same."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        meshes = make_meshes(MeshShape(), "cpu")
        number = torch.tensor([7.0])
        dist.all_reduce(number, group=meshes["batch"].get_group())
        assert number.item() == 7.0 and meshes["batch"].get_local_rank() == 0
        assert {dist.get_backend(meshes[axis].get_group()) for axis in ("pp", "fsdp", "tp", "cp", "batch")} == {"fake"}
    finally:
        dist.destroy_process_group()


def test_an_unknown_name(meshes):
    with pytest.raises(KeyError, match="ep"):
        meshes["ep"]
