"""What each of several real ranks asks for is what the trace of that rank says, but for what gloo needs itself."""

from dataclasses import replace

import pytest

from converters.families.args import DecoderArgs
from tests.dist.training import Layout, args_of
from tests.real_memory import Held, held_by_step, held_by_trace
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from trainer.config.sections import Config
from trainer.job.job import resolve
from trainer.job.record import Job

pytestmark = pytest.mark.usefixtures("one_thread")

TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
OPERATIONS_KEPT = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
LAYOUTS = [
    Layout("FSDP 2", 2, {}, {"mixed_precision_param": "bfloat16"}),
    Layout("CP 2, operations kept", 2, {CP: 2}, {}, OPERATIONS_KEPT),
    Layout("HSDP 2 x 2", 4, {"data_parallel_replicate_degree": 2}),
    Layout("TP 2 x PP 2", 4, {TP: 2, PP: 2, "pipeline_parallel_microbatch_size": 1}),
]


def measured(config: Config, args: DecoderArgs, world_size: int) -> Held:
    """Case: what this rank asks for."""
    return held_by_step(config, args, resolve(config.parallelism, world_size))


# Collectives of every kind: context parallel ranks share parameters as FSDP ranks do
QUICK = ("CP 2, operations kept",)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name not in QUICK)) for each in LAYOUTS],
)
def test_trace_of_a_rank_is_what_that_rank_asks_for(pools, layout):
    tiny = {"seq_len": 16, "local_batch_size": 2, "loss_chunks": 2}
    config, args = replace(layout, training=tiny | layout.training).config("debug_gqa"), args_of("debug_gqa")
    args, dims = replace(args, num_layers=2), resolve(config.parallelism, layout.world_size)
    for rank, real in enumerate(pools[layout.world_size].run(measured, config, args, layout.world_size)):
        # The ranks of a stage are alike, but that context parallelism gives each other keys to attend to.
        if dims.cp > 1 or rank % (layout.world_size // dims.pp) == 0:
            fake = held_by_trace(capture(Job.of(config, args, dims), rank=rank, kernels=Kernels()))
        assert real.before == fake.before
        # A tensor that gloo lets go of last is freed by its thread, where the profiler sees nothing.
        unseen = real.unseen_frees()
        assert real.asked == [(n, num_bytes) for n, num_bytes in fake.asked if num_bytes > 0 or n not in unseen]
