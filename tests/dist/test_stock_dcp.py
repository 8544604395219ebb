"""DCP between real ranks and the byte engine: what several stock ranks save we read, what we cut they load."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from converters.common.box import Box
from converters.containers.dcp_write import plan_dcp
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from tests.unit.converters.samples import infos, raw, read_all, write

PLACEMENTS = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "twice": [Shard(0), Shard(0)],
    "copied": [Replicate(), Replicate()],
}


def full_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(7, 6, generator=generator).bfloat16() for name in PLACEMENTS}
    return state | {"step": torch.tensor(3.0), "short": torch.ones(1)}  # one row among two ranks


def sharded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = PLACEMENTS | {"short": [Shard(0), Replicate()], "step": [Replicate(), Replicate()]}
    return {name: distribute_tensor(tensor, mesh, placements[name]) for name, tensor in state.items()}


def save(folder: Path) -> None:
    dcp.save(sharded(full_state()) | {"note": {"lr": 0.1}}, checkpoint_id=str(folder))


def load(folder: Path) -> dict[str, bytes]:
    state = sharded({name: torch.zeros_like(tensor) for name, tensor in full_state().items()})
    dcp.load(state, checkpoint_id=str(folder))
    return {name: raw(t.full_tensor() if isinstance(t, DTensor) else t) for name, t in state.items()}


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "dcp"
    pools[4].run(save, folder)
    return folder


def test_what_four_stock_ranks_saved_is_read(saved):
    catalog = open_checkpoint(saved)
    assert {len(catalog.tensors[name].chunks) for name in ("both", "twice")} == {4}
    assert read_all(catalog) == {name: raw(tensor) for name, tensor in full_state().items()}
    assert list(catalog.values) == ["note.lr"]


def test_four_stock_ranks_load_another_cut(saved, pools, tmp_path):
    state = full_state()
    catalog = open_checkpoint(saved)
    files: dict[str, list[tuple[str, Box]]] = {"__0_0.distcp": [], "__1_0.distcp": []}
    for name, tensor in state.items():
        if tensor.ndim == 2:  # 7 rows as 5 + 2, the latter cut into columns as well
            files["__1_0.distcp"] += [(name, Box((0, 0), (5, 6))), (name, Box((5, 0), (2, 1)))]
            files["__0_0.distcp"].append((name, Box((5, 1), (2, 5))))
        else:
            files["__0_0.distcp"].append((name, Box.whole(tuple(tensor.shape))))
    with CatalogReader(catalog) as reader:
        blobs = {fqn: reader.read_blob(fqn) for fqn in catalog.values}
        target = plan_dcp(infos(state), files, blobs=blobs, planner_data=catalog.planner_data)
        write(reader, target, tmp_path / "cut")
    for found in pools[4].run(load, tmp_path / "cut"):
        assert found == {name: raw(tensor) for name, tensor in state.items()}
