"""Weights kept as float8 codes with scales of blocks say what they say where they are dequantized while reading."""

import pytest
import torch
import torch.nn.functional as F

from converters.stored_blocks import BlocksSource
from converters.weights import open_native
from tests.fp8_folders import dequantize, quantize, write_fp8
from tests.tiny_deepseek import write_deepseek
from tests.tiny_experts import write_experts
from tests.tiny_families import write_tiny
from tests.tiny_infer import CPU, load
from tests.tiny_llama import write_llama
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import fp8_blocks
from titan_tools.infer.model.experts import StoredExperts
from titan_tools.infer.model.fp8_blocks import Fp8Slice, Fp8Weight, block_product
from titan_tools.infer.model.load import load_model

PROMPT = [(37 * n + 11) % 97 for n in range(30)]
NEXT = [5, 96, 0]
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
    return [each for each in model.body.modules() if isinstance(each, Fp8Weight | StoredExperts)]


def test_logits_are_those_of_dequantized_weights(folder):
    model, reference = load_stored(folder), load(folder)
    assert stored_weights(model)
    torch.testing.assert_close(said_by(model), said_by(reference), rtol=1e-5, atol=1e-5)
    assert model.bytes_per_token < 0.5 * reference.bytes_per_token


def test_bfloat16_is_near(folder):
    model, reference = load_stored(folder, dtype=torch.bfloat16), load(folder, dtype=torch.bfloat16)
    expected = said_by(reference).float()
    assert (said_by(model).float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("folder", ["v3"], indirect=True)
def test_steps_of_fixed_shapes_say_the_same(folder):
    found = said_by(load_stored(folder, packed=False), compile=True, backend="eager")
    torch._dynamo.reset()
    torch.testing.assert_close(found, said_by(load(folder)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_slice_has_the_values_of_the_whole(folder, rank):
    """Slices begin within a block."""
    whole, part = load(folder), load_stored(folder, tp=2, rank=rank)
    layer, of_whole = part.body.layers["1"].attention, whole.body.layers["1"].attention
    weight = layer.wo.weight
    assert isinstance(weight, Fp8Weight)
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
    assert torch.equal(F.linear(identity, Fp8Weight([part])), values[start[0] :, start[1] :].t().float())


def scaled_mm(codes_BK, codes_KN, scales_Bk, kind, scales_kn, other, *, output_dtype):
    """What a GPU's kernel computes."""
    assert (kind.name, other.name, output_dtype) == ("BlockWise1x128", "BlockWise128x128", torch.bfloat16)
    assert scales_Bk.stride() == (1, len(scales_Bk)) and codes_KN.stride(0) == 1
    x = codes_BK.float() * scales_Bk.repeat_interleave(128, 1)
    weight = codes_KN.float() * scales_kn.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x @ weight).to(output_dtype)


def test_a_gpus_kernel_gets_the_codes_themselves(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    codes, scales = quantize(torch.randn(384, 256).bfloat16())
    x = torch.randn(5, 256).bfloat16()
    exact = x.float() @ dequantize(codes, scales, dtype=torch.float32).t()
    found = block_product(x, codes, scales).float()
    assert 0 < (found - exact).norm() < 0.05 * exact.norm()
    weight = Fp8Slice((128, 128), (0, 0))
    weight.codes, weight.scales = codes, scales
    monkeypatch.setattr(fp8_blocks, "_fits_kernel", lambda *_: True)
    assert not torch.equal(F.linear(x, Fp8Weight([weight])), found.bfloat16())
    monkeypatch.setattr(fp8_blocks, "has_block_products", lambda device: True)
    assert torch.equal(F.linear(x, Fp8Weight([weight])), found.bfloat16())


@pytest.mark.parametrize("fault", [None, "scales of another block", "not there"])
def test_a_kernel_is_tried_before_it_is_used(monkeypatch, fault):
    def kernel(codes_BK, codes_KN, scales_Bk, kind, scales_kn, other, **named):
        if fault == "not there":
            raise RuntimeError("only for CUDA 12.9")
        scales_kn = scales_kn.roll(1, 1) if fault else scales_kn
        return scaled_mm(codes_BK, codes_KN, scales_Bk, kind, scales_kn, other, **named)

    monkeypatch.setattr(F, "scaled_mm", kernel)
    assert fp8_blocks.block_products_are_right(CPU) == (fault is None)
    assert not fp8_blocks.has_block_products(CPU)


def test_a_checkpoint_without_stored_codes_is_refused(titan, tmp_path):
    write_llama(tmp_path / "plain")
    code, _, err = titan("infer", tmp_path / "plain", "--prompt", "a", "--quantize", "stored")
    assert code == 2 and "this one has none" in err
