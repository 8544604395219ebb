"""A trace of few layers of a mixture of experts, expanded, against the trace of all of them, event for event."""

from dataclasses import replace

import pytest

from converters.families.registry import get_family
from tests.unit.titan_tools.memory.expand.test_expand import assert_same
from titan_tools.memory.expand import ranks
from titan_tools.memory.expand.layers import Depth, Repetition, repetitions, shallow_model
from titan_tools.memory.expand.ranks import global_rank, kinds_of_ranks, trace_rank, trace_ranks
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from titan_tools.memory.trace.recorder import owner_of_many
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.job.record import Job

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = Kernels("cuda", "cudnn", "fused", 1.0)
TINY = get_family("qwen3").flavors["debug_moe"]
OP = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
EVERY_3RD = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=3")
PIPE = ("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=1")


FIXED = (
    *("--validation.no_enable", "--training.seq_len=32", "--training.local_batch_size=2"),
    *("--parallelism.data_parallel_shard_degree=-1", "--parallelism.context_parallel_degree=1"),
    "--training.mixed_precision_param=bfloat16",
)


def job(world_size: int, *words: str, **numbers) -> Job:
    fixed = ("--model.flavor=debug_moe", *FIXED)
    return resolve_job(load_config("qwen3_debug", [*fixed, *words]), world_size, args=replace(TINY, **numbers))


def with_masks(family: str, flavor: str, world_size: int, *words: str, **numbers) -> Job:
    """Of GPT-OSS or Llama 4, whose layers have different attention."""
    own = (f"--model.name={family}", f"--model.flavor={flavor}")
    args = replace(get_family(family).flavors[flavor], **numbers)
    return resolve_job(load_config("qwen3_debug", [*FIXED, *own, *words]), world_size, args=args)


def every(step: int, layers: int) -> tuple[int, ...]:
    return tuple(range(step - 1, layers, step))


# ranks, numbers, settings
QUICK = {
    "experts after dense layers": (2, {"num_layers": 8, "dense_layers": (0, 1)}, ()),
}
SLOW = {
    "experts and dense layers in turn, op": (2, {"num_layers": 9, "sparse_step": 2}, OP),
    "a dense layer between experts, every 3rd recomputed": (2, {"num_layers": 16, "dense_layers": (3,)}, EVERY_3RD),
    "compiled, after dense layers": (2, {"num_layers": 8, "dense_layers": (0, 1)}, ("--compile.enable", *OP)),
    "experts": (2, {"num_layers": 7}, ()),
    "HSDP, foreach": (
        4,
        {"num_layers": 9, "sparse_step": 2},
        ("--parallelism.data_parallel_replicate_degree=2", "--optimizer.implementation=foreach"),
    ),
    "DDP": (
        2,
        {"num_layers": 7},
        ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"),
    ),
    "CP, accumulated, moments in bf16": (
        2,
        {"num_layers": 7},
        (
            "--parallelism.context_parallel_degree=2",
            "--training.global_batch_size=4",
            "--optimizer.state_dtype=bfloat16",
        ),
    ),
    "every 3rd layer recomputed, every 2nd with experts": (2, {"num_layers": 22, "sparse_step": 2}, EVERY_3RD),
    "CPU offload": (2, {"num_layers": 7}, ("--training.enable_cpu_offload",)),
    "compiled": (2, {"num_layers": 9, "sparse_step": 2}, ("--compile.enable", *OP)),
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_few_layers_give_the_trace_of_all(name, monkeypatch):
    world_size, numbers, words = (QUICK | SLOW)[name]
    whole = job(world_size, *words, **numbers)
    assert_expanded(whole, monkeypatch, num_steps=1 if name in QUICK else 2)


DOCUMENTS = ("--training.document_mask=eos",)
WINDOWS = {"num_layers": 9, "window_layers": (0, 2, 4, 6, 8)}
NO_POSITIONS = {"num_layers": 17, "layers_without_positions": every(4, 17)}
MASKS = {
    "windows in turn": ("gpt_oss", "debug_window", 2, OP, WINDOWS),
    "windows in turn, EP": ("gpt_oss", "debug_window", 2, ("--parallelism.expert_parallel_degree=2",), WINDOWS),
    "windows in turn, documents": ("gpt_oss", "debug_window", 2, DOCUMENTS, WINDOWS),
    "windows in turn, compiled": ("gpt_oss", "debug_window", 2, ("--compile.enable", *OP), WINDOWS),
    "chunks and none": ("llama4", "debug_scout", 2, (), NO_POSITIONS | {"sparse_layers": tuple(range(17))}),
    "chunks and none, documents": (
        "llama4",
        "debug_scout",
        2,
        (*DOCUMENTS, *OP),
        NO_POSITIONS | {"sparse_layers": tuple(range(17))},
    ),
    "and dense layers": ("llama4", "debug_maverick", 2, OP, NO_POSITIONS | {"sparse_layers": every(2, 17)}),
}


@pytest.mark.slow  # in the suite: test_expand.py's layers that differ
@pytest.mark.parametrize("name", MASKS)
def test_few_layers_of_each_attention_give_the_trace_of_all(name, monkeypatch):
    family, flavor, world_size, words, numbers = MASKS[name]
    assert_expanded(with_masks(family, flavor, world_size, *words, **numbers), monkeypatch, num_steps=1)


def test_layers_repeat_with_their_attention():
    assert repetitions(with_masks("gpt_oss", "debug_window", 1, **WINDOWS)) == [Repetition(period=2, alone=1)]
    for flavor in ("17bx16e_irope", "17bx128e_irope"):
        whole = resolve_job(load_config("qwen3_debug", [*FIXED, "--model.name=llama4", f"--model.flavor={flavor}"]), 1)
        assert repetitions(whole) == [Repetition(period=4, alone=3)]


def assert_expanded(whole: Job, monkeypatch, *, num_steps: int) -> None:
    captured = []

    def counted(job, **more):
        captured.append(len(job.split.modules[0]))
        return capture(job, **more)

    monkeypatch.setattr(ranks, "capture", counted)
    expanded = trace_rank(whole, rank=0, kernels=KERNELS, num_steps=num_steps)
    assert len(captured) == 1 and captured[0] < len(whole.split.modules[0])
    assert_same(expanded, capture(whole, rank=0, kernels=KERNELS, num_steps=num_steps))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "numbers"),
    [
        ("1F1B", {"num_layers": 16, "sparse_step": 2}),
        ("Interleaved1F1B", {"num_layers": 20}),
        ("Interleaved1F1B", {"num_layers": 26, "dense_layers": (0, 1)}),
    ],
)
def test_each_pipeline_rank_is_composed_as_it_runs(schedule, numbers, monkeypatch):
    words = (*PIPE, f"--parallelism.pipeline_parallel_schedule={schedule}", "--training.local_batch_size=6")
    whole = job(2, *words, **numbers)
    monkeypatch.setattr(ranks, "trace_rank", None)  # every rank is composed
    for pp_rank, trace in trace_ranks(whole, kernels=KERNELS).items():
        assert_same(trace, capture(whole, rank=global_rank(whole, pp_rank), kernels=KERNELS))


@pytest.mark.parametrize(
    ("numbers", "words", "repeats"),
    [
        ({}, (), Repetition()),
        ({"sparse_step": 2}, (), Repetition(period=2)),
        ({"sparse_step": 2}, EVERY_3RD, Repetition(period=6)),
        ({"dense_layers": (3,)}, (), Repetition(alone=4)),
        ({"dense_layers": (0,)}, (), Repetition(alone=1)),
        ({"dense_layers": (0, 1)}, EVERY_3RD, Repetition(period=3, alone=2)),
    ],
)
def test_layers_repeat_with_their_experts(numbers, words, repeats):
    assert repetitions(job(1, *words, **({"num_layers": 12} | numbers))) == [repeats]


def test_ranks_behind_the_dense_layers_share_a_capture():
    words = ("--parallelism.pipeline_parallel_degree=4", "--parallelism.pipeline_parallel_schedule=Interleaved1F1B")
    whole = job(4, *words, "--training.local_batch_size=8", num_layers=29, dense_layers=(0, 1))
    assert [each.alone for each in repetitions(whole)] == [2] + [0] * 7
    assert kinds_of_ranks(whole) == [[0], [1, 2], [3]]


def test_captured_layers_keep_their_numbers():
    """As many rows of counts as the whole model has layers with experts, and the kinds of the wanted layers."""
    whole = job(4, *PIPE, "--parallelism.pipeline_parallel_schedule=1F1B", num_layers=30, sparse_step=2)
    few = shallow_model(whole, rank=2)
    assert few.job.args == whole.args
    assert few.depths == (Depth(range(15, 22), range(15, 30), Repetition(period=2)),)
    blocks = whole.family.blocks(whole.args)
    (depth,) = few.depths
    for index, number in enumerate(depth.wanted):
        assert blocks[depth.captured[depth.template(index)]] == blocks[number]


@pytest.mark.parametrize(
    ("fqns", "counts", "owner"),
    [
        (["norm", *["0a", "1a", "1b", "2a", "3a", "3b"]], [1, 2, 1, 2], "*1+1,2"),
        (["norm", *["0a", "1a", "1b", "2a", "2b", "3a", "3b"]], [1, 2, 2, 2], "*1+1;2"),
        (["0a", "1a", "2a", "3a", "3b"], [1, 2, 1, 2], "*"),  # one of layer 1 is missing
    ],
)
def test_numbers_of_all_parameters_of_layers_that_differ(fqns, counts, owner):
    fqns = [f"layers.{fqn[0]}.{fqn[1]}" if fqn[0].isdigit() else fqn for fqn in fqns]
    assert owner_of_many(fqns, [{0, 1, 2, 3}], dict(enumerate(counts))) == owner
