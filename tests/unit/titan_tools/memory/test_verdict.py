"""Whether a run fits: what is added to reserved memory, and what an allocator at its limit can give back."""

from dataclasses import replace

import pytest

from converters.common.sizes import GIB
from tests.memory_traces import TraceMaker
from titan_tools.memory.estimate import estimate
from titan_tools.memory.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE, judge, nvidia_smi_gib
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS


def test_what_the_driver_shows_by_hand():
    assert nvidia_smi_gib(10 * GIB, num_communicators=2) == pytest.approx((9.5 + 0.5 + 0.4, 10.5 + 0.5 + 2.0))
    with_symmetric = nvidia_smi_gib(10 * GIB, num_communicators=0, symmetric_bytes=GIB // 4)
    assert with_symmetric == pytest.approx((9.5 + 0.5 + 0.25, 10.5 + 0.5 + 0.25))  # known to the byte


@pytest.mark.parametrize(
    ("usable_gib", "num_communicators", "symmetric_gib", "verdict"),
    [
        (32.0, 0, 0, FITS),  # 30 reserved and 5 % of it, and CUDA's context
        (32.0, 0, 0.1, TOO_CLOSE),
        (31.9, 0, 0, TOO_CLOSE),
        (31.0, 1, 0, TOO_CLOSE),
        (25.0, 0, 0, TOO_CLOSE),  # what step 1 took goes back to the driver
        (19.6, 0, 0, TOO_CLOSE),  # 19.1 for the allocator, and 20 at once is no more than 5 % above
        (19.6, 1, 0, DOES_NOT_FIT),  # NCCL takes 0.2 at least
        (19.6, 0, 0.2, DOES_NOT_FIT),
        (19.5, 0, 0, DOES_NOT_FIT),
    ],
)
def test_a_run_of_20_gib_at_once_that_reserves_30(usable_gib, num_communicators, symmetric_gib, verdict):
    maker = TraceMaker()
    maker.trace.symmetric_bytes = round(symmetric_gib * GIB)
    maker.at(1, "forward", 0, 0, "layers.0")
    maker.free(maker.allocate(10 * GIB, "activations"))
    maker.at(2, "forward", 0, 0, "layers.0")
    maker.free(maker.allocate(20 * GIB, "activations"))
    gpu = replace(GPUS["h200"], usable_gib=usable_gib)
    found = judge(
        gpu,
        reserved_bytes=30 * GIB,
        trace=maker.trace,
        allocator="classic",
        num_communicators=num_communicators,
    )
    assert found.verdict == verdict


def test_symmetric_memory_counts():
    trace = TraceMaker().trace
    trace.symmetric_bytes = GIB
    found = judge(GPUS["h200"], reserved_bytes=0, trace=trace, allocator="classic", num_communicators=0)
    assert found.needed_gib == (1.5, 1.5)  # and CUDA's context


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("degrees", "wanted"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),  # all ranks: FSDP's too
        pytest.param({"context_parallel": 2}, 3, marks=pytest.mark.slow),  # all ranks; cp; batch
        ({"tensor_parallel": 2, "data_parallel_replicate": 2}, 5),  # all ranks; replicas; shards; tp; batch
    ],
)
def test_each_set_of_ranks_that_communicates_has_a_communicator(degrees, wanted):
    named = {"data_parallel_shard": 2, "tensor_parallel": 1, "pipeline_parallel": 1} | degrees
    words = [f"--parallelism.{axis}_degree={degree}" for axis, degree in named.items()]
    words += ["--training.global_batch_size=-1", "--training.mixed_precision_param=bfloat16"]
    config = load_config("debug", words)
    found = estimate(resolve_job(config), gpu=GPUS["h200"], allocator="expandable")
    (rank,) = found.ranks
    assert rank.nvidia_smi_gib == nvidia_smi_gib(rank.reserved_bytes, num_communicators=wanted)
    assert found.verdicts[0].needed_gib == rank.nvidia_smi_gib
