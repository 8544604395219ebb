"""A seed checkpoint holds, tensor for tensor and bit for bit, what the trainer of any layout begins with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.tensor import DTensor

from converters.common.box import Box
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from tests.dist.training import SEED, Layout, build_model
from trainer.checkpoints.arrays import as_array, dtype_name
from trainer.config.sections import Debug
from trainer.job.job import resolve_job
from trainer.models import initial_weights
from trainer.seed import seed

SMALL_BLOCKS = 3000  # so that tensors of these models have many, which end within shards
TP, PP, EP = "tensor_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree"
CASES = [
    (Layout("fsdp 4", 4), "llama3/debug_tied"),
    (Layout("fsdp 2 tp 2, bf16", 4, {TP: 2}, {"dtype": "bfloat16"}), "llama3/debug_gqa"),
    (Layout("tp 2 pp 2", 4, {TP: 2, PP: 2}), "qwen3/debug_tied"),
    (Layout("fsdp 2 pp 2", 4, {PP: 2}), "llama2/debug_gqa"),
    (Layout("fsdp 4 ep 2", 4, {EP: 2}), "deepseek_v3/debug_v3"),
    (Layout("fsdp 2 tp 2 ep 4", 4, {TP: 2, EP: 4}), "gpt_oss/debug_window"),
    (Layout("fsdp 2 pp 2 ep 2", 4, {PP: 2, EP: 2}), "llama4/debug_maverick"),
]


def differences(layout: Layout, flavor: str, folder: Path) -> tuple[list[str], set[str]]:
    """Case: tensors of this rank that are not those of the seed checkpoint, and all that were looked at."""
    usual, initial_weights.BLOCK_ELEMENTS = initial_weights.BLOCK_ELEMENTS, SMALL_BLOCKS
    try:
        model = build_model(layout, flavor)
    finally:
        initial_weights.BLOCK_ELEMENTS = usual
    differing = []
    with CatalogReader(open_checkpoint(folder)) as reader:
        for fqn, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            held = reader.read(fqn, Box.whole(tuple(whole.shape)))
            same_dtype = reader.tensors[fqn].dtype == dtype_name(whole.dtype)
            if not (same_dtype and np.array_equal(as_array(whole).view(np.uint8), held.view(np.uint8))):
                differing.append(fqn)
    return differing, set(model.state_dict())


QUICK = ("fsdp 2 tp 2, bf16", "tp 2 pp 2", "fsdp 4 ep 2")


@pytest.mark.parametrize(
    ("layout", "flavor"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0].name not in QUICK)) for case in CASES],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_trainer_begins_with_what_the_seed_holds(layout, flavor, pools, tmp_path, monkeypatch):
    monkeypatch.setattr(initial_weights, "BLOCK_ELEMENTS", SMALL_BLOCKS)
    config = replace(layout.config(flavor), debug=Debug(seed=SEED))
    seed(resolve_job(config), tmp_path / "seed")
    output = pools[layout.world_size].run(differences, layout, flavor, tmp_path / "seed")
    assert [differing for differing, _ in output] == [[]] * layout.world_size
    assert set().union(*(looked_at for _, looked_at in output)) == set(open_checkpoint(tmp_path / "seed").tensors)
