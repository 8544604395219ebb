"""Weights kept as float8 codes with scales of blocks say what they say where they are dequantized while reading."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from converters.quantized.stored_blocks import BlocksSource
from converters.source.weights import open_native
from tests.fp8_folders import dequantize, quantize, write_fp8
from tests.models.deepseek import write as write_deepseek
from tests.models.dense import write as write_tiny
from tests.models.llama import write as write_llama
from tests.models.llama import write_tokenizer
from tests.models.qwen3_moe import write as write_experts
from tests.tiny_infer import CPU, load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import fp8_blocks
from titan_tools.infer.model.compiling import compile_all_shapes
from titan_tools.infer.model.experts import RoutedExperts, SortedRows, StoredExperts
from titan_tools.infer.model.fp8_blocks import Fp8Slice, block_product, choose_products, values_products
from titan_tools.infer.model.load import load_model
from titan_tools.infer.model.stored_weight import StoredWeight
from trainer.parallel.compile import why_inductor_cannot

PROMPT = [(37 * n + 11) % 97 for n in range(30)]
NEXT = [5, 96, 0]
TORCHS_SCALED_MM = F.scaled_mm
MODELS = {  # some sizes are no multiple of a block's
    "qwen3": lambda f: write_tiny(f, "qwen3", numbers={"hidden_size": 192, "intermediate_size": 320}, std=0.05),
    "experts": lambda f: write_experts(f, hidden_size=192, moe_intermediate_size=160, intermediate_size=320),
    "v3": lambda f: write_deepseek(f, hidden_size=192, moe_intermediate_size=160, kv_lora_rank=144, q_lora_rank=132),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("hf")
    MODELS[request.param](place / "plain")
    return write_fp8(place / "fp8", place / "plain")


def load_stored(folder, *, dtype=torch.float32, tp=1, rank=0, **options):
    with open_native(folder) as weights:
        source = BlocksSource(weights.source)
        return load_model(source, weights.info, dtype=dtype, device=CPU, tp=tp, rank=rank, quantize="stored", **options)


def said_by(model, **options):
    engine = Engine(model, rows=2, room=64, **options)
    logits = [engine.prefill(0, PROMPT), engine.prefill(1, PROMPT[3:9])]
    logits += [logits for token in NEXT for logits in engine.decode([token, (token + 1) % 97])]
    return torch.stack(logits)


def stored_weights(model):
    return [each for each in model.body.modules() if isinstance(each, StoredWeight | StoredExperts)]


def test_logits_are_those_of_dequantized_weights(folder):
    model, reference = load_stored(folder), load(folder)
    assert stored_weights(model)
    torch.testing.assert_close(said_by(model), said_by(reference), rtol=1e-5, atol=1e-5)
    assert model.bytes_per_token < 0.5 * reference.bytes_per_token


@pytest.mark.slow
def test_bfloat16_is_near(folder):
    model, reference = load_stored(folder, dtype=torch.bfloat16), load(folder, dtype=torch.bfloat16)
    expected = said_by(reference).float()
    assert (said_by(model).float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["v3"], indirect=True)
def test_steps_of_fixed_shapes_say_the_same(folder):
    found = said_by(load_stored(folder, packed=False), compile=True, backend="eager")
    torch._dynamo.reset()
    torch.testing.assert_close(found, said_by(load(folder)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_ranks_slice_has_the_values_of_the_whole(folder, rank):
    """Slices begin within a block."""
    whole, part = load(folder), load_stored(folder, tp=2, rank=rank)
    layer, of_whole = part.body.layers["1"].attention, whole.body.layers["1"].attention
    weight = layer.wo.weight
    assert isinstance(weight, StoredWeight)
    expected = of_whole.wo.weight.chunk(2, dim=1)[rank]
    x = torch.randn(3, expected.shape[1])
    torch.testing.assert_close(F.linear(x, weight), F.linear(x, expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", [(0, 0), (37, 5), (128, 130)])
@pytest.mark.parametrize("tile", [1 << 20, 128 * 300, 1])
def test_values_of_any_slice_are_those_of_the_formula(monkeypatch, start, tile):
    monkeypatch.setattr(fp8_blocks, "BLOCK_ELEMENTS", tile)
    codes, scales = quantize(torch.randn(500, 430).bfloat16())
    values = dequantize(codes, scales, dtype=torch.bfloat16)
    first = [offset // 128 for offset in start]
    part = Fp8Slice((128, 128), (start[0] % 128, start[1] % 128))
    part.codes, part.scales = codes[start[0] :, start[1] :].contiguous(), scales[first[0] :, first[1] :].contiguous()
    assert torch.equal(part.values(slice(0, len(part.codes))), values[start[0] :, start[1] :])
    assert torch.equal(
        fp8_blocks.block_values(part.codes, part.scales, part.block, part.start), values[start[0] :, start[1] :]
    )
    identity = torch.eye(part.codes.shape[1])
    assert torch.equal(F.linear(identity, StoredWeight([part])), values[start[0] :, start[1] :].t().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_product_is_that_of_the_values(dtype):
    codes, scales = quantize(torch.randn(384, 256).bfloat16())
    weight, x = StoredWeight([Fp8Slice((128, 128), (0, 0))]), torch.randn(3, 256, dtype=dtype)
    (part,) = weight.slices
    part.codes, part.scales, part.multiplies_codes = codes, scales, True
    found = torch.compile(lambda x: F.linear(x, weight), backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    assert torch.equal(found, F.linear(x, dequantize(codes, scales, dtype=torch.bfloat16).to(dtype)))


def scaled_mm(codes_BK, codes_KN, scales_Bk, kind, scales_kn, other, *, output_dtype):
    """What a GPU's kernel computes. torch checks on fake tensors what it takes."""
    tensors = codes_BK, codes_KN, scales_Bk, scales_kn
    with FakeTensorMode():
        a, b, of_a, of_b = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors)
        TORCHS_SCALED_MM(a, b, of_a, kind, of_b, other, output_dtype=output_dtype)
    assert (kind.name, other.name, output_dtype) == ("BlockWise1x128", "BlockWise128x128", torch.bfloat16)
    assert len(codes_BK) % 4 == 0, "cuBLAS refuses other numbers of rows"  # vllm-project/vllm#49932
    x = codes_BK.float() * scales_Bk.repeat_interleave(128, 1)
    weight = codes_KN.float() * scales_kn.repeat_interleave(128, 0)[: len(codes_KN)].repeat_interleave(128, 1)
    return (x @ weight).to(output_dtype)


@pytest.fixture
def kernel_calls(monkeypatch):
    """The rows of each call of the kernel, where this machine is said to have it."""
    rows = []

    def counted(codes_BK, *args, **named):
        rows.append(len(codes_BK))
        return scaled_mm(codes_BK, *args, **named)

    monkeypatch.setattr(F, "scaled_mm", counted)
    monkeypatch.setattr(fp8_blocks, "has_block_products", lambda device: True)
    return rows


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("features", [128, 512, 640])
def test_a_gpus_kernel_gets_the_codes_themselves(kernel_calls, rows, features):
    codes, scales = quantize(torch.randn(384, features).bfloat16())
    x = torch.randn(rows, features).bfloat16()
    exact = x.float() @ dequantize(codes, scales, dtype=torch.float32).t()
    found = block_product(x, codes, scales)
    assert found.shape == exact.shape and 0 < (found.float() - exact).norm() < 0.05 * exact.norm()
    weight = StoredWeight([Fp8Slice((128, 128), (0, 0))])
    (part,) = weight.slices
    part.codes, part.scales = codes, scales
    choose_products(weight, torch.float32)
    assert not torch.equal(F.linear(x, weight), found)
    choose_products(weight, torch.bfloat16)
    assert torch.equal(F.linear(x, weight), found)
    assert kernel_calls == 2 * [-(-rows // 4) * 4]


@pytest.mark.parametrize(
    ("shape", "block", "start"),
    [
        ((200, 256), (128, 128), (0, 0)),
        ((256, 200), (128, 128), (0, 0)),
        ((256, 256), (128, 64), (0, 0)),
        ((256, 256), (128, 128), (64, 0)),
    ],
)
def test_parts_of_blocks_are_multiplied_as_values(kernel_calls, shape, block, start):
    weight = Fp8Slice(block, start)
    weight.codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
    choose_products(weight, torch.bfloat16)
    assert not weight.multiplies_codes


def stacked(num, rows, features):
    """A slice of `num` experts, and their values."""
    parts = [quantize(torch.randn(rows, features).bfloat16()) for _ in range(num)]
    part = Fp8Slice((128, 128), (0, 0))
    part.codes, part.scales = (torch.stack(each) for each in zip(*parts, strict=True))
    return part, torch.stack([dequantize(*one, dtype=torch.float32) for one in parts])


def test_a_gpus_kernel_gets_the_codes_of_the_experts_that_have_rows(kernel_calls):
    gate, gates = stacked(5, 256, 384)
    up, ups = stacked(5, 256, 384)
    experts, ids_TK = StoredExperts([gate, up]), torch.tensor([[3, 0], [1, 3], [3, 1]])
    choose_products(experts, torch.bfloat16)
    rows = SortedRows(ids_TK, 5)
    x = torch.randn(len(ids_TK), 384).bfloat16()
    found = rows.of_tokens(experts.multiply(rows.of_experts(x), rows))
    assert kernel_calls == 6 * [4]  # gate and up of experts 0, 1 and 3
    ids_R, x_R = ids_TK.flatten(), x.repeat_interleave(2, 0)
    exact = torch.einsum("rk,rnk->rn", x_R.float(), torch.cat((gates, ups), 1)[ids_R])
    assert 0 < (found.float() - exact).norm() < 0.05 * exact.norm()
    chosen = experts.multiply_chosen(x_R, ids_R)  # of values, in any case
    assert (chosen.float() - exact).norm() < 0.01 * exact.norm()
    assert kernel_calls == 6 * [4]


@pytest.fixture(scope="module")
def whole_blocks(tmp_path_factory):
    """A folder in which only kv_a has parts of blocks, as V3."""
    place = tmp_path_factory.mktemp("whole")
    numbers = {"hidden_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128}
    heads = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "intermediate_size": 256}
    write_deepseek(place / "plain", vocab_size=320, std=0.04, **numbers, **heads)
    write_tokenizer(write_fp8(place / "fp8", place / "plain"))
    return place / "fp8"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_model_on_a_gpu_multiplies_codes(monkeypatch, kernel_calls, whole_blocks, is_recorded):
    expected = said_by(load(whole_blocks, dtype=torch.bfloat16)).float()
    monkeypatch.setattr(RoutedExperts, "_needs_fixed_shapes", lambda *_: is_recorded)
    model = load_stored(whole_blocks, dtype=torch.bfloat16)
    slices = [each for each in model.body.modules() if isinstance(each, Fp8Slice)]
    assert {each.codes.shape[-2:] for each in slices if not each.multiplies_codes} == {(136, 256)}  # kv_a
    found = said_by(model, static=is_recorded).float()
    similarity = F.cosine_similarity(found, expected)
    assert kernel_calls and 0.99 < similarity.min() < 1


@pytest.mark.parametrize("fault", [None, "scales of another block", "not there"])
def test_a_kernel_is_tried_before_it_is_used(monkeypatch, fault):
    def kernel(codes_BK, codes_KN, scales_Bk, kind, scales_kn, other, **named):
        if fault == "not there":
            raise RuntimeError("only for CUDA 12.9")
        if fault:
            scales_kn = scales_kn.t().roll(1, 1).t()
        return scaled_mm(codes_BK, codes_KN, scales_Bk, kind, scales_kn, other, **named)

    monkeypatch.setattr(F, "scaled_mm", kernel)
    assert fp8_blocks.block_products_are_right(CPU) == (fault is None)
    assert not fp8_blocks.has_block_products(CPU)


class OnGpu(torch.Tensor):
    """A tensor that says it is a GPU's."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [(0, 0), (37, 5), (100, 127)])
@pytest.mark.parametrize("multiplies_codes", [False, True])
def test_one_row_and_rows_of_experts_are_multiplied_by_the_compiled_kernel(monkeypatch, dtype, start, multiplies_codes):
    """How it is called on a device that says it is a GPU, and what it computes, against the values in float64."""
    calls = []

    def products(x_RK, codes, scales, ids_R, block, start):
        calls.append((tuple(x_RK.shape), None if ids_R is None else ids_R.tolist()))
        return values_products(x_RK.as_subclass(torch.Tensor), codes, scales, ids_R, block, start)

    monkeypatch.setattr(fp8_blocks, "_compiled_products", lambda: products)
    monkeypatch.setattr(fp8_blocks, "has_products", lambda device: True)
    monkeypatch.setattr(F, "scaled_mm", lambda *_, **__: pytest.fail("activations were rounded"))
    pairs = [quantize(torch.randn(300, 400).bfloat16()) for _ in range(3)]
    part = Fp8Slice((128, 128), start)
    part.codes = torch.stack([codes[start[0] :, start[1] :] for codes, _ in pairs])
    part.scales, part.multiplies_codes = torch.stack([scales for _, scales in pairs]), multiplies_codes
    values = torch.stack([dequantize(*pair, dtype=torch.bfloat16) for pair in pairs])[
        :, start[0] :, start[1] :
    ].double()
    x_RK, ids = torch.randn(4, part.shape[1]).to(dtype), [2, 0, 2, 1]
    exact = torch.einsum("rk,rnk->rn", x_RK.double(), values[ids])
    chosen = part.chosen_products(x_RK.as_subclass(OnGpu), torch.tensor(ids))
    one = F.linear(x_RK[:1], StoredWeight([part.expert(2)]))
    assert calls == [((4, part.shape[1]), ids), ((1, part.shape[1]), None)]
    for found, expected in ((chosen, exact), (one, exact[:1])):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() < (1e-6 if dtype == torch.float32 else 2**-8) * expected.norm()


def test_values_of_all_codes_are_made_bit_by_bit(monkeypatch):
    """A row with a single 1 has the values of one column as its product."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(torch.float8_e4m3fn).view(256, 2)
    scales = torch.tensor([[0.37], [1.9]])
    expected = dequantize(codes, scales, dtype=torch.float32)
    for column in range(2):
        row = torch.eye(2)[column : column + 1]
        finite = expected[:, column].isfinite() & expected[:, 1 - column].isfinite()
        found = values_products(row, codes, scales, None, (128, 128), (0, 0))[0]
        assert torch.equal(found[finite], expected[:, column][finite].bfloat16().float())
        assert found[~finite].isnan().all()


def test_the_compiled_kernel_is_tried_before_it_is_used(monkeypatch):
    for products in (values_products, fp8_blocks._gathered_products):
        assert fp8_blocks.products_are_right(products, CPU)

    def not_for_this_gpu(*_):
        raise RuntimeError("type fp8e4nv not supported in this architecture")

    def next_expert(x, codes, scales, ids, block, start):
        return values_products(x, codes, scales.roll(1, 0), ids, block, start)

    def start_forgotten(x, codes, scales, ids, block, start):
        return values_products(x, codes, scales, ids, block, (0, 0))

    for products in (not_for_this_gpu, next_expert, start_forgotten):
        assert not fp8_blocks.products_are_right(products, CPU)
    monkeypatch.setattr(fp8_blocks, "why_inductor_cannot", lambda device: "no Triton")
    fp8_blocks._compiled_products.cache_clear()
    assert not fp8_blocks.has_products(torch.device("cuda"))
    fp8_blocks._compiled_products.cache_clear()
    assert not fp8_blocks.has_products(CPU)


@pytest.mark.slow
@pytest.mark.skipif(why_inductor_cannot(CPU) is not None, reason="nothing to compile C++ with")
def test_the_kernel_that_inductor_compiles_is_right():
    compiled = compile_all_shapes(values_products)
    assert fp8_blocks.products_are_right(compiled, CPU)
    codes, scales = quantize(torch.randn(300, 400).bfloat16())
    x_1K = torch.randn(1, 400)
    exact = x_1K.double() @ dequantize(codes, scales, dtype=torch.bfloat16).double().t()
    found = compiled(x_1K, codes, scales, None, (128, 128), (0, 0))
    assert (found.double() - exact).norm() < 5e-3 * exact.norm()  # a compiler may leave out that values are rounded
    torch._dynamo.reset()


@pytest.mark.parametrize("how", [None, "stored", "float8"])
def test_the_command_tells_stored_weights_from_others(titan, whole_blocks, how):
    ask = ("infer", whole_blocks, "--prompt", "def main(", "--max-new-tokens", 2)
    if how:
        ask += ("--quantize", how)
    stats = json.loads(titan(*ask, "--json").stdout)["stats"]
    assert (stats["quantize"], stats["dtype"]) == (how, "float8" if how else "float32")
    assert ("float8 as stored" in titan(*ask).stderr) == (how == "stored")


def test_a_checkpoint_without_stored_codes_is_refused(titan, tmp_path):
    write_llama(tmp_path / "plain")
    code, _, err = titan("infer", tmp_path / "plain", "--prompt", "a", "--quantize", "stored")
    assert code == 2 and "this one has none" in err
