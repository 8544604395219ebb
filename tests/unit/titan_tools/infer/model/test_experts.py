"""Mixture-of-experts layers of inference against transformers: in every form of weights, alone and in batches."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.qwen3_moe import add_biases, write_native
from tests.models.qwen3_moe import write as write_experts
from tests.tiny_infer import CPU, load
from titan_tools.infer.decoding.engine import Engine, RowTokens
from titan_tools.infer.model import experts as experts_file
from titan_tools.infer.model import linear
from titan_tools.infer.model import load as load_file
from titan_tools.infer.model.experts import RoutedExperts, SeparateWeights, SortedRows, StackedWeights
from titan_tools.infer.model.linear import PackedWeight, WidenedWeight, can_pack
from trainer.parallel.compile import why_inductor_cannot

PROMPT = [(37 * n + 11) % 97 for n in range(40)]
NEXT = [5, 96, 0, 41]
SPARSE = (0, 1, 3)  # the layers with experts
BIASES = {n: 0.2 * torch.randn(12, generator=torch.Generator().manual_seed(n)) for n in SPARSE}
TO_ONE = {n: torch.tensor([0.0] * 9 + [10.0, 0.0, 0.0]) for n in SPARSE}  # to the tenth, whatever the scores
pytestmark = pytest.mark.usefixtures("one_thread")


class Case:
    """A folder under native names, transformers' model with the same biases, and what that says of PROMPT + NEXT."""

    def __init__(self, folder, *, biases=BIASES, **numbers):
        self.folder = folder / "native"
        self.model = write_experts(folder / "hf", **numbers)
        self.model.set_experts_implementation("eager")  # torch's product knows no float64, and no rows of odd length
        write_native(self.folder, self.model, biases)
        add_biases(self.model, biases)
        self.logits = self.logits_of(self.model)
        exact = deepcopy(self.model).double()
        self.error = (self.logits - self.logits_of(exact)).abs().max()
        self.largest = self.logits.abs().max()

    @torch.inference_mode()
    def logits_of(self, model):
        return model(torch.tensor([[*PROMPT, *NEXT]])).logits[0, -1 - len(NEXT) :]

    def assert_near(self, found):
        assert (found - self.logits).abs().max() <= max(1e-5 * self.largest, 4 * self.error)


def logits_of(model, *, rows=1, row=0, **engine):
    """After PROMPT, and after each of NEXT in a decode step, [5, V]; the other rows hold other sequences."""
    engine = Engine(model, rows=rows, room=64, **engine)
    others = [RowTokens(n, PROMPT[n + 1 :: 2]) for n in range(rows) if n != row]
    if others:
        engine.prefill_rows(others)
    logits = [engine.prefill(row, PROMPT)]
    for number, token in enumerate(NEXT):
        logits.append(engine.decode([token if n == row else (7 * n + number) % 97 for n in range(rows)])[row])
    return torch.stack(logits)


NUMBERS = {
    "mixed": {},
    "square experts, weights not normalized": {"moe_intermediate_size": 32, "norm_topk_prob": False},
    "one of many": {"num_experts": 33, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    "all of two": {"num_experts": 2, "num_experts_per_tok": 2, "mlp_only_layers": []},
    "rows of odd length": {"moe_intermediate_size": 7, "decoder_sparse_step": 2, "mlp_only_layers": []},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(params=["separate", "stacked"])
def form(request):
    """Options of `load`."""
    return {"packed": request.param != "stacked"}


def layers_with_experts(model):
    return [module for module in model.body.modules() if isinstance(module, RoutedExperts)]


@pytest.mark.parametrize("called", NUMBERS)
def test_logits_are_those_of_transformers(tmp_path, called, form):
    biases = {} if called in ("one of many", "all of two", "rows of odd length") else BIASES
    case = Case(tmp_path, biases=biases, **NUMBERS[called])
    model = load(case.folder, **form)
    case.assert_near(logits_of(model))
    for rows, row in ((3, 1), (8, 7)):
        case.assert_near(logits_of(model, rows=rows, row=row))


def test_all_tokens_on_one_expert(tmp_path, form):
    """And eleven without any."""
    case = Case(tmp_path, biases=TO_ONE, num_experts_per_tok=1)
    case.assert_near(logits_of(load(case.folder, **form), rows=3))


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_step_of_fixed_shapes_says_the_same(mixed, rows):
    """Compiled without graph breaks, so that no operation waits for the router's choice."""
    found = logits_of(load(mixed.folder, packed=False), rows=rows, compile=True, backend="eager")
    torch._dynamo.reset()
    mixed.assert_near(found)


@pytest.mark.slow
@pytest.mark.skipif(why_inductor_cannot(CPU) is not None, reason="nothing to compile C++ with")
@pytest.mark.parametrize("how", [None, "int8", "float8"])
def test_a_step_that_inductor_compiled_says_what_an_eager_one_says(mixed, how):
    model = load(mixed.folder, packed=False, quantize=how)
    eager, compiled = (logits_of(model, rows=3, row=1, compile=compile) for compile in (False, True))
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


def test_products_by_expert_can_be_part_of_a_graph_where_the_gpu_has_a_kernel(mixed, monkeypatch):
    """Many rows in bfloat16; the kernel's own check of the device is skipped here."""
    model = load(mixed.folder, packed=False, dtype=torch.bfloat16)
    layer = layers_with_experts(model)[0]
    layer.experts.gate_up._groups = layer.experts.down._groups = True
    layer.experts.gate_up._has_kernel = layer.experts.down._has_kernel = True
    x = torch.randn(8, 1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr(StackedWeights, "multiply_chosen", lambda *_: pytest.fail("8 * 3 rows of 12 experts"))
    monkeypatch.setattr(experts_file, "grouped_product", lambda x, w, ends: x.new_ones(len(x), w.shape[1]))
    with torch.inference_mode():
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


class Unread:
    """The weight of an expert that nobody has chosen."""

    @classmethod
    def __torch_function__(cls, *_, **__):
        pytest.fail("read a weight that the step does not need")


def test_a_decode_step_reads_the_chosen_experts_only(mixed):
    model = load(mixed.folder)
    engine, chosen = Engine(model, rows=2, room=64), []
    engine.prefill_rows([RowTokens(0, PROMPT), RowTokens(1, PROMPT[::-1])])
    layers = layers_with_experts(model)
    hooks = [layer.router.register_forward_hook(lambda _, __, routes: chosen.append(routes[0])) for layer in layers]
    expected = engine.decode([3, 4])
    for row in (0, 1):
        engine.copy_row(row, row, length=len(PROMPT))
    for layer, ids_TK in zip(layers, list(chosen), strict=True):
        assert len(set(ids_TK.flatten().tolist())) <= 6
        for weights in (layer.experts.gate_up, layer.experts.down):
            for e in set(range(12)) - set(ids_TK.flatten().tolist()):
                weights.weights[e] = Unread()
    assert torch.equal(engine.decode([3, 4]), expected)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("how", ["compiled", "gathered"])
def test_a_step_of_fixed_shapes_reads_the_chosen_experts_only(how, monkeypatch):
    monkeypatch.setattr(linear, "_GATHERED_ELEMENTS", 2 * 6 * 4)  # two rows at a time
    multiply = experts_file._chosen_products if how == "compiled" else experts_file._gathered_products
    generator = torch.Generator().manual_seed(0)
    data_EOI, x_RI = torch.randn(5, 6, 4, generator=generator), torch.randn(7, 4, generator=generator)
    ids_R = torch.tensor([3, 0, 3, 3, 1, 0, 3])
    data_EOI[[2, 4]] = torch.nan
    expected = torch.stack([data_EOI[e] @ x for e, x in zip(ids_R.tolist(), x_RI, strict=True)])
    torch.testing.assert_close(multiply(x_RI, data_EOI, None, ids_R), expected)
    scale_EO = torch.rand(5, 6, generator=generator)
    torch.testing.assert_close(multiply(x_RI, data_EOI, scale_EO, ids_R), expected * scale_EO[ids_R])


def test_rows_are_in_the_order_of_experts_and_of_tokens_again():
    ids_TK = torch.tensor([[11, 2], [0, 11], [2, 11]])
    rows, x_TD = SortedRows(ids_TK, 13), torch.arange(3.0)[:, None]
    assert rows.spans == [(0, 0, 1), (2, 1, 3), (11, 3, 6)]
    assert rows.of_experts(x_TD).flatten().tolist() == [1, 0, 2, 0, 1, 2]
    assert rows.of_tokens(rows.of_experts(x_TD)).flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_the_forms_of_weights_are_those_that_a_cpu_multiplies(mixed, form):
    for layer in layers_with_experts(load(mixed.folder, **form)):
        for weights in (layer.experts.gate_up, layer.experts.down):
            assert type(weights) is (SeparateWeights if form["packed"] else StackedWeights)
            assert all(type(weight) is torch.Tensor for weight in weights.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_with_experts_are_packed_unless_in_fp32(mixed, monkeypatch, dtype):
    plain = logits_of(load(mixed.folder, dtype=dtype))
    monkeypatch.setattr(linear, "_LEAST_PACKED_BYTES", 1)
    packs = dtype == torch.bfloat16 and can_pack((48, 32), dtype, CPU)
    model = load(mixed.folder, dtype=dtype)
    weights = [model.head.weight, *layers_with_experts(model)[0].experts.down.weights]
    assert all(isinstance(weight, PackedWeight) == packs for weight in weights)
    assert (logits_of(model) - plain).abs().max() <= (0.05 * plain.abs().max() if packs else 0)


def test_sixteen_bits_are_widened_where_a_cpu_has_no_products_for_them(mixed, monkeypatch):
    monkeypatch.setattr(load_file, "multiplies", lambda dtype, device: dtype == torch.float32)
    model = load(mixed.folder, dtype=torch.bfloat16)
    assert isinstance(layers_with_experts(model)[0].experts.down.weights[11], WidenedWeight)
    assert F.cosine_similarity(logits_of(model), mixed.logits).min() > 0.99


def test_routers_compute_in_fp32_from_what_the_checkpoint_says(mixed):
    model = load(mixed.folder, dtype=torch.bfloat16)
    for number, layer in zip(SPARSE, layers_with_experts(model), strict=True):
        theirs = mixed.model.model.layers[number].mlp.gate.weight
        assert torch.equal(layer.router.gate.weight, theirs) and torch.equal(layer.expert_bias, BIASES[number])
        assert layer.experts.down.weights[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "packed", [pytest.param(True, id="separate"), pytest.param(False, id="stacked", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("how", [pytest.param("int8", marks=pytest.mark.slow), "float8"])
def test_eight_bits_are_those_of_torchao_for_each_expert(mixed, how, packed):
    """torchao does not know the class's experts: each becomes a linear layer for it."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    def round_(weight):
        layer = nn.Linear(*weight.shape[::-1], bias=False)
        layer.weight = nn.Parameter(weight.detach().clone())
        config = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[how]
        quantize_(layer, config(version=2, set_inductor_config=False))
        return layer.weight.dequantize()

    theirs = deepcopy(mixed.model)
    with torch.no_grad():
        for name, module in theirs.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(round_(module.weight))
            elif name.endswith("mlp.experts"):
                for matrices in (module.gate_up_proj, module.down_proj):
                    for matrix in matrices:
                        matrix.copy_(round_(matrix))
    add_biases(theirs, BIASES)
    model = load(mixed.folder, quantize=how, packed=packed)
    for rows in (1, 3):
        torch.testing.assert_close(logits_of(model, rows=rows), mixed.logits_of(theirs), rtol=1e-4, atol=1e-4)
    if not packed:
        found = logits_of(model, rows=3, compile=True, backend="eager")
        torch._dynamo.reset()
        torch.testing.assert_close(found, mixed.logits_of(theirs), rtol=1e-4, atol=1e-4)


def test_bytes_of_a_step_are_those_of_the_experts_that_it_reads(mixed, form):
    model = load(mixed.folder, **form)
    one = 3 * 32 * 24 * 4  # three matrices in fp32
    assert [model.expert_bytes(num) for num in (1, 2)] == [3 * 3 * one, 3 * round((1 - 0.75**2) * 12 * one)]
    assert model.expert_bytes(1000) == 3 * 12 * one
    others = [p for name, p in mixed.model.named_parameters() if "embed" not in name and ".experts." not in name]
    assert model.bytes_per_token == sum(p.nbytes for p in others)
