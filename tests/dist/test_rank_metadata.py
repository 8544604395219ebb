"""DCP that real ranks saved each for itself (`use_collectives=False`): joined where ranks agree, refused where not."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from converters.common.errors import CheckpointError, UnsupportedError
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from converters.verify import verify
from tests.dist.test_stock_dcp import full_state, sharded
from tests.unit.converters.samples import raw, read_all


def save(folder: Path, own: bool) -> None:
    extra = {"rank": {"id": dist.get_rank()}, "noise": torch.full((3,), dist.get_rank())} if own else {}
    dcp.save(sharded(full_state()) | {"lr": 0.1} | extra, checkpoint_id=str(folder), use_collectives=False)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    pools[4].run(save, folder / "alike", False)
    pools[4].run(save, folder / "own", True)
    return folder


def test_ranks_are_joined_and_copies_dropped(saved):
    catalog = open_checkpoint(saved / "alike")
    assert read_all(catalog) == {name: raw(tensor) for name, tensor in full_state().items()}
    assert len(catalog.tensors["copied"].chunks) == 1 and len(catalog.tensors["both"].chunks) == 4
    with CatalogReader(catalog) as reader:
        assert list(catalog.values) == ["lr"] and reader.blob_problems("lr") == []
    assert verify(saved / "alike").ok


def test_what_ranks_hold_differently_is_listed(saved):
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(saved / "own")
    assert "rank.id: another value in __3_0.distcp than in __0_0.distcp" in caught.value.message
    assert "noise at [0] in __1_0.distcp: other values than in __0_0.distcp" in caught.value.message
    assert "copied" not in caught.value.message and "use_collectives" in caught.value.hint


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_is_missing_is_named(saved, tmp_path, rank):
    copy = shutil.copytree(saved / "alike", tmp_path / "copy")
    (copy / f"__{rank}.metadata").unlink()
    with pytest.raises(CheckpointError, match=f"metadata of ranks is missing:\n  __{rank}.metadata"):
        open_checkpoint(copy)
    (copy / f"__{rank}_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=f"__{rank}.metadata" if rank < 3 else "chunks do not cover"):
        open_checkpoint(copy)
