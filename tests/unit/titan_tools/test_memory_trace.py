"""A trace is what a real step asks for, byte for byte and in the same order, on a CPU under the fake process group."""

from dataclasses import replace

import pytest

from tests.dist.training import Layout, args_of
from tests.real_memory import held_by_fake_rank, held_by_trace
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from trainer.parallel_dims import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
REPLICAS, SHARDS = "data_parallel_replicate_degree", "data_parallel_shard_degree"
SCHEDULE, MICROBATCH = "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"
GQA, TIED = "debug_gqa", "debug_tied"


def _kept(mode: str, **keys) -> dict:
    return {"activation_checkpoint": {"mode": mode} | keys}


def _optimizer(**keys) -> dict:
    return {"optimizer": keys}


BF16 = {"mixed_precision_param": "bfloat16"}
PLAIN = {"loss": "plain"}
ACCUMULATED = {"global_batch_size": 8}
PIPE = {PP: 2, MICROBATCH: 1}
# layout, flavor, rank
CASES = [
    (Layout("one rank"), GQA, 0),
    (Layout("one rank, bf16", 1, {}, BF16 | ACCUMULATED), TIED, 0),
    (Layout("FSDP 2", 2), GQA, 0),
    (Layout("FSDP 3, uneven", 3), TIED, 2),
    (Layout("FSDP 2, accumulated, bf16", 2, {}, ACCUMULATED | BF16), GQA, 0),
    (Layout("HSDP 2 x 2", 4, {REPLICAS: 2}), GQA, 0),
    (Layout("DDP 2, accumulated", 2, {REPLICAS: 2}, ACCUMULATED), TIED, 0),
    (Layout("TP 2", 2, {TP: 2}), GQA, 0),
    (Layout("TP 2, plain loss", 2, {TP: 2}, PLAIN), TIED, 0),
    (Layout("TP 2, whole logits", 2, {TP: 2, "disable_loss_parallel": True}, PLAIN), GQA, 0),
    (Layout("FSDP 2 x TP 2, operations kept", 4, {TP: 2}, BF16, _kept("selective", selective_ac_option="op")), GQA, 0),
    (Layout("CP 2", 2, {CP: 2}), GQA, 0),
    (Layout("FSDP 2 x CP 2, full recomputation", 4, {CP: 2}, {}, _kept("full")), TIED, 3),
    (Layout("full recomputation, FSDP 2", 2, {}, {}, _kept("full")), GQA, 0),
    (Layout("operations kept, one rank", 1, {}, {}, _kept("selective", selective_ac_option="op")), TIED, 0),
    (Layout("every 2nd layer", 2, {}, PLAIN, _kept("selective", selective_ac_option="2")), GQA, 0),
    (Layout("1F1B, first", 2, PIPE), GQA, 0),
    (Layout("1F1B, last, bf16", 2, PIPE, BF16), TIED, 1),
    (Layout("Interleaved1F1B, first", 2, PIPE | {SCHEDULE: "Interleaved1F1B"}), GQA, 0),
    (Layout("Interleaved1F1B, last, FSDP 2", 4, PIPE | {SCHEDULE: "Interleaved1F1B"}), TIED, 2),
    (Layout("ZBVZeroBubble", 2, PIPE | {SCHEDULE: "ZBVZeroBubble"}), TIED, 0),
    (Layout("GPipe, TP 2, full recomputation", 4, PIPE | {SCHEDULE: "GPipe", TP: 2}, {}, _kept("full")), GQA, 2),
    (Layout("foreach, FSDP 2", 2, {}, {}, _optimizer(implementation="foreach")), GQA, 0),
    (Layout("for-loop, FSDP 2", 2, {}, {}, _optimizer(implementation="for-loop")), TIED, 0),
    (Layout("moments in bf16", 2, {}, {}, _optimizer(state_dtype="bfloat16")), GQA, 0),
    (Layout("norms of q and k, FSDP 2", 2, {}, BF16), "qwen3/debug_gqa", 0),
]


def captured(layout: Layout, flavor: str, rank: int):
    """Its trace, and what it was made from."""
    tiny = {"seq_len": 16, "local_batch_size": 2}
    config = replace(layout, training=tiny | layout.training).config(flavor)
    args = args_of(flavor)
    if layout.parallelism.get(SCHEDULE, "1F1B") == "1F1B":  # one stage on each rank
        args = replace(args, num_layers=2)
    dims = resolve(config.parallelism, layout.world_size)
    return capture(config, args, dims, rank=rank, kernels=Kernels()), (config, args, dims)


@pytest.mark.parametrize(("layout", "flavor", "rank"), CASES, ids=[layout.name for layout, *_ in CASES])
def test_trace_is_what_a_real_step_asks_for(layout, flavor, rank):
    trace, made_from = captured(layout, flavor, rank)
    fake, real = held_by_trace(trace), held_by_fake_rank(*made_from, rank=rank)
    assert fake.peak_bytes == real.peak_bytes
    assert fake == real
