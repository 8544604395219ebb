"""What compiled blocks and losses ask for: held to real compiled steps on a CPU, and to what partitioning must keep."""

import shlex
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends import common as backends
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

from converters.common.errors import UnsupportedError
from converters.families import registry as families
from tests.dist.training import Layout, args_of
from tests.real_memory import held_by_fake_rank, held_by_trace
from titan_tools.memory.expand.ranks import trace_ranks
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.compile import share_compiled_code, translate_compiler_errors
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.inductor_code import describe_gpu, run_without_kernels
from titan_tools.memory.trace.kernels import Kernels, gpu_kernels
from trainer.job.job import resolve
from trainer.job.record import Job
from trainer.models import registry as models
from trainer.parallel.compile import why_inductor_cannot
from trainer.parallel.expert_shards import SHARDS_WITH_LAYER
from trainer.ranks.gpus import GPUS

pytestmark = pytest.mark.usefixtures("one_thread")

INDUCTOR_HERE = why_inductor_cannot(torch.device("cpu")) is None
TP, CP = {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}
_TOKENS = 96
OPERATIONS = {"mode": "selective", "selective_ac_option": "op"}


def _layout(name: str, world_size: int, parallelism: dict | None = None, backend: str = "inductor", **recompute):
    sections = {
        "compile": {"enable": True, "backend": backend},
        "activation_checkpoint": {"mode": "none"} | recompute,
    }
    training = {"seq_len": _TOKENS // 2, "local_batch_size": 2, "loss_chunks": 2}
    return Layout(name, world_size, parallelism or {}, training, sections)


def _kept_by_layer(trace: Trace, layer: str) -> list[int]:
    """Bytes of what a layer's forward makes and leaves for backward, largest first."""
    made: dict[int, int] = {}
    for segment, event in trace.events():
        if segment.point.step == 1 and segment.point.phase == "forward":
            if event < 0:
                made.pop(~event, None)
            elif segment.point.module == layer and trace.blocks[event].part == "activations":
                made[event] = trace.blocks[event].num_bytes
    return sorted(made.values(), reverse=True)


def _both(layout: Layout):
    """What a trace holds, and a real step."""
    config, args = layout.config("debug_gqa"), replace(args_of("debug_gqa"), num_layers=2)
    dims = resolve(config.parallelism, layout.world_size)
    torch._dynamo.reset()
    try:
        real = held_by_fake_rank(config, args, dims, rank=0)
    finally:
        torch._dynamo.reset()
    return held_by_trace(capture(Job.of(config, args, dims), rank=0, kernels=Kernels())), real


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_run_operations_one_by_one_ask_for_the_same_in_a_trace(backend):
    fake, real = _both(_layout("", 2, backend=backend, **OPERATIONS))
    assert fake == real


@pytest.mark.slow
@pytest.mark.skipif(not INDUCTOR_HERE, reason="Inductor compiles C++ here, and there is no compiler")
@pytest.mark.parametrize(
    "layout",
    [
        _layout("FSDP 2", 2),
        _layout("FSDP 2, operations kept", 2, **OPERATIONS),
        _layout("FSDP 2 x TP 2", 4, TP),
        _layout("FSDP 2 x TP 2, operations kept", 4, TP, **OPERATIONS),
        _layout("CP 2", 2, CP),
    ],
    ids=lambda layout: layout.name,
)
def test_trace_is_what_a_step_compiled_by_inductor_asks_for(layout):
    fake, real = _both(layout)
    assert fake.peak_bytes == real.peak_bytes
    assert fake == real


@pytest.mark.slow
@pytest.mark.skipif(not INDUCTOR_HERE, reason="Inductor compiles C++ here, and there is no compiler")
@pytest.mark.parametrize(
    "layout",
    [
        _layout("full recomputation", 2, mode="full"),
        _layout("every 2nd layer", 2, mode="selective", selective_ac_option="2"),
        _layout("half a memory budget", 2, mode="memory_budget", memory_budget=0.5),
    ],
    ids=lambda layout: layout.name,
)
def test_trace_peaks_where_a_compiled_step_does_that_keeps_random_states_or_solves_for_a_budget(layout):
    """Allocations outside of the step: on the host, or during compilation."""
    fake, real = _both(layout)
    assert fake.peak_bytes == real.peak_bytes
    sizes = [Counter(num_bytes for _, num_bytes in held.asked) for held in (fake, real)]
    assert not sizes[0] - sizes[1]


@pytest.fixture(scope="module")
def on_gpu():
    """Traces on an H100 of three layers with attention, collectives and every second product kept: eager, compiled."""
    layout = _layout("", 2, **OPERATIONS)
    compiled = layout.config("debug_gqa")
    compiled = replace(compiled, training=replace(compiled.training, mixed_precision_param="bfloat16"))
    eager = replace(compiled, compile=replace(compiled.compile, enable=False))
    args, dims = replace(args_of("debug_gqa"), num_layers=3), resolve(compiled.parallelism, layout.world_size)
    kernels = gpu_kernels(GPUS["h100-80"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Torchinductor does not support code generation for complex")
        return [capture(Job.of(config, args, dims), rank=0, kernels=kernels) for config in (eager, compiled)]


def test_compiled_layer_keeps_for_a_gpu_what_it_keeps_eagerly_but_a_product_that_backward_never_asks_for(on_gpu):
    eager, compiled = (Counter(_kept_by_layer(trace, "layers.1")) for trace in on_gpu)
    last_product = _TOKENS * args_of("debug_gqa").dim * 2  # w2's, in bf16
    assert eager - compiled == Counter([last_product])
    assert not compiled - eager


def test_compiled_loss_makes_no_fp32_logits(on_gpu):
    piece = _TOKENS // 2 * args_of("debug_gqa").vocab_size * 4
    eager, compiled = (
        [block.num_bytes for block in trace.blocks if block.point.module == "output"].count(piece) for trace in on_gpu
    )
    assert eager > 0
    assert compiled == 0


def test_layers_of_a_compiled_model_are_alike_also_the_first_time(on_gpu):
    def sizes(step: int, phase: str, layer: str) -> list[int]:
        return [
            trace.blocks[event].num_bytes if event >= 0 else -trace.blocks[~event].num_bytes
            for segment in trace.segments
            if (segment.point.step, segment.point.phase, segment.point.module) == (step, phase, layer)
            for event in segment.events
        ]

    trace = on_gpu[1]
    for phase in ("forward", "backward"):
        first = sizes(1, phase, "layers.1")
        assert first
        assert sizes(2, phase, "layers.1") == first
    made = [[size for size in sizes(1, "forward", layer) if size > 0] for layer in ("layers.0", "layers.1")]
    assert made[0] == made[1]


@pytest.mark.slow
def test_context_rank_is_planned_for_a_gpu_where_there_is_none():
    """Its gathered sequence is put together by copies, which a torch without CUDA refuses on a GPU."""
    layout = _layout("", 2, CP, **OPERATIONS)
    config, dims = layout.config("debug_gqa"), resolve(layout.config("debug_gqa").parallelism, 2)
    args = replace(args_of("debug_gqa"), num_layers=1)
    trace = capture(Job.of(config, args, dims), rank=0, kernels=gpu_kernels(GPUS["h100-80"]), num_steps=1)
    assert _kept_by_layer(trace, "layers.0")


def test_written_code_runs_without_its_kernels():
    source = """
import triton
missing = triton.nowhere
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''no Python here''')
class Runner:
    def call(self, args):
        x, = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            assert_size_stride(x, (9,), (9,))
            assert_of_a_later_torch((x,), ((9,),), 'input')
            assert_more_of_it(x, (9,), dtype=torch.int8)
            buf0 = empty_strided_cuda((2, 3), (3, 1), torch.bfloat16)
            triton_poi_fused_0.run(x, buf0, 6, stream=get_raw_stream(0))
            buf1 = torch.ops.aten.full.default([2], 1.0, device=device(type='cuda', index=0))
            buf2 = reinterpret_tensor(buf0, (3, 2), (1, 3), 0); del buf0
        return (buf1, buf2, constant0)
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
assert_of_a_later_torch = torch._C._dynamo.guards.assert_of_a_later_torch
from torch._inductor.runtime.runtime_utils import assert_more_of_it
runner = Runner()
call = runner.call
"""
    module = run_without_kernels(source, {"constant0": 7})
    inputs = [torch.empty(2, 3)]
    made, view, constant = module.call(inputs)
    assert inputs == []
    assert (made.device.type, made.tolist()) == ("cpu", [1.0, 1.0])
    assert (view.shape, view.stride(), view.dtype, constant) == ((3, 2), (1, 3), torch.bfloat16, 7)


@pytest.mark.slow
def test_ranks_of_a_pipeline_share_a_compiled_layer_and_are_what_each_is_alone(monkeypatch):
    layout = _layout(
        "", 4, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B", **TP}, "aot_eager"
    )
    config, args = layout.config("debug_gqa"), replace(args_of("debug_gqa"), num_layers=4)
    config, dims = (
        replace(config, compile=replace(config.compile, components=("model",))),
        resolve(config.parallelism, 4),
    )
    once, compiled = backends.aot_module_simplified, []
    monkeypatch.setattr(
        backends, "aot_module_simplified", lambda *args, **named: compiled.append(1) or once(*args, **named)
    )
    with share_compiled_code(config):
        traces = trace_ranks(Job.of(config, args, dims), kernels=Kernels(), num_steps=1)
    assert len(compiled) == 1  # also for a rank's second stage
    assert traces[1] == capture(Job.of(config, args, dims), rank=2, kernels=Kernels(), num_steps=1)
    assert len(compiled) == 2


@pytest.mark.slow
@pytest.mark.skipif(not SHARDS_WITH_LAYER, reason="this torch does not compile layers with expert parallelism")
@pytest.mark.parametrize("degrees", [{}, TP], ids=["ep", "ep, tp"])
def test_ranks_of_a_pipeline_share_a_compiled_layer_with_experts(degrees):
    """The group of a rank's experts has another name in each stage of the pipeline."""
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B", "expert_parallel_degree": 2}
    config = _layout("", 4, pipeline | degrees, "eager").config("qwen3/debug_moe")
    config = replace(config, compile=replace(config.compile, components=("model",)))
    job = Job.of(config, args_of("qwen3/debug_moe"), resolve(config.parallelism, 4))
    counters.clear()
    with share_compiled_code(config):
        trace_ranks(job, kernels=Kernels(), num_steps=1)
    assert counters["stats"]["unique_graphs"] == 1


def test_code_is_kept_within_a_job_as_many_variants_as_its_captures_make_and_forgotten_afterwards():
    config, compiled = _layout("", 1).config("debug"), []
    function = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: compiled.append(1) or graph.forward)
    limit = torch._dynamo.config.recompile_limit
    with share_compiled_code(config):
        for capture_number in (1, 2, 3):
            with share_compiled_code(config):
                function(torch.ones(2))
                assert torch._dynamo.config.recompile_limit == limit * capture_number
        assert len(compiled) == 1
    assert torch._dynamo.config.recompile_limit == limit
    function(torch.ones(2))  # which is to compute: code of a trace has no kernels
    assert len(compiled) == 2


def _breaks(x):
    torch._dynamo.graph_break()
    return x


def _fails_in_inductor(error: Exception):
    def sine(x):
        return x.sin()

    def fails(*unused, **named):
        raise error

    return sine, fails


@pytest.mark.parametrize(
    ("function", "lowering", "message"),
    [
        (_breaks, None, "torch.compile fails on this model: Unsupported: Call to .*graph_break.*in _breaks"),
        (*_fails_in_inductor(ValueError("cannot\nlonger")), "torch.compile fails on this model: ValueError: cannot$"),
        (*_fails_in_inductor(UnsupportedError("not covered")), "^not covered$"),
    ],
    ids=["Dynamo", "Inductor", "an error of ours"],
)
def test_compiler_failures_are_reported(function, lowering, message, monkeypatch):
    torch._dynamo.reset()
    if lowering:
        monkeypatch.setattr(GraphLowering, "call_function", lowering)
    with pytest.raises(UnsupportedError, match=message) as caught, translate_compiler_errors():
        torch.compile(function, fullgraph=True)(torch.ones(2))
    assert getattr(caught.value, "nearest", {}) == ({} if message == "^not covered$" else {"compile.enable": "false"})


_OWN_FAMILY = """
from dataclasses import replace

from converters.families import registry as families
from converters.families.llama3 import LLAMA3
from trainer.models import registry as models


def build_model(args):
    from trainer.models.decoder import Transformer, TransformerBlock

    class Block(TransformerBlock):
        def forward(self, x, rotations):
            return super().forward(print(end="") or x, rotations)

    model = Transformer(args)
    for layer in model.layers.values():
        layer.__class__ = Block
    return model


families.register(replace(LLAMA3, name="prints"))
models.register("prints", replace(models.get_trainer_family("llama3"), build_model=build_model))
"""


def test_a_model_that_does_not_compile_in_a_pipeline_is_refused_with_a_working_command(titan, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "_FAMILIES", {**families.all_families()})
    monkeypatch.setattr(models, "_FAMILIES", {**models._FAMILIES})
    (tmp_path / "family_that_prints.py").write_text(_OWN_FAMILY)
    words = ["debug", "--experimental.custom_import", tmp_path / "family_that_prints.py", "--model.name", "prints"]
    words += ["--parallelism.tensor_parallel_degree=1", "--parallelism.pipeline_parallel_degree=2"]
    words += ["--parallelism.data_parallel_shard_degree=1", "--model.flavor=debug_gqa"]
    code, out, err = titan("estimate-memory", *words, "--world-size", "2", "--compile.enable")
    assert (code, out) == (2, "")
    *work, error, hint, line = err.splitlines()
    assert all(doing.endswith(" …") for doing in work)
    assert "torch.compile fails on this model: Unsupported: " in error and "family_that_prints.py" in error
    assert hint.startswith("hint: uncompiled, ")
    tried = shlex.split(line.removeprefix("try: titan "))
    assert "--compile.enable=false" in tried and "--compile.enable" not in tried
    assert titan(*tried)[0] == 0


def test_generated_code_that_cannot_be_followed_is_refused_and_other_errors_are_raised():
    module = run_without_kernels("def call(args):\n    return unheard_of(args)\n", {})
    with pytest.raises(UnsupportedError, match="NameError: name 'unheard_of'"), translate_compiler_errors():
        module.call([])
    with pytest.raises(NameError), translate_compiler_errors():
        unheard_of()  # noqa: F821


def test_gpu_is_described_only_within():
    asked_before = CudaInterface.get_device_properties
    with describe_gpu():
        properties = CudaInterface.get_device_properties(torch.device("cuda", 0))
        assert (properties.multi_processor_count, CudaInterface.get_compute_capability()) == (132, 90)
    assert CudaInterface.get_device_properties is asked_before
