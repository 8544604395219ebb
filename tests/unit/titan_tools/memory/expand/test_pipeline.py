"""Composed traces of pipeline ranks against those of the whole step, event for event; the order against torch's."""

from dataclasses import replace

import pytest

from converters.families.registry import get_family
from tests.real_memory import held_by_fake_rank, held_by_trace
from titan_tools.memory.expand import ranks as pipeline_ranks
from titan_tools.memory.expand.order import END, allocates_on_receipt, orders_of_ranks, shortest
from titan_tools.memory.expand.ranks import global_rank, kinds_of_ranks, trace_ranks, traced_kinds
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from trainer.config.load import load_config
from trainer.job.job import resolve
from trainer.job.record import Job
from trainer.parallel.stages import schedule_machine_problems

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
FSDP = "data_parallel_shard_degree=2"
TP = "tensor_parallel_degree=2"

# schedule, further words, the pipeline ranks of two that are compared
CONFIGS = {
    "GPipe": ("GPipe", [], [0]),
    "1F1B": ("1F1B", [], [1]),
    "1F1B, FSDP": ("1F1B", [FSDP], [0]),
    "1F1B, gathered anew": ("1F1B", [FSDP, "fsdp_reshard_after_forward=always"], [0]),
    "Interleaved1F1B, FSDP": ("Interleaved1F1B", [FSDP], [1]),
    "Interleaved1F1B, TP": ("Interleaved1F1B", [TP], [0]),
    "LoopedBFS, FSDP": ("LoopedBFS", [FSDP], [0]),
    "InterleavedZeroBubble": ("InterleavedZeroBubble", [], [0]),
    "ZBVZeroBubble, FSDP": ("ZBVZeroBubble", [FSDP], [0]),
}


def make_job(schedule: str, words: list[str], *, pp: int = 2, layers: int = 4, batch: int = 4, more: tuple = ()) -> Job:
    degrees = {FSDP: 2, TP: 2}
    words = [f"pipeline_parallel_degree={pp}", f"pipeline_parallel_schedule={schedule}", *words]
    defaults = [f"{word.partition('=')[0]}=1" for word in (FSDP, TP)]
    config = load_config(
        "debug",
        [
            "--validation.no_enable",
            "--training.seq_len=16",
            f"--training.local_batch_size={batch}",
            "--training.global_batch_size=-1",
            *(f"--parallelism.{word}" for word in [*defaults, "pipeline_parallel_microbatch_size=1", *words]),
            *more,
        ],
    )
    if refused := schedule_machine_problems(config.parallelism):
        pytest.skip(refused[0])
    world_size = pp
    for word in words:
        world_size *= degrees.get(word, 1)
    args = replace(get_family("llama3").flavors["debug_gqa"], num_layers=layers)
    return Job.of(config, args, resolve(config.parallelism, world_size))


def assert_composed(job: Job, pp_ranks: list[int], monkeypatch) -> None:
    def refuse(*unused, **others):
        raise AssertionError("captured in full")

    monkeypatch.setattr(pipeline_ranks, "trace_rank", refuse)
    for kind in kinds_of_ranks(job):
        if wanted := [rank for rank in kind if rank in pp_ranks]:
            for pp_rank, trace in traced_kinds(job, [wanted], kernels=Kernels()):
                whole = capture(job, rank=global_rank(job, pp_rank), kernels=Kernels())
                assert trace == whole, pp_rank


QUICK = {"1F1B, gathered anew", "ZBVZeroBubble, FSDP"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CONFIGS]
)
def test_a_rank_comes_out_of_few_microbatches_as_it_is(name, monkeypatch):
    schedule, words, pp_ranks = CONFIGS[name]
    shape = {"layers": 2, "batch": 3} if schedule in ("GPipe", "1F1B") else {"layers": 4, "batch": 4}
    assert_composed(make_job(schedule, words, **shape), pp_ranks, monkeypatch)


@pytest.mark.slow  # 48 captures of whole steps
@pytest.mark.parametrize("words", [[], [FSDP], [FSDP, TP]], ids=["alone", "FSDP", "FSDP and TP"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_of_every_schedule(schedule, words, monkeypatch):
    job = make_job(schedule, words, pp=4, layers=8, batch=8)
    assert_composed(job, [0, 1, 2, 3], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    "more",
    [
        ("--training.mixed_precision_param=bfloat16", "--training.global_batch_size=16"),
        ("--activation_checkpoint.mode=full",),
        ("--training.loss=chunked",),
    ],
    ids=["accumulation", "recompute", "chunked loss"],
)
def test_other_settings(schedule, more, monkeypatch):
    if schedule == "ZBVZeroBubble" and more[0].startswith("--activation"):
        return  # which the layout refuses
    assert_composed(make_job(schedule, [FSDP], batch=4, more=more), [0, 1], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("pp_rank", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_captured_schedule_is_what_a_real_step_asks_for(schedule, pp_rank):
    job = make_job(schedule, [FSDP], batch=4)
    rank = global_rank(job, pp_rank)
    trace = capture(job, rank=rank, kernels=Kernels())
    fake, real = held_by_trace(trace), held_by_fake_rank(job.config, job.args, job.dims, rank=rank)
    assert fake.peak_bytes == real.peak_bytes
    assert fake == real


@pytest.mark.slow
def test_depth_and_microbatches_together():
    job = make_job("Interleaved1F1B", [FSDP], pp=2, layers=30, batch=6)
    traces = trace_ranks(job, kernels=Kernels())
    for pp_rank, trace in traces.items():
        assert trace == capture(job, rank=global_rank(job, pp_rank), kernels=Kernels())


def test_ranks_in_the_middle_share_a_capture():
    assert kinds_of_ranks(make_job("1F1B", [], pp=4, layers=22)) == [[0], [1, 2], [3]]
    assert kinds_of_ranks(make_job("ZBVZeroBubble", [], pp=4, layers=30)) == [[0], [1, 2], [3]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_short_order_has_all_that_comes_in_the_full_one(schedule):
    job = make_job(schedule, [], pp=4, layers=22, batch=16)
    orders = orders_of_ranks(schedule, job.split, 4, 16, reshards=False)
    for ranks in kinds_of_ranks(job):
        of_kind = [orders[rank] for rank in ranks]
        _, short = shortest(of_kind, schedule)
        # 1F1B's loop refers to what it received for a backward until the next backward, if no forward comes before it
        assert short.num_microbatches <= (4 if allocates_on_receipt() and schedule == "1F1B" else 3)
        assert set().union(*(order.contexts() for order in of_kind)) <= set(short.contexts())
    for order in orders.values():
        forwards = [action for action in order.actions if action.phase == "forward" and action.microbatch >= 0]
        assert len(forwards) == len(set(forwards)) == 16 * len({action.part for action in forwards})
        assert order.actions.count(END) == 1
