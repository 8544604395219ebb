"""GPT-OSS's biased experts and Llama 4's scaled inputs: one layer against that of transformers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from converters.families.blocks import Experts
from converters.families.registry import get_family
from trainer.models.biased_experts import BiasedExperts, clamped_swiglu
from trainer.models.moe import MoE

SIZES = [(64, 48), (64, 64), (30, 26)]  # experts narrower than the model, as wide, and more than torch's kernel takes
CLAMP = 1.5  # low, so that many values are clamped


def experts_of(family: str, **numbers: float) -> Experts:
    """Twelve experts as a family has them, with other numbers."""
    blocks = get_family(family).blocks(get_family(family).flavors["debugmodel"])
    experts = next(block.feed_forward for block in blocks if isinstance(block.feed_forward, Experts))
    return replace(experts, num=12, **numbers)


def gpt_oss(dim: int, width: int):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=dim,
        intermediate_size=width,
        num_local_experts=12,
        num_experts_per_tok=3,
        swiglu_limit=CLAMP,
        experts_implementation="eager",
    )
    theirs, ours = GptOssMLP(config), MoE(dim, experts_of("gpt_oss", top_k=3, hidden=width, clamp=CLAMP))
    return theirs, ours


def names_of_gpt_oss(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "router.gate.weight": tensors["router.weight"],
        "router.gate.bias": tensors["router.bias"],
        "experts.mlp1_weight": tensors["experts.gate_up_proj"].mT,
        "experts.mlp1_bias": tensors["experts.gate_up_proj_bias"],
        "experts.mlp2_weight": tensors["experts.down_proj"].mT,
        "experts.mlp2_bias": tensors["experts.down_proj_bias"],
    }


def llama4(dim: int, width: int, top_k: int = 1):
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = Llama4TextConfig(
        hidden_size=dim, intermediate_size=width, num_local_experts=12, num_experts_per_tok=top_k, num_attention_heads=2
    )
    experts = experts_of("llama4", top_k=top_k, hidden=width, shared_hidden=width)
    return Llama4TextMoe(config), MoE(dim, experts)


def names_of_llama4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    width = tensors["experts.down_proj"].shape[1]
    gate_up = tensors["experts.gate_up_proj"]
    return {
        "router.gate.weight": tensors["router.weight"],
        "experts.w1": gate_up[..., :width].mT,
        "experts.w2": tensors["experts.down_proj"].mT,
        "experts.w3": gate_up[..., width:].mT,
        "shared_experts.w1.weight": tensors["shared_expert.gate_proj.weight"],
        "shared_experts.w2.weight": tensors["shared_expert.down_proj.weight"],
        "shared_experts.w3.weight": tensors["shared_expert.up_proj.weight"],
    }


LAYERS = {
    "gpt_oss": (gpt_oss, names_of_gpt_oss),
    "llama4": (llama4, names_of_llama4),
    "llama4, three experts per token": (lambda dim, width: llama4(dim, width, top_k=3), names_of_llama4),
}


def pair(kind: str, dim: int, width: int) -> tuple[nn.Module, MoE]:
    """Their layer in float64, and ours in float32 with its weights."""
    make, names = LAYERS[kind]
    torch.manual_seed(0)
    theirs, ours = make(dim, width)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(std=1.0 if "router" in name or "bias" in name else 0.2)
    missing = ours.load_state_dict(names(theirs.state_dict()), strict=False)
    assert missing.missing_keys == ["expert_bias"] and not missing.unexpected_keys
    return theirs.double(), ours


@pytest.mark.parametrize(("dim", "width"), SIZES)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("length", [1, 24])
def test_output_and_gradients_are_those_of_transformers(kind, dim, width, length):
    """24 tokens: some experts have many rows, and with one token most have none."""
    theirs, ours = pair(kind, dim, width)
    x = torch.randn(2, length, dim, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    output, wanted = ours(x), theirs(exact_x)[0].view(2, length, dim)
    assert (output - wanted).abs().max() <= 5e-6 * wanted.abs().max()
    torch.use_deterministic_algorithms(True)  # uninitialized memory is NaN meanwhile
    try:
        output.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    wanted.square().sum().backward()
    grads = LAYERS[kind][1]({name: p.grad for name, p in theirs.named_parameters()})
    assert grads.keys() == {name for name, _ in ours.named_parameters()}
    grads["x"] = exact_x.grad
    for name, found in [("x", x), *ours.named_parameters()]:
        assert (found.grad - grads[name]).norm() <= 2e-5 * grads[name].norm(), name
    if kind == "gpt_oss" and length == 24:  # the clamp binds on both sides of both halves, and not everywhere
        hidden = (
            torch.cat([exact_x.flatten(0, 1) @ theirs.experts.gate_up_proj[0]]) + theirs.experts.gate_up_proj_bias[0]
        )
        assert all(
            (part.abs() > CLAMP).any() and (part.abs() < CLAMP).any() for part in (hidden[:, ::2], hidden[:, 1::2])
        )


def test_a_clamped_gate_keeps_large_negative_values():
    """Only the up-projection is clamped from below; gates are at even positions."""
    gate, up = torch.tensor([-20.0, 20.0, 3.0, 3.0]), torch.tensor([0.5, 0.5, -20.0, 20.0])
    found = clamped_swiglu(torch.stack((gate, up), dim=-1).flatten(), 7.0)
    gate, up = torch.tensor([-20.0, 7.0, 3.0, 3.0]), torch.tensor([0.5, 0.5, -7.0, 7.0])
    assert found.equal((up + 1) * (gate * torch.sigmoid(gate * 1.702)))


@pytest.mark.parametrize("mean", [-20, 0, 20])
def test_llama_4_chooses_by_logits(mean):
    """Also where the sigmoids of all logits are nearly 0, or 1."""
    _, layer = pair("llama4", 64, 48)
    logits_TE = torch.randn(4096, 12) + mean
    layer.router.gate = torch.nn.Identity()
    ids_TK, weights_TK = layer.router(logits_TE, layer.expert_bias)
    assert ids_TK.equal(logits_TE.topk(ids_TK.shape[1], dim=-1).indices)
    assert weights_TK.equal(logits_TE.sigmoid().gather(1, ids_TK))


def test_scaled_rows_are_multiplied_in_float32():
    """bfloat16 rows times float32 weights, rounded once: rounded weights would give other rows."""
    _, layer = pair("llama4", 64, 48)
    x_TD = torch.randn(32, 64).bfloat16()
    ids_TK, weights_TK = layer.router(x_TD, layer.expert_bias)
    dispatched = layer.dispatch(x_TD, ids_TK, 12)
    rows = layer.dispatch.scale(dispatched, weights_TK).x_RD
    tokens = dispatched.order_R
    assert rows.equal((x_TD[tokens].float() * weights_TK[tokens]).bfloat16())
    assert not rows.equal(x_TD[tokens] * weights_TK[tokens].bfloat16())


@pytest.mark.parametrize("kind", LAYERS)
def test_a_rerun_is_bit_equal(kind):
    """Forward and backward on several threads; the gradient of a bias is a sum over many rows."""
    _, layer = pair(kind, 64, 48)
    x, num_threads = torch.randn(4, 512, 64, requires_grad=True), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = []
        for _ in range(3):
            output = layer(x)
            found.append((output.detach(), *torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))))
    finally:
        torch.set_num_threads(num_threads)
    for again in found[1:]:
        assert all(a.equal(b) for a, b in zip(again, found[0], strict=True))


def test_experts_that_get_no_row_at_all_have_gradients_of_zeros():
    """As those of a rank that no token has chosen; the gradient of a sum has no strides."""
    _, layer = pair("gpt_oss", 64, 48)
    output = layer.experts(torch.empty(0, 64, requires_grad=True), torch.zeros(12, dtype=torch.int32))
    output.sum().backward()
    assert output.shape == (0, 64)
    assert all(p.grad.shape == p.shape and not p.grad.any() for p in layer.experts.parameters())


def test_slices_of_experts_add_up_to_the_whole():
    """Two ranks with half of the features each: one adds the last bias, and both have its gradient."""
    _, layer = pair("gpt_oss", 64, 48)
    whole, x_RD, ends_E = layer.experts, torch.randn(40, 64), (torch.arange(1, 13) * 40 // 12).int()
    wanted = whole(x_RD, ends_E)
    upstream = torch.randn_like(wanted)
    exact = torch.autograd.grad(wanted, (whole.mlp1_bias, whole.mlp2_bias), upstream)
    total, grads = torch.zeros_like(wanted), []
    for half in (0, 1):
        part = BiasedExperts(64, experts_of("gpt_oss", top_k=3, hidden=48, clamp=CLAMP))
        part.adds_last_bias = half == 0
        weights = whole.mlp1_weight.chunk(2, 1)[half], whole.mlp2_weight.chunk(2, 2)[half]
        biases = whole.mlp1_bias.chunk(2, 1)[half], whole.mlp2_bias
        output = part.multiply(x_RD, ends_E, weights, biases)
        grads.append(torch.autograd.grad(output, biases, upstream))
        total = total + output.detach()
    assert total.allclose(wanted, rtol=1e-5, atol=1e-5)
    assert torch.cat([grads[0][0], grads[1][0]], dim=1).allclose(exact[0], rtol=1e-5, atol=1e-5)
    assert grads[0][1].equal(exact[1]) and grads[1][1].equal(exact[1])
