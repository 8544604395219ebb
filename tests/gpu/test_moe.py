"""Mixtures of experts on a GPU: grouped products against float64, experts without tokens, reruns, compiled layers."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from converters.families.blocks import Experts
from converters.families.qwen3 import FLAVORS
from trainer.config.sections import Compile
from trainer.models.biased_experts import BiasedExperts
from trainer.models.grouped_product import grouped_product
from trainer.models.registry import get_trainer_family
from trainer.parallel.compile import apply_compile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def leave_nan_behind(*like: Tensor) -> None:
    """Free memory of these sizes that is NaN: a result that is never written shows."""
    for _ in [torch.full_like(tensor, torch.nan) for tensor in like for _ in range(4)]:
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 300], [700, 0, 0], [1], [0, 7, 0, 0, 2, 129, 0]], ids=str)
@pytest.mark.parametrize(("dim", "width"), [(64, 96), (64, 64), (30, 26)])
def test_a_grouped_product_is_a_loop_of_products(dtype, counts, dim, width):
    torch.manual_seed(0)
    x_RI = torch.randn(sum(counts), dim, device="cuda").to(dtype).requires_grad_()
    w_EOI = torch.randn(len(counts), width, dim, device="cuda").to(dtype).requires_grad_()
    ends_E = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x_RI, w_EOI))
    leave_nan_behind(x_RI, w_EOI)
    output = grouped_product(x_RI, w_EOI, ends_E)
    wanted = torch.cat([x @ w.T for x, w in zip(exact_x.split(counts), exact_w, strict=True)])
    upstream = torch.randn_like(output)
    leave_nan_behind(x_RI, w_EOI, output)
    output.backward(upstream)
    wanted.backward(upstream.double())
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-3  # TF32 is torch's own choice for fp32
    for mine, theirs in ((output, wanted), (x_RI.grad, exact_x.grad), (w_EOI.grad, exact_w.grad)):
        assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()
    for expert, count in enumerate(counts):
        assert bool(w_EOI.grad[expert].any()) == (count > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 300], [0, 0, 0], [0, 7, 0, 0, 2, 129, 0]], ids=str)
def test_biased_experts_are_those_of_a_cpu_in_float32(dtype, counts):
    """The gradient of a bias is a product with eight columns of ones."""
    torch.manual_seed(0)
    experts = BiasedExperts(
        64, Experts(num=len(counts), top_k=1, hidden=96, has_biases=True, clamp=7.0, fused_rows=True)
    ).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    exact = deepcopy(experts).float()
    x_RD, ends_E = torch.randn(sum(counts), 64).to(dtype), torch.tensor(counts).cumsum(0, dtype=torch.int32)
    experts = experts.cuda()
    leave_nan_behind(*experts.parameters())
    output, wanted = experts(x_RD.cuda(), ends_E.cuda()), exact(x_RD.float(), ends_E)
    upstream = torch.randn_like(wanted)
    output.backward(upstream.to(output))
    wanted.backward(upstream.to(dtype).float())
    tolerance = 2**-6 if dtype == torch.bfloat16 else 4e-3
    pairs = [
        (output, wanted),
        *((p.grad, q.grad) for p, q in zip(experts.parameters(), exact.parameters(), strict=True)),
    ]
    for mine, theirs in pairs:
        assert (mine.cpu().float() - theirs).norm() <= tolerance * theirs.norm()


def gradients(model: torch.nn.Module) -> list[Tensor]:
    model.zero_grad()
    tokens = torch.randint(2048, (2, 128), generator=torch.Generator().manual_seed(1)).cuda()
    model(tokens).float().logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = get_trainer_family("qwen3").build_model(FLAVORS["debug_moe_mixed"]).cuda()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "gate" in name else 0.05)
    for layer in model.layers.values():
        if hasattr(layer, "moe"):
            layer.moe.load_E = torch.zeros(12, dtype=torch.int64, device="cuda")
    return model


def test_a_rerun_is_bit_equal():
    first, again = gradients(make_model()), gradients(make_model())
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


def test_compiled_layers_count_tokens_once():
    model = make_model()
    expected = gradients(model)
    load_E = model.layers["1"].moe.load_E.clone()
    assert load_E.sum() == 2 * 128 * 3
    apply_compile(model, Compile(enable=True, backend="inductor"))
    found = gradients(model)
    assert model.layers["1"].moe.load_E.equal(2 * load_E)
    assert all((a - b).norm() <= 1e-3 * b.norm() for a, b in zip(found, expected, strict=True))
