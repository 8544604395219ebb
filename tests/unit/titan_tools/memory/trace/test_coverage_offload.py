"""CPU offload in a trace: what the GPU holds of parameters that are in host memory."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.dist.training import Layout, args_of
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import Kernels
from trainer.job.job import resolve
from trainer.job.record import Job

pytestmark = pytest.mark.usefixtures("one_thread")

ARGS = replace(args_of("debug_gqa"), num_layers=1)
TENSORS = (
    [2048 * 128]  # embedding
    + [128 * 128, 64 * 128, 64 * 128, 128 * 128, 3 * 128 * 384, 2 * 128]  # wq, wk, wv, wo, w1 to w3, norms of the layer
    + [128, 2048 * 128]  # norm, output
)
NUM_PARAMETERS = 12


def captured(*, is_offloaded: bool, device: str = "cuda", **training) -> Trace:
    keys = {"seq_len": 16, "local_batch_size": 2, "enable_cpu_offload": is_offloaded} | training
    config = Layout("FSDP 2", 2, {}, keys).config("debug_gqa")
    dims = resolve(config.parallelism, 2)
    return capture(Job.of(config, ARGS, dims), rank=0, kernels=Kernels(device=device))


@pytest.fixture(scope="module")
def offloaded() -> Trace:
    return captured(is_offloaded=True)


@pytest.fixture(scope="module")
def at_home() -> Trace:
    return captured(is_offloaded=False)


def left(trace: Trace) -> int:
    return sum(
        trace.blocks[event].num_bytes if event >= 0 else -trace.blocks[~event].num_bytes for _, event in trace.events()
    )


def made_in(trace: Trace, phase: str) -> Counter:
    return Counter(b.num_bytes for b in trace.blocks if b.point.step == 1 and b.point.phase == phase)


def test_parameters_and_states_lie_in_host_memory_alone(offloaded, at_home):
    shards = sum(TENSORS) // 2
    counts, shares = 4 * NUM_PARAMETERS, 8 * NUM_PARAMETERS  # of steps; of a gradient's norm, fp64
    angles = 4 * ARGS.head_dim // 2
    assert left(at_home) == 3 * 4 * shards + counts + shares + angles
    assert left(offloaded) == angles
    assert not [b for b in offloaded.blocks if b.point.phase in ("states", "optimizer", "zero_grad")]


def test_shards_are_copied_to_the_gpu_before_they_are_gathered(offloaded, at_home):
    more = made_in(offloaded, "forward") - made_in(at_home, "forward")
    assert not made_in(at_home, "forward") - made_in(offloaded, "forward")
    assert sum(size * count for size, count in more.items()) == 4 * sum(TENSORS) // 2
    assert more.total() == NUM_PARAMETERS
    streams = {b.stream for b in offloaded.blocks if b.point.phase == "forward" and b.num_bytes == 4 * 2048 * 64}
    assert "all_gather_copy_in" in streams


def test_shards_that_are_cast_are_cast_on_the_gpu():
    trace = captured(is_offloaded=True, mixed_precision_param="bfloat16")
    at_home = captured(is_offloaded=False, mixed_precision_param="bfloat16")
    more = made_in(trace, "forward") - made_in(at_home, "forward")
    embedding = 2048 * 128 // 2
    assert more[4 * embedding] == 2  # the output's too
    assert made_in(trace, "forward")[2 * embedding] >= 2


def test_reduced_gradients_leave_the_gpu_at_once(offloaded, at_home):
    def shards_held(trace: Trace) -> int:
        """Bytes of the reduced gradients that are there when clipping begins."""
        held = set()
        for segment, event in trace.events():
            if segment.point.phase == "clip":
                break
            held.add(event) if event >= 0 else held.discard(~event)
        return sum(trace.blocks[number].num_bytes for number in held if trace.blocks[number].stream == "reduce_scatter")

    assert shards_held(at_home) == 4 * sum(TENSORS) // 2
    assert shards_held(offloaded) == 0


def test_a_cpu_has_one_memory(at_home):
    trace = captured(is_offloaded=True, device="cpu")
    assert left(trace) == left(at_home)
