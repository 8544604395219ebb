"""Float8 training, emulated: near the same run in bf16 in every layout, and checkpoints that do not know of it."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.dist import runs
from tests.dist.training import Layout, build_model, global_batch, own_batch, train

BF16 = {"mixed_precision_param": "bfloat16"}
STEPS = 3


def float8(**settings) -> dict[str, dict]:
    return {"model": {"converters": ("quantize.linear.float8",)}, "float8": {"emulate": True} | settings}


GATHERED = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
FULL_AC = {"activation_checkpoint": {"mode": "full"}}
LAYOUTS = {
    "one rank": Layout("", 1, {}, BF16, float8()),
    "one rank, float8 all-gather": Layout("", 1, {}, BF16, float8(**GATHERED)),
    "fsdp 2": Layout("", 2, {}, BF16, float8()),
    "fsdp 2, float8 all-gather": Layout("", 2, {}, BF16, float8(**GATHERED) | FULL_AC),
    "fsdp 2, rowwise": Layout("", 2, {}, BF16, float8(recipe_name="rowwise")),
    "fsdp 2, rowwise_with_gw_hp": Layout("", 2, {}, BF16, float8(recipe_name="rowwise_with_gw_hp")),
    "fsdp 2 tp 2, float8 all-gather": Layout("", 4, {"tensor_parallel_degree": 2}, BF16, float8(**GATHERED)),
    "tp 2, rowwise": Layout("", 2, {"tensor_parallel_degree": 2}, BF16, float8(recipe_name="rowwise")),
    "pp 2": Layout("", 2, {"pipeline_parallel_degree": 2}, BF16, float8()),
    "cp 2": Layout("", 2, {"context_parallel_degree": 2}, BF16, float8(**GATHERED)),
    "ddp 2": Layout("", 2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, BF16, float8()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_near_those_in_bf16(pools, name):
    layout = LAYOUTS[name]
    (exact,) = pools[1].run(train, Layout("fp32"), "debug_gqa", STEPS)
    told = pools[layout.world_size].run(train, layout, "debug_gqa", STEPS)
    assert all(rank == told[0] for rank in told)
    assert told[0]["losses"] == pytest.approx(exact["losses"], abs=0.02, rel=0)
    assert told[0]["norms"] == pytest.approx(exact["norms"], rel=0.05)
    (bf16,) = pools[1].run(train, Layout("bf16", 1, {}, BF16), "debug_gqa", STEPS)
    assert told[0] != bf16
