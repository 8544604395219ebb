"""16-bit weights on a CPU without kernels for them: products in fp32, rounded once, out of weights that stay."""

import pytest
import torch
import torch.nn.functional as F

from tests.models.llama import write as write_llama
from tests.tiny_infer import load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import linear as widened
from titan_tools.infer.model import load as loading
from titan_tools.infer.model import quantize as quantizing
from titan_tools.infer.model.linear import WidenedWeight
from titan_tools.infer.model.quantize import quantize_weight

HALVES = [torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_kernels(monkeypatch):
    for file in (loading, quantizing):
        monkeypatch.setattr(file, "multiplies", lambda dtype, device: dtype == torch.float32)
    monkeypatch.setattr(loading, "can_pack", lambda *_: False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [(5,), (2, 9), (1, 1, 40)])
def test_a_product_of_many_rows_is_fp32s_rounded_once(rows, with_bias, dtype, monkeypatch):
    monkeypatch.setattr(widened, "BLOCK_ELEMENTS", 64 * 20 + 3)  # of 20 rows and then some: 103 are five blocks and 3
    weight, bias = torch.randn(103, 64).to(dtype), torch.randn(103).to(dtype) if with_bias else None
    x = torch.randn(*rows, 64, 2).to(dtype)[..., 0]  # not contiguous
    found = F.linear(x, WidenedWeight(weight), bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape and found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES)
def test_few_rows_take_the_weight_as_it_is(dtype):
    weight, bias = torch.randn(103, 64).to(dtype), torch.randn(103).to(dtype)
    for rows in ((1,), (4,), (2, 2), (0,)):
        x = torch.randn(*rows, 64).to(dtype)
        assert torch.equal(F.linear(x, WidenedWeight(weight), bias=bias), F.linear(x, weight, bias))
    with pytest.raises(TypeError):
        torch.mm(torch.randn(3, 64).to(dtype), WidenedWeight(weight))


def test_slices_of_nothing_give_nothing():
    """A rank may hold no rows of a weight, or none of its features."""
    for num_rows, num_features in ((0, 16), (4, 0)):
        weight = WidenedWeight(torch.ones(num_rows, num_features, dtype=torch.bfloat16))
        out = F.linear(torch.ones(2, 7, num_features, dtype=torch.bfloat16), weight)
        assert out.shape == (2, 7, num_rows) and not out.any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_widened_model_is_as_close_to_fp32_as_a_plain_one_and_no_larger(tmp_path, no_kernels, tied, dtype):
    write_llama(tmp_path, tie_word_embeddings=tied).to(dtype).save_pretrained(tmp_path)
    tried = ((dtype, True), (dtype, False), (torch.float32, True))
    wide, plain, exact = (load(tmp_path, dtype=dtype, packed=packed) for dtype, packed in tried)
    tokens = list(range(3, 40))
    logits = [Engine(model, rows=1, room=64).prefill(0, tokens) for model in (wide, plain, exact)]
    assert isinstance(wide.body.layers["0"].attention.wq.weight, WidenedWeight)
    assert (logits[0] - logits[2]).abs().max() < 1.5 * (logits[1] - logits[2]).abs().max()
    assert wide.bytes_per_token == plain.bytes_per_token
    assert (wide.head.weight._weight_NK.data_ptr() == wide.body.tok_embeddings.weight.data_ptr()) == tied
    assert isinstance(load(tmp_path, dtype=torch.float32).head.weight, torch.Tensor)


def test_quantised_weights_are_cast_to_what_the_cpu_multiplies(no_kernels):
    weight = quantize_weight(torch.randn(70, 48).bfloat16(), "int8")
    x = torch.randn(20, 48).bfloat16()  # more rows than torch's int8 kernel is for
    found = F.linear(x, weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), F.linear(x.float(), weight.dequantize()), rtol=2**-8, atol=1e-4)
