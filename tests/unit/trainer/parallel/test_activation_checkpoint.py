"""Activation checkpointing changes what is computed twice, never the numbers; each option reaches torch."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from converters.families.llama3 import FLAVORS
from trainer.config.load import load_config
from trainer.config.sections import ActivationCheckpoint, Compile
from trainer.models.decoder import Transformer
from trainer.models.units import Unit
from trainer.parallel.activation_checkpoint import (
    _kept_operations,
    _matrix_products,
    activation_checkpoint_problems,
    apply_activation_checkpoint,
    set_memory_budget,
)
from trainer.parallel.compile import apply_compile, compiles

ATTENTION, PRODUCT = "_scaled_dot_product_flash_attention_for_cpu", "mm"


class Count(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def gradients_and_calls(mode: str, option: str = "2", **settings) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    torch.manual_seed(0)
    model = Transformer(FLAVORS["debug_gqa"])  # 4 layers
    apply_activation_checkpoint(model, ActivationCheckpoint(mode=mode, selective_ac_option=option, **settings))
    with Count() as count:
        model(torch.arange(32).reshape(2, 16)).logsumexp(-1).sum().backward()
    return {fqn: parameter.grad for fqn, parameter in model.named_parameters()}, count.calls


PLAIN, PLAIN_CALLS = gradients_and_calls("none")


@pytest.mark.parametrize(
    ("mode", "option", "attentions_again", "products_again"),
    # a layer has 7 matrix products, of which the last need not be computed again to get gradients
    [("full", "2", 4, 4 * 7), ("selective", "1", 4, 4 * 7), ("selective", "3", 1, 7), ("selective", "op", 0, 4 * 3)],
)
def test_gradients_are_bit_equal_and_the_right_things_run_twice(mode, option, attentions_again, products_again):
    gradients, calls = gradients_and_calls(mode, option)
    assert gradients.keys() == PLAIN.keys()
    assert all(gradients[fqn].equal(PLAIN[fqn]) for fqn in PLAIN)
    assert calls[ATTENTION] - PLAIN_CALLS[ATTENTION] == attentions_again
    assert 0 < calls[PRODUCT] - PLAIN_CALLS[PRODUCT] <= products_again


# torchtitan v0.2.2, torchtitan/models/llama3/infra/parallelize.py, _op_sac_save_list
TORCHTITAN_KEEPS = {
    "aten.mm.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "aten.max.default",
    "flex_attention",
    "torch_attn._varlen_attn.default",
    "inductor_compiled_code",
}
# Torch never dispatches the first; the others' kernels do not run here: on other devices, in other models, compiled
# pieces of a layer
NOT_HERE = {
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "flex_attention",
    "torch_attn._varlen_attn.default",
    "inductor_compiled_code",
}
# The attention of CPUs, also within documents, and of context ranks in fp32; the choice of experts; products of Linears
# with a bias, of plain attention, in float8; rows of experts, of which torchtitan keeps the all-to-all
OWN = {
    "titan.exchange_counts.default",
    "titan.send_to_experts.default",
    "titan.return_from_experts.default",
    "titan.attend_within_documents.default",
    "aten.topk.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._efficient_attention_forward.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",
}


def test_what_op_keeps_is_what_torchtitan_keeps():
    kept = {str(operation) for operation in _kept_operations() | _matrix_products()}
    of_gpus = {"flex_attention", "torch_attn._varlen_attn.default"}  # known once a module of theirs is imported
    assert kept - of_gpus == (TORCHTITAN_KEEPS - NOT_HERE) | OWN


def test_every_nth_layer_counts_in_the_whole_model():
    model = Transformer(FLAVORS["debug_gqa"])
    del model.layers["0"]  # a later pipeline stage
    apply_activation_checkpoint(model, ActivationCheckpoint(mode="selective", selective_ac_option="2"))
    assert [number for number, layer in model.layers.items() if "forward" in vars(layer)] == ["1", "3"]


def test_early_stop_leaves_out_what_backward_does_not_need():
    whole, stopped = (gradients_and_calls("full", early_stop=early)[1][PRODUCT] for early in (False, True))
    assert whole - stopped == 4  # the last product of each layer


class Layer(nn.Module):
    """Anything that a test wants of a layer."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.given = forward

    def forward(self, x):
        return self.given(self.weight * x)


def run_layer(forward, **settings) -> torch.Tensor:
    """The gradient of a layer's weight, the layer being computed again in backward."""
    layer = Layer(forward)
    model = SimpleNamespace(units=lambda: [Unit("blocks.0", layer)])
    apply_activation_checkpoint(model, ActivationCheckpoint(mode="full", **settings))
    torch.manual_seed(1)
    layer(torch.ones(4)).sum().backward()
    return layer.weight.grad


def test_the_random_state_of_forward_is_kept_if_asked():
    drawn: list[torch.Tensor] = []

    def draw(x):
        drawn.append(torch.rand(4))
        return (x * drawn[-1]).sin()

    run_layer(draw, preserve_rng_state=True)
    assert drawn[0].equal(drawn[1])
    drawn.clear()
    run_layer(draw, preserve_rng_state=False)
    assert not drawn[0].equal(drawn[1])


def another_time() -> Callable:
    """A layer that saves tensors of another dtype when it runs again."""
    calls = []

    def forward(x):
        calls.append(x)
        return (x.double() if len(calls) > 1 else x).sin().float()

    return forward


def test_what_is_recomputed_is_compared_unless_asked_not_to():
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        run_layer(another_time())
    run_layer(another_time(), determinism_check="none")


def test_debug_tells_which_operations_ran():
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match=r"(?s)Operations executed.*sin"):
        run_layer(another_time(), debug=True)


@pytest.fixture
def budget_afterwards(tmp_path):
    yield
    torch._dynamo.reset()
    set_memory_budget(ActivationCheckpoint(mode="none"), tmp_path)


def kept_bytes(budget: float, tmp_path, **settings) -> int:
    """What a compiled model keeps for backward under a budget."""
    torch._dynamo.reset()
    chosen = ActivationCheckpoint(mode="memory_budget", memory_budget=budget, **settings)
    set_memory_budget(chosen, tmp_path)
    torch.manual_seed(0)
    model = Transformer(replace(FLAVORS["debug_gqa"], num_layers=1))
    apply_activation_checkpoint(model, chosen)
    apply_compile(model, Compile(enable=True, backend="aot_eager"))
    sizes = {}

    def count(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(torch.arange(64).reshape(2, 32)).sum().backward()
    return sum(sizes.values())


def test_a_smaller_budget_keeps_less(tmp_path, budget_afterwards):
    least, most = kept_bytes(0.0, tmp_path), kept_bytes(1.0, tmp_path)
    assert least < most
    assert not list(tmp_path.rglob("*.svg"))


@pytest.mark.slow
def test_the_trade_of_time_for_memory_is_drawn_if_asked(tmp_path, budget_afterwards):
    kept_bytes(0.5, tmp_path, visualize_memory_budget_pareto=True)
    (drawing,) = tmp_path.rglob("*.svg")
    assert drawing.parent == tmp_path / "memory_budget_pareto" and "<svg" in drawing.read_text()


AC, ZERO_BUBBLE = "--activation_checkpoint", "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"
OP = [f"{AC}.mode=selective", f"{AC}.selective_ac_option=op"]


@pytest.mark.parametrize(
    ("words", "pp", "message"),
    [
        ([f"{AC}.mode=memory_budget"], 1, ["--compile.enable"]),
        ([f"{AC}.mode=memory_budget", "--compile.enable", "--compile.components=loss"], 1, ["not compiled"]),
        ([f"{AC}.mode=memory_budget", "--compile.enable"], 1, []),
        ([*OP, ZERO_BUBBLE], 2, ["ZBVZeroBubble"]),
        ([*OP, ZERO_BUBBLE], 1, []),
        ([*OP, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"], 2, []),
        ([f"{AC}.mode=full", ZERO_BUBBLE], 2, ["recompute layers as often"]),
        ([*OP, f"{AC}.debug"], 1, ["mode = full"]),
        ([f"{AC}.mode=full", f"{AC}.debug"], 1, []),
        ([f"{AC}.mode=full", f"{AC}.debug", "--compile.enable"], 1, ["without compile"]),
        (
            [*OP, ZERO_BUBBLE, f"{AC}.debug", "--compile.enable"],
            2,
            ["as often", "only one of them", "does not run one by one"],
        ),
    ],
)
def test_what_cannot_be_is_reported_at_once(words, pp, message):
    config = load_config("debug", words)
    schedule = config.parallelism.pipeline_parallel_schedule if pp > 1 else None
    compiled = compiles(config.compile, "model")
    problems = activation_checkpoint_problems(config.activation_checkpoint, compiles_model=compiled, schedule=schedule)
    assert len(problems) == len(message)
    assert all(part in problem for part, problem in zip(message, problems, strict=True))
