"""Configs drawn at random, with odd shapes: few layers and microbatches give each rank's whole trace and its state."""

import random
from typing import Any

import pytest

from converters.families.args import DecoderArgs
from converters.families.registry import get_family
from tests.state_bytes import state_bytes, traced_state_bytes
from tests.unit.titan_tools.memory.expand.test_expand import assert_same
from titan_tools.memory.expand.ranks import global_rank, trace_ranks
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import gpu_kernels
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

FLAVOR = "drawn"
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble")


@pytest.mark.parametrize("seed", range(33))
def test_a_config_drawn_at_random(seed, monkeypatch):
    family, args, keys = drawn(random.Random(seed))
    monkeypatch.setitem(get_family(family).flavors, FLAVOR, args)
    flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in keys.items()]
    fixed = [f"--model.name={family}", f"--model.flavor={FLAVOR}", "--training.global_batch_size=-1"]
    config = load_config("debug", [*fixed, *flags])
    job, kernels = resolve_job(config), gpu_kernels(GPUS["h100-80"])
    for pp_rank, trace in trace_ranks(job, kernels=kernels).items():
        assert_same(trace, capture(job, rank=global_rank(job, pp_rank), kernels=kernels))
        if not config.training.enable_cpu_offload:  # else in host memory
            assert traced_state_bytes(trace, job) == state_bytes(job, pp_rank), pp_rank


def drawn(r: random.Random) -> tuple[str, DecoderArgs, dict[str, Any]]:
    """A family, a model with few layers, and the keys of a config."""
    family = r.choice(["llama2", "llama3", "llama3", "qwen3"])
    pp, tp, cp = r.choice([1, 1, 2, 2, 4]), r.choice([1, 1, 1, 2, 4]), r.choice([1, 1, 1, 2])
    shards, replicas = r.choice([1, 2, 4, 8]), r.choice([1, 1, 2])
    schedule = r.choice(SCHEDULES)
    keys = {
        "parallelism.data_parallel_shard_degree": shards,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.tensor_parallel_degree": tp,
        "parallelism.context_parallel_degree": cp,
        "parallelism.pipeline_parallel_degree": pp,
        "parallelism.pipeline_parallel_schedule": schedule,
        "parallelism.disable_loss_parallel" if r.random() < 0.2 else "parallelism.no_disable_loss_parallel": True,
        "training.mixed_precision_param": r.choice(["bfloat16"] * 5 + ["float32"] * (cp == 1)),
        "training.dtype": r.choice(["float32"] * 8 + ["bfloat16"]),
        "training.loss": r.choice(["chunked", "chunked", "plain"]),
        "training.loss_chunks": r.choice([0, 1, 2, 8]),
        "training.seq_len": cp * r.choice([256, 512, 1024, 2048, 4096]),
        "optimizer.implementation": r.choice(["fused", "fused", "foreach", "for-loop"]),
        "optimizer.state_dtype": r.choice(["float32"] * 4 + ["bfloat16"]),
    }
    is_split = pp > 1 and schedule in SPLIT
    keys["parallelism.fsdp_reshard_after_forward"] = r.choice(["default", "never", *(() if is_split else ("always",))])
    size = r.choice([1, 1, 2])
    batch = size * pp * r.choice([1, 2, 4]) if pp > 1 else r.choice([1, 1, 2, 4])
    keys["parallelism.pipeline_parallel_microbatch_size"] = size if pp > 1 else 1
    keys["training.local_batch_size"] = batch
    if r.random() < 0.3:
        keys["training.global_batch_size"] = batch * shards * replicas * r.choice([2, 3])
    if r.random() < 0.15 and shards > 1:
        keys["training.enable_cpu_offload"] = True
    checkpointing = "none" if is_split else r.choice(["none", "full", "op", "2", "3"])
    is_selective = checkpointing not in ("none", "full")
    keys["activation_checkpoint.mode"] = "selective" if is_selective else checkpointing
    if is_selective:
        keys["activation_checkpoint.selective_ac_option"] = checkpointing
    keys["activation_checkpoint.early_stop" if r.random() < 0.3 else "activation_checkpoint.no_early_stop"] = True
    validates = r.random() < 0.15
    keys["validation.enable" if validates else "validation.no_enable"] = True
    if validates:
        keys |= {"validation.seq_len": keys["training.seq_len"], "validation.local_batch_size": r.choice([1, 2, 8])}
    num_stages = pp * (1 if schedule in ("1F1B", "GPipe") else 2)
    heads, dim = r.choice([4, 8, 16]), r.choice([512, 1024, 2048])
    args = get_family(family).args_type(
        dim=dim,
        num_layers=r.choice([n for n in (2, 3, 4, 6, 8, 16) if pp == 1 or n + 2 >= 2 * num_stages]),
        num_heads=heads,
        num_kv_heads=r.choice([n for n in (1, 2, 4, 8, 16) if heads % n == 0 and n % tp == 0]),
        head_dim=r.choice([64, 128]),
        ffn_hidden=int(r.choice([2, 3, 3.5]) * dim) // 256 * 256,
        vocab_size=r.choice([4096, 32000, 65536, 128256, 32008]),
        tied=r.random() < (0.25 if pp == 1 else 0.1),
    )
    return family, args, keys
