"""A trace of few layers, expanded, against the trace of all of them, event for event."""

from dataclasses import replace

import pytest

import trainer.models.decoder as llama3_model
from converters.families.registry import get_family
from tests.models import gemma3
from titan_tools.memory.expand import ranks
from titan_tools.memory.expand.layers import Depth, expand_layers, shallow_model
from titan_tools.memory.expand.pieces import Aperiodic
from titan_tools.memory.expand.ranks import trace_rank
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import Block, StepPoint, Trace, TraceSegment
from titan_tools.memory.trace.kernels import Kernels
from titan_tools.memory.trace.recorder import owner_of_many
from trainer.config.sections import Config
from trainer.job.job import resolve
from trainer.job.record import Job
from trainer.optim import adam

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = Kernels("cuda", "cudnn", "fused", 1.0)
TINY = replace(
    get_family("llama3").flavors["debugmodel"],
    dim=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_hidden=128,
    vocab_size=512,
)
NO_AC = {"activation_checkpoint.mode": "none"}


def every(n: int) -> dict:
    return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": str(n)}


# Scales of all weights of a stage at once, after each update
PRECOMPUTED = {
    **NO_AC,
    "model.converters": ("quantize.linear.float8",),
    "float8.filter_fqns": ("output",),
    "float8.enable_fsdp_float8_all_gather": True,
    "float8.precompute_float8_dynamic_scale_for_fsdp": True,
}

# world size, layers, settings, rank: together every layout, way of recomputing, loss, update and kind of gathering
CASES = {
    "FSDP, every 2nd layer": (4, 8, every(2), 0),
    "FSDP, full, gathered for good": (
        4,
        5,
        {"activation_checkpoint.mode": "full", "parallelism.fsdp_reshard_after_forward": "never"},
        1,
    ),
    "HSDP, op, never left gathered": (
        4,
        5,
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 2,
            "parallelism.fsdp_reshard_after_forward": "always",
        },
        3,
    ),
    "TP": (2, 5, {**NO_AC, "parallelism.tensor_parallel_degree": 2}, 1),
    "FSDP x TP, full": (4, 5, {"activation_checkpoint.mode": "full", "parallelism.tensor_parallel_degree": 2}, 0),
    "CP, for-loop": (
        2,
        5,
        {**NO_AC, "parallelism.context_parallel_degree": 2, "optimizer.implementation": "for-loop"},
        0,
    ),
    "accumulation, plain loss": (2, 5, {**NO_AC, "training.global_batch_size": 8, "training.loss": "plain"}, 0),
    "foreach": (2, 5, {**NO_AC, "optimizer.implementation": "foreach"}, 0),
    "moments in bfloat16": (2, 5, {**NO_AC, "optimizer.state_dtype": "bfloat16"}, 0),
    "tied": (2, 5, {**NO_AC, "tied": True}, 0),
    "DDP": (2, 5, {**NO_AC, "parallelism.data_parallel_replicate_degree": 2}, 0),
    "PP, last rank": (
        2,
        10,
        {
            **NO_AC,
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_schedule": "1F1B",
            "training.local_batch_size": 2,
        },
        1,
    ),
}
# The slow set has all of them, deeper and for two steps
QUICK = (
    "FSDP, every 2nd layer",
    "TP",
    "PP, last rank",
)
INTERLEAVED = {
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
    "training.local_batch_size": 2,
}
SLOW_CASES = {
    **{f"{name}, {layers} layers": (world_size, layers * (2 if "PP" in name else 1), settings, rank)
       for name, (world_size, _, settings, rank) in CASES.items() for layers in (9, 12)},
    **{f"every 3rd of {layers}": (2, layers, every(3), 0) for layers in (9, 10, 11, 12)},
    "one rank": (1, 9, NO_AC, 0),
    "interleaved": (4, 24, {"activation_checkpoint.mode": "full", **INTERLEAVED}, 3),
    "precomputed scales, output's too": (2, 9, {**PRECOMPUTED, "float8.filter_fqns": ("wk",)}, 0),
    "precomputed scales, TP": (4, 9, {**PRECOMPUTED, "parallelism.tensor_parallel_degree": 2}, 3),
    "precomputed scales, compiled": (2, 7, {**PRECOMPUTED, "compile.enable": True}, 0),
    "precomputed scales, interleaved": (4, 20, {**PRECOMPUTED, **INTERLEAVED}, 3),
    "zero bubble": (
        4,
        20,
        {
            **NO_AC,
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
            "training.local_batch_size": 2,
        },
        0,
    ),
}  # fmt: skip


def job(num_ranks: int, num_layers: int, settings: dict):
    """Config, numbers and degrees of a tiny run."""
    config = replace(Config(), training=replace(Config().training, seq_len=64, local_batch_size=2))
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section:
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    args = replace(TINY, num_layers=num_layers, tied=settings.get("tied", False))
    return config, args, resolve(config.parallelism, num_ranks)


def assert_same(expanded, whole):
    for trace in (expanded, whole):
        assert trace.segments
    mine, theirs = (
        [(segment.point, event, trace.blocks[event if event >= 0 else ~event]) for segment, event in trace.events()]
        for trace in (expanded, whole)
    )
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        assert one == other, f"event {number}"
    assert len(mine) == len(theirs)


def num_layers(job: Job) -> int:
    """Number of layers that a job captures."""
    return sum(name.startswith("layers.") for modules in job.split.modules for name in modules)


@pytest.fixture
def depths_captured(monkeypatch):
    """The depths of the models that `trace_rank` captures, and their traces."""
    seen = {}

    def captured(job, **more):
        depth = num_layers(job)
        seen[depth] = capture(job, **more)
        return seen[depth]

    monkeypatch.setattr(ranks, "capture", captured)
    return seen


def compare(case, depths_captured, *, num_steps=2):
    *sizes, settings, rank = case
    config, args, dims = job(*sizes, settings)
    expanded = trace_rank(Job.of(config, args, dims), rank=rank, kernels=KERNELS, num_steps=num_steps)
    if few := shallow_model(Job.of(config, args, dims), rank=rank):
        assert list(depths_captured) == [num_layers(few.job)]
    assert_same(expanded, capture(Job.of(config, args, dims), rank=rank, kernels=KERNELS, num_steps=num_steps))


@pytest.mark.parametrize("name", QUICK)
def test_few_layers_give_the_trace_of_all(name, depths_captured):
    compare(CASES[name], depths_captured, num_steps=2 if "for good" in name else 1)
    assert min(depths_captured) < CASES[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_few_layers_give_the_trace_of_all_of_deeper_models(name, depths_captured):
    compare(SLOW_CASES[name], depths_captured)


def test_layers_that_differ_are_all_captured(monkeypatch, depths_captured):
    class Unequal(llama3_model.Transformer):
        """Every second layer leaves something behind."""

        def __init__(self, *args):
            super().__init__(*args)
            for number, layer in self.layers.items():
                if int(number) % 2:
                    layer.register_forward_hook(lambda module, inputs, output: output.exp().log())

    monkeypatch.setattr(llama3_model, "Transformer", Unequal)
    config, args, dims = job(1, 5, NO_AC)
    expanded = trace_rank(Job.of(config, args, dims), rank=0, kernels=KERNELS, num_steps=1)
    assert list(depths_captured) == [4, 5]
    assert expanded is depths_captured[5]


def test_parameters_that_differ_far_from_the_first_layers_are_seen():
    whole = Job.of(*job(2, 12, NO_AC))
    assert shallow_model(whole, rank=0)
    own = get_family("llama3")

    def parameters(args):
        return [
            replace(p, shape=(2 * p.shape[0], p.shape[1])) if "layers.8.attention.wq" in p.fqn else p
            for p in own.parameters(args)
        ]

    assert shallow_model(replace(whole, family=replace(own, parameters=parameters)), rank=0) is None


@pytest.mark.parametrize(("left_out", "captured"), [("wk", 4), ("layers.3.", 8), ("layers.8.", 12)])
def test_layers_of_which_some_are_in_float8_stand_for_themselves(left_out, captured):
    whole = Job.of(*job(2, 12, {**PRECOMPUTED, "float8.filter_fqns": ("output", left_out)}))
    few = shallow_model(whole, rank=0)
    assert (12 if few is None else num_layers(few.job)) == captured


def test_dense_layers_that_differ_are_expanded(depths_captured):
    """Gemma 3's: windows in two of three layers, no experts."""
    with gemma3.registered():
        config, args, dims = job(2, 12, every(3) | {"model.name": "gemma3", "model.flavor": "tiny"})
        args = replace(gemma3.GEMMA3.flavors["tiny"], num_layers=12, window_layers=tuple(n for n in range(12) if n % 3))
        whole = Job.of(config, args, dims)
        expanded = trace_rank(whole, rank=0, kernels=KERNELS, num_steps=1)
        assert min(depths_captured) < 12 and len(depths_captured) == 1
        assert_same(expanded, capture(whole, rank=0, kernels=KERNELS, num_steps=1))


@pytest.mark.slow
def test_precomputed_scales_are_as_many_as_there_are_weights(depths_captured):
    case = (2, 6, PRECOMPUTED, 0)
    compare(case, depths_captured, num_steps=1)
    config, args, dims = job(*case[:3])
    assert list(depths_captured) == [4]
    trace = expand_layers(depths_captured[4], shallow_model(Job.of(config, args, dims), rank=0).depths)
    assert 4 * 6 * 7 in [block.num_bytes for block in trace.blocks if block.owner == "*0+7"]


@pytest.mark.parametrize(
    ("fqns", "owner"),
    [
        (["norm", "layers.0.a", "layers.1.a", "layers.6.a", "layers.7.a"], "*1+1"),
        (["layers.6.a", "layers.6.b", "layers.7.a", "layers.7.b"], "*0+2@1"),
        (["output", "norm"], "*2+0"),
        (["layers.0.a", "layers.1.a", "layers.1.b"], "*"),
        (["layers.0.a"], "*"),
        (["layers.1.a", "layers.6.a"], "*"),
    ],
)
def test_numbers_of_many_parameters_belong_to_whole_stages(fqns, owner):
    """The rank holds layers 0 and 1, an embedding alone, and layers 6 and 7."""
    assert owner_of_many(fqns, [{0, 1}, set(), {6, 7}]) == owner


@pytest.mark.parametrize("implementation", ["fused", pytest.param("foreach", marks=pytest.mark.slow)])
def test_moments_updated_in_batches_repeat_from_layer_to_layer(implementation, monkeypatch, depths_captured):
    monkeypatch.setattr(adam, "COPIED_ELEMENTS", 20_000)  # a layer is more, its largest parameter less
    settings = {**NO_AC, "optimizer.state_dtype": "bfloat16", "optimizer.implementation": implementation}
    compare((2, 7, settings, 0), depths_captured, num_steps=1)
    assert min(depths_captured) < 7


def layered(*passes):
    """A trace of 4 layers: each pass (phase, step of a layer's events) runs over all of them."""
    trace = Trace()
    for phase, numbers, events_of in passes:
        for number in numbers:
            point = StepPoint(1, phase, module=f"layers.{number}")
            segment = TraceSegment(point)
            for event in events_of(number):
                if event >= 0:
                    trace.blocks.append(Block(100, "compute", "activations", point))
                    segment.events.append(len(trace.blocks) - 1)
                else:
                    segment.events.append(event)
            trace.segments.append(segment)
    return trace


def test_backward_frees_what_the_same_layer_kept():
    def of(depth):
        return layered(
            ("forward", range(depth), lambda number: [0]),
            ("backward", reversed(range(depth)), lambda number: [0, ~number, ~(2 * depth - 1 - number)]),
        )

    assert expand_layers(of(4), [Depth(range(4), range(9))]) == of(9)


@pytest.mark.parametrize(
    "events_of",
    [
        lambda number: [0, ~(3 - number)],  # another layer's, which moves
        lambda number: [~number] if number else [],  # not the first
        lambda number: [0] * number,
    ],
)
def test_passes_that_do_not_repeat_are_refused(events_of):
    trace = layered(("forward", range(4), lambda number: [0]), ("backward", range(4), events_of))
    with pytest.raises(Aperiodic):
        expand_layers(trace, [Depth(range(4), range(9))])


def test_states_that_belong_to_no_parameter_are_refused():
    """Nothing says how many of them a deeper model has."""
    trace = layered(("forward", range(4), lambda number: [0, ~number]))
    update = StepPoint(1, "optimizer")
    trace.blocks.append(Block(5000, "compute", "optimizer", update, owner="layers.0.attention.wq.weight"))
    trace.segments.append(TraceSegment(update, [4]))
    assert expand_layers(trace, [Depth(range(4), range(9))]).blocks[-1].num_bytes == 5000
    trace.blocks[4].owner = ""
    with pytest.raises(Aperiodic, match="keeps 5000 bytes that belong to no parameter"):
        expand_layers(trace, [Depth(range(4), range(9))])
