"""Weights that stay in float8 with scales of blocks, and DeepSeek's cache of latents, on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from converters.quantized.stored_blocks import BlocksSource
from converters.source.weights import open_native
from tests.fp8_folders import dequantize, quantize, write_fp8
from tests.models.deepseek import write as write_deepseek
from tests.tiny_infer import load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.products import can_attend_by_products
from titan_tools.infer.model.experts import SortedRows, StoredExperts
from titan_tools.infer.model.fp8_blocks import Fp8Slice, choose_products, has_block_products
from titan_tools.infer.model.load import load_model
from titan_tools.infer.model.stored_weight import StoredWeight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
PROMPT = [(37 * n + 11) % 97 for n in range(40)]
NEXT = [5, 96, 0, 41]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hf")
    numbers = {"hidden_size": 256, "moe_intermediate_size": 128, "kv_lora_rank": 144, "q_lora_rank": 132}
    write_deepseek(place / "plain", std=0.04, **numbers)
    return write_fp8(place / "fp8", place / "plain")


def said_by(model):
    """Logits after PROMPT and after each of NEXT, of two sequences."""
    engine = Engine(model, rows=2, room=64)
    logits = [engine.prefill(0, PROMPT), engine.prefill(1, PROMPT[3:9])]
    logits += [logits for token in NEXT for logits in engine.decode([token, (token + 1) % 97])]
    return torch.stack(logits).cpu()


def allowed():
    """The relative error of a product: activations are rounded to float8 where the GPU multiplies codes."""
    return 0.06 if has_block_products(GPU) else 0.01


def test_hopper_multiplies_codes_with_cuda_12_9_and_later():
    version = tuple(int(part) for part in torch.version.cuda.split("."))
    assert has_block_products(GPU) == (torch.cuda.get_device_capability(GPU) == (9, 0) and version >= (12, 9))


@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("shape", [(256, 384), (384, 1024), (576, 256), (130, 70)])
def test_a_product_is_near_that_of_the_values(rows, shape):
    codes, scales = quantize(torch.randn(shape).bfloat16())
    weight = StoredWeight([Fp8Slice((128, 128), (0, 0))]).to(GPU)
    (part,) = weight.slices
    part.codes, part.scales = codes.to(GPU), scales.to(GPU)
    choose_products(weight, torch.bfloat16)
    x = torch.randn(rows, shape[1], device=GPU).bfloat16()
    exact = x.float() @ dequantize(codes, scales, dtype=torch.float32).to(GPU).t()
    limit = 0.01 if rows == 1 else allowed()  # one row is multiplied by values
    assert (F.linear(x, weight).float() - exact).norm() < limit * exact.norm()


@pytest.mark.parametrize("shape", [(256, 384), (128, 512), (160, 256)])
def test_experts_products_are_near_those_of_the_values(shape):
    parts = [quantize(torch.randn(shape).bfloat16()) for _ in range(6)]
    part = Fp8Slice((128, 128), (0, 0))
    part.codes, part.scales = (torch.stack(each).to(GPU) for each in zip(*parts, strict=True))
    experts, ids_TK = StoredExperts([part]), torch.tensor([[3, 0], [1, 3], [3, 5]], device=GPU)
    choose_products(experts, torch.bfloat16)
    rows, x = SortedRows(ids_TK, 6), torch.randn(3, shape[1], device=GPU).bfloat16()
    values = torch.stack([dequantize(*one, dtype=torch.float32) for one in parts]).to(GPU)
    exact = torch.einsum("tk,tcnk->tcn", x.float(), values[ids_TK]).flatten(0, 1)
    sorted_products = rows.of_tokens(experts.multiply(rows.of_experts(x), rows))
    experts.multiply_chosen(x.repeat_interleave(2, 0), ids_TK.flatten())  # compiles
    torch.cuda.set_sync_debug_mode("error")  # part of a recorded step
    try:
        chosen_products = experts.multiply_chosen(x.repeat_interleave(2, 0), ids_TK.flatten())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (sorted_products.float() - exact).norm() < allowed() * exact.norm()
    assert (chosen_products.float() - exact).norm() < 0.01 * exact.norm()  # of values


def test_latents_say_the_same_on_a_gpu(folder):
    """In fp32, recorded as CUDA graphs."""
    expected = said_by(load(folder))
    torch.testing.assert_close(
        said_by(load(folder, device=GPU)), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )


def test_latents_are_multiplied_in_bfloat16_too(folder):
    assert can_attend_by_products(GPU, torch.bfloat16)
    expected = said_by(load(folder, dtype=torch.bfloat16)).float()
    found = said_by(load(folder, dtype=torch.bfloat16, device=GPU)).float()
    assert F.cosine_similarity(found, expected).min() > 0.99


def test_stored_weights_say_nearly_the_same(folder):
    with open_native(folder) as weights:
        source = BlocksSource(weights.source)
        model = load_model(source, weights.info, dtype=torch.bfloat16, device=GPU, quantize="stored")
    expected = said_by(load(folder, dtype=torch.bfloat16, device=GPU)).float()
    similarity = F.cosine_similarity(said_by(model).float(), expected)
    assert similarity.min() > 0.98
