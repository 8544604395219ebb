"""Compiled blocks: the same numbers, one graph for all layers and steps, and what is refused with its reason."""

import warnings
from dataclasses import fields, replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from converters.families import deepseek_v3, gpt_oss, llama4, qwen3
from converters.families.llama3 import FLAVORS
from trainer.config.load import load_config
from trainer.config.sections import ActivationCheckpoint, Compile, Config
from trainer.models.registry import get_trainer_family
from trainer.parallel import compile as feature
from trainer.parallel.activation_checkpoint import apply_activation_checkpoint, set_memory_budget
from trainer.parallel.compile import apply_compile, compile_machine_problems, compile_problems

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ARGS = replace(FLAVORS["debug_gqa"], num_layers=2)
MODES = {
    "none": ActivationCheckpoint(mode="none"),
    "full": ActivationCheckpoint(mode="full"),
    "op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "every 2nd": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "memory budget": ActivationCheckpoint(mode="memory_budget", memory_budget=0.2),
}


QUICK_MODES = ("op", "memory budget")


def configure(*words: str) -> Config:
    return load_config("debug", list(words))


def machine_problems(config: Config, device: torch.device) -> list[str]:
    tp = config.parallelism.tensor_parallel_degree
    return compile_machine_problems(config.compile, config.activation_checkpoint, device, tp=tp)


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path):
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    set_memory_budget(ActivationCheckpoint(mode="none"), tmp_path)


def build(family: str = "llama3", mode: str = "none", backend: str | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    numbers = qwen3.Qwen3Args(**{f.name: getattr(ARGS, f.name) for f in fields(ARGS)}) if family == "qwen3" else ARGS
    model = get_trainer_family(family).build_model(numbers)
    apply_activation_checkpoint(model, MODES[mode])
    if backend:
        apply_compile(model, Compile(enable=True, backend=backend))
    return model


def gradients(model: torch.nn.Module, seq_len: int = 16) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(torch.arange(2 * seq_len).reshape(2, -1)).logsumexp(-1).sum().backward()
    return {fqn: parameter.grad for fqn, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_no_graph_of_a_compiled_block_has_complex_numbers(family):
    """Inductor has no code for them. The eager rotation of interleaved pairs is one complex product."""
    dtypes = set()

    def look(graph, inputs):
        values = [node.meta.get("val") for node in graph.graph.nodes]
        dtypes.update(value.dtype for value in values if isinstance(value, torch.Tensor))
        return make_boxed_func(graph.forward)

    gradients(build(family, "op", aot_autograd(fw_compiler=look, bw_compiler=look)))
    assert torch.float32 in dtypes
    assert not [dtype for dtype in dtypes if dtype.is_complex]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_inductor_warns_of_no_complex_numbers(family):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Torchinductor does not support code generation for complex")
        gradients(build(family, "op", "inductor"))


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("llama3", mode) for mode in QUICK_MODES),
        pytest.param("qwen3", "op", marks=pytest.mark.slow),
        *(pytest.param("llama3", mode, marks=pytest.mark.slow) for mode in MODES if mode not in QUICK_MODES),
        pytest.param("qwen3", "none", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_eager_model(family, mode, tmp_path):
    set_memory_budget(MODES[mode], tmp_path)
    expected, found = gradients(build(family)), gradients(build(family, mode, "aot_eager"))
    assert found.keys() == expected.keys()
    for fqn, gradient in expected.items():
        assert (found[fqn] - gradient).norm() <= 1e-5 * gradient.norm(), fqn
    assert counters["stats"]["unique_graphs"] == (2 if mode == "every 2nd" else 1)


@pytest.mark.parametrize(
    ("family", "args"),
    [
        ("gpt_oss", replace(gpt_oss.FLAVORS["debug_window"], num_layers=1)),
        pytest.param("llama4", replace(llama4.FLAVORS["debug_scout"], num_layers=1), marks=pytest.mark.slow),
        pytest.param("qwen3", replace(qwen3.FLAVORS["debug_moe"], num_layers=1), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", replace(deepseek_v3.FLAVORS["debug_v3"], num_layers=2), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gradients_of_experts_are_those_of_the_eager_model(family, args):
    """torch 2.11 compiles autograd functions that change their result in place to ones without gradients."""
    found = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = get_trainer_family(family).build_model(args)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        for buffer in model.buffers():
            buffer.zero_()
        if backend:
            apply_compile(model, Compile(enable=True, backend=backend))
        found.append(gradients(model))
    expected, found = found
    for fqn, gradient in expected.items():
        assert gradient.any(), fqn
        assert (found[fqn] - gradient).norm() <= 1e-5 * gradient.norm(), fqn


def test_layers_and_steps_share_one_graph_and_validation_has_one_more():
    model = build(backend="aot_eager")
    for _ in range(3):
        gradients(model)
    assert counters["stats"]["unique_graphs"] == 1
    for _ in range(2):
        with torch.no_grad():
            model.eval()(torch.arange(96).reshape(4, 24))  # other batch, other length
        gradients(model.train())
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_a_layer_that_falls_in_pieces_is_an_error():
    model = build()
    model.layers["1"].feed_forward.forward = lambda x: (torch._dynamo.graph_break(), x)[1]
    apply_compile(model, Compile(enable=True, backend="aot_eager"))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        gradients(model)


def test_names_stay_and_hooks_stay_outside():
    model = build(backend="aot_eager")
    assert list(model.state_dict()) == list(build().state_dict())
    is_traced = []
    model.layers["0"].register_forward_hook(lambda *_: is_traced.append(torch.compiler.is_compiling()))
    gradients(model)
    assert is_traced == [False]


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_a_split_backward_is_refused_with_what_would_do(schedule):
    words = [f"--parallelism.pipeline_parallel_schedule={schedule}", "--compile.enable"]
    compiled, loss_only = configure(*words), configure(*words, "--compile.components=loss")
    (problem,) = compile_problems(compiled.compile, schedule=schedule)
    assert schedule in problem and "161904" in problem and "Interleaved1F1B" in problem
    assert compile_problems(compiled.compile, schedule=None) == []
    assert compile_problems(loss_only.compile, schedule=schedule) == []
    assert compile_problems(configure(words[0]).compile, schedule=schedule) == []


def test_an_unknown_backend_is_refused_with_the_list():
    (problem,) = compile_problems(configure("--compile.enable", "--compile.backend=indcutor").compile, schedule=None)
    assert "'indcutor'" in problem and "aot_eager" in problem and "inductor" in problem
    assert compile_problems(configure("--compile.backend=indcutor").compile, schedule=None) == []  # not in use


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0"])
def test_the_backend_eager_is_refused_where_torch_loses_gradients(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    problems = machine_problems(configure("--compile.enable", "--compile.backend=eager"), CPU)
    assert ["pytorch#180642" in problem for problem in problems] == [True] * version.startswith("2.11")
    assert machine_problems(configure("--compile.enable", "--compile.backend=aot_eager"), CPU) == []


def test_inductor_without_a_compiler_is_refused_with_what_would_do(monkeypatch):
    def none_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    (problem,) = machine_problems(configure("--compile.enable"), CPU)
    assert "needs a C++ compiler" in problem and "aot_eager" in problem
    assert machine_problems(configure("--compile.enable", "--compile.backend=aot_eager"), CPU) == []
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    (problem,) = machine_problems(configure("--compile.enable"), CUDA)
    assert "Triton" in problem
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    assert machine_problems(configure("--compile.enable"), CUDA) == []


def test_whole_layers_again_under_tensor_parallelism_are_refused_where_torch_fails():
    fails = "2.13" <= torch.__version__ < "2.14"
    words = ["--compile.enable", "--compile.backend=aot_eager", "--parallelism.tensor_parallel_degree=2"]
    full = [*words, "--activation_checkpoint.mode=full"]
    assert any("mixes up" in p for p in machine_problems(configure(*full), CPU)) == fails
    assert feature._confuses_saved_tensors(configure(*full).activation_checkpoint, CUDA) is False
    assert machine_problems(configure(*words, "--activation_checkpoint.selective_ac_option=op"), CPU) == []


def has_compiler() -> bool:
    return feature.why_inductor_cannot(CPU) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_inductor_gives_the_same_gradients(family):
    if not has_compiler():  # then it is refused, which the other test is about
        assert machine_problems(configure("--compile.enable"), CPU)
        return
    expected, found = gradients(build(family)), gradients(build(family, backend="inductor"))
    for fqn, gradient in expected.items():
        assert (found[fqn] - gradient).norm() <= 1e-5 * gradient.norm(), fqn
