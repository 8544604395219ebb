"""16-bit matrix products on CPUs without instructions for them: the values of fp32 products, rounded once."""

import pytest
import torch
import torch.nn.functional as F

from trainer.parallel.cpu_products import fp32_products, multiplies

CPU, HALVES = torch.device("cpu"), [torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_products_and_gradients_are_those_of_fp32_rounded_once(dtype, with_bias):
    x, weight, bias, up = (torch.randn(shape).to(dtype) for shape in ((2, 9, 64), (103, 64), (103,), (2, 9, 103)))
    leaves = [x, weight, *([bias] if with_bias else [])]
    with fp32_products():
        halves = [leaf.clone().requires_grad_() for leaf in leaves]
        found = F.linear(*halves)
        found.backward(up)
    wide = [leaf.float().requires_grad_() for leaf in leaves]
    exact = F.linear(*wide)
    exact.backward(up.float())
    assert found.dtype == dtype and torch.equal(found, exact.to(dtype))
    for ours, theirs in zip(halves[:2], wide[:2], strict=True):  # the bias' gradient is a sum, not a product
        assert torch.equal(ours.grad, theirs.grad.to(dtype))


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_every_form_of_a_product(name):
    shapes = [(4, 5, 6), (4, 6, 7)] if "bmm" in name else [(5, 6), (6, 7)]
    shapes = [(*shapes[0][:-1], 7), *shapes] if "add" in name else shapes
    tensors = [torch.randn(shape).bfloat16() for shape in shapes]
    scalars = {"beta": 0.5, "alpha": 2.0} if "add" in name else {}
    product, wide = getattr(torch, name), [tensor.float() for tensor in tensors]
    plain = product(*wide, **scalars)
    with fp32_products():
        assert torch.equal(product(*tensors, **scalars), plain.bfloat16())
        assert torch.equal(product(*tensors, **scalars, out=torch.empty_like(plain).bfloat16()), plain.bfloat16())
        assert torch.equal(product(*wide, **scalars), plain)
        assert torch.equal(product(*wide, **scalars, out=torch.empty_like(plain)), plain)


def test_torchs_kernels_are_back_afterwards(monkeypatch):
    """Seen by what the replaced kernel calls: `Tensor.float` of 16-bit inputs."""
    casts = []
    plain_float = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: casts.append(tensor.shape) or plain_float(tensor))
    a, b = torch.ones(3, 4).bfloat16(), torch.ones(4, 5).bfloat16()
    with pytest.raises(RuntimeError, match="on purpose"), fp32_products():
        a @ b
        raise RuntimeError("on purpose")
    assert len(casts) == 2
    assert torch.equal(a @ b, torch.full((3, 5), 4).bfloat16()) and len(casts) == 2


def test_which_cpus_multiply_is_what_torch_says(monkeypatch):
    assert multiplies(torch.float32, CPU) and multiplies(torch.bfloat16, torch.device("cuda"))
    for answer in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda answer=answer: answer)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda answer=answer: not answer)
        assert [multiplies(dtype, CPU) for dtype in HALVES] == [answer, not answer]

    def no_operator():
        raise AttributeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", no_operator)
    assert multiplies(torch.bfloat16, CPU)
