"""Mixture-of-experts layers: against transformers and float64, in shapes that torch's kernels refuse, and in parts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from converters.families.blocks import Experts
from converters.families.qwen3 import Qwen3Args, block
from tests.models.names import native_tensors
from tests.models.of_args import model_of
from trainer.config.sections import ActivationCheckpoint
from trainer.models import grouped_product as products
from trainer.models.grouped_product import grouped_product
from trainer.models.moe import MoE
from trainer.models.registry import get_trainer_family
from trainer.parallel.activation_checkpoint import apply_activation_checkpoint
from trainer.parallel.cpu_products import fp32_products

COMMON = {"norm_eps": 1e-6, "rope_theta": 1e6, "num_experts": 12, "experts_per_token": 3}
ARGS = {
    "experts narrower than the model": Qwen3Args(64, 3, 4, 2, 16, 160, 256, **COMMON, expert_hidden=48),
    "as wide as the model, weights not normalized": Qwen3Args(
        64, 2, 4, 2, 16, 160, 256, **COMMON, expert_hidden=64, normalize_weights=False
    ),
    "mixed with dense layers": Qwen3Args(
        64, 4, 4, 1, 16, 160, 256, **COMMON, expert_hidden=48, sparse_step=2, dense_layers=(3,), tied=True
    ),
    "more than torch's kernel takes": Qwen3Args(48, 2, 4, 2, 16, 96, 256, **COMMON, expert_hidden=30),
    "one of eleven experts": Qwen3Args(
        64,
        2,
        4,
        2,
        16,
        160,
        256,
        norm_eps=1e-6,
        rope_theta=1e6,
        num_experts=11,
        experts_per_token=1,
        expert_hidden=96,
        normalize_weights=False,
    ),
}


GATE_STD = 1.0  # less, and scores nearly tie: their order would be chance


def our_model(theirs: nn.Module, args: Qwen3Args) -> nn.Module:
    model = get_trainer_family("qwen3").build_model(args)
    missing = model.load_state_dict(native_tensors(theirs.state_dict()), strict=False)
    assert not missing.unexpected_keys and all(key.endswith("expert_bias") for key in missing.missing_keys)
    return model


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [layer.moe.router for layer in model.layers.values() if hasattr(layer, "moe")]


@pytest.fixture(params=ARGS, ids=list(ARGS))
def args(request) -> Qwen3Args:
    return ARGS[request.param]


def tokens_of(args: Qwen3Args, length: int) -> Tensor:
    return torch.randint(args.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def assert_close_to_transformers(args: Qwen3Args, tokens: Tensor) -> None:
    theirs = model_of("qwen3", args)
    ours = our_model(theirs, args)
    routed, scored = [], []
    for router in routers_of(ours):
        router.register_forward_hook(lambda _, args, routes: routed.append(routes.ids_TK))
    for layer in theirs.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda gate, args, output: scored.append(args[0] @ gate.weight.T))
    with torch.no_grad():
        logits, output = ours(tokens), theirs(tokens).logits
        exact = theirs.double()(tokens).logits
    own_error = (output.double() - exact).abs().max().item()
    bound = max(1e-5 * output.abs().max().item(), 4 * own_error)
    assert (logits - output).abs().max().item() <= bound

    num_clear = num_tokens = 0
    for ids_TK, logits_TE in zip(routed, scored[: len(routed)], strict=True):
        top = logits_TE.sort(dim=-1, descending=True)
        is_clear = top.values[:, args.experts_per_token - 1] - top.values[:, args.experts_per_token] > 1e-6
        wanted = top.indices[:, : args.experts_per_token].sort(dim=-1).values
        assert ids_TK.sort(dim=-1).values[is_clear].equal(wanted[is_clear])
        num_clear, num_tokens = num_clear + int(is_clear.sum()), num_tokens + len(is_clear)
    assert num_clear >= 0.999 * num_tokens > 0


@pytest.mark.parametrize("length", [1, 64])
def test_logits_and_experts_are_those_of_transformers(args, length):
    assert_close_to_transformers(args, tokens_of(args, length))


def test_one_token_alone_is_like_transformers():
    args = ARGS["experts narrower than the model"]
    assert_close_to_transformers(args, tokens_of(args, 1)[:1])


def test_gradients_are_those_of_transformers(args):
    theirs = model_of("qwen3", args)
    ours, tokens = our_model(theirs, args), tokens_of(args, 16)
    for model in (ours, theirs):
        output = model(tokens)
        (output if isinstance(output, Tensor) else output.logits).logsumexp(-1).square().mean().backward()
    wanted = native_tensors({name: p.grad for name, p in theirs.named_parameters()})
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    far = {n: ((found[n] - wanted[n]).norm() / wanted[n].norm()).item() for n in wanted}
    assert {name: error for name, error in far.items() if not error <= 1e-4} == {}


# One layer: experts that get nothing, or everything


def make_layer(args: Qwen3Args, seed: int = 0) -> MoE:
    experts = block(args, 0).feed_forward
    assert isinstance(experts, Experts)
    torch.manual_seed(seed)
    layer = MoE(args.dim, experts)
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter, std=GATE_STD if "gate" in name else 0.1)
    layer.expert_bias.uniform_(-0.3, 0.3)
    return layer


def by_formula(layer: MoE, x: Tensor, *, top_k: int, normalize: bool) -> Tensor:
    """Token by token, as arXiv 2408.15664 and the model's report describe it."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        scores = (layer.router.gate.weight @ token).softmax(0)
        chosen = (scores + layer.expert_bias.to(scores)).argsort(descending=True)[:top_k]
        weights = scores[chosen] / (scores[chosen].sum() if normalize else 1)
        row = torch.zeros_like(token)
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            w1, w2, w3 = (getattr(layer.experts, name)[expert] for name in ("w1", "w2", "w3"))
            row = row + weight * (w2 @ (torch.nn.functional.silu(w1 @ token) * (w3 @ token)))
        rows.append(row)
    return torch.stack(rows).view_as(x)


BIASES = {
    "any": None,
    "an expert without tokens": (5, -10.0),
    "all tokens on one expert": (7, 10.0),
}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("case", BIASES)
@pytest.mark.parametrize(("dim", "width"), [(64, 48), (48, 48), (30, 26)])
def test_a_layer_with_a_bias_is_its_formula(case, dim, width, normalize):
    top_k = 1 if case == "all tokens on one expert" else 3
    args = replace(
        ARGS["experts narrower than the model"],
        dim=dim, expert_hidden=width, normalize_weights=normalize, experts_per_token=top_k,
    )  # fmt: skip
    layer = make_layer(args)
    if BIASES[case]:
        expert, bias = BIASES[case]
        layer.expert_bias[expert] = bias
    x = torch.randn(2, 9, dim, requires_grad=True)
    exact = MoE(dim, block(args, 0).feed_forward).double()
    exact.load_state_dict(layer.state_dict())
    exact_x = x.detach().double().requires_grad_()
    output, wanted = layer(x), by_formula(exact, exact_x, top_k=top_k, normalize=normalize)
    assert (output - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    # uninitialized memory is NaN meanwhile: a gradient that is never written shows
    torch.use_deterministic_algorithms(True)
    try:
        output.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    wanted.square().sum().backward()
    rounding = 1e-6 * exact_x.grad.norm()  # of a gradient that is 0: the gate's, if the one weight is always 1
    for mine, theirs in [(x, exact_x), *zip(layer.parameters(), exact.parameters(), strict=True)]:
        assert (mine.grad - theirs.grad).norm() <= 2e-5 * theirs.grad.norm() + rounding
    if case == "an expert without tokens":
        assert not layer.experts.w1.grad[5].any() and layer.experts.w1.grad[4].any()


def test_the_bias_chooses_but_does_not_weigh():
    """A bias that all experts share changes nothing; a large one for one expert brings it in with its own score."""
    layer, x = make_layer(ARGS["experts narrower than the model"]), torch.randn(1, 9, 64)
    layer.expert_bias.zero_()
    before = layer(x)
    layer.expert_bias.fill_(5.0)
    assert layer(x).equal(before)
    layer.expert_bias[3] = 100.0
    ids_TK, weights_TK = layer.router(x[0], layer.expert_bias)
    assert (ids_TK[:, 0] == 3).all() and (weights_TK[:, 0] < 1).all()
    assert weights_TK.sum(-1).allclose(torch.ones(9))


def test_forced_balance_takes_experts_in_turn():
    layer = make_layer(ARGS["experts narrower than the model"])
    layer.router.forces_balance = True
    ids_TK, weights_TK = layer.router(torch.randn(8, 64), layer.expert_bias)
    assert ids_TK.flatten().tolist() == [j % 12 for j in range(24)]
    assert weights_TK.sum(-1).allclose(torch.ones(8)) and weights_TK.std() > 0.01  # scores, not 1 / K


def test_a_rerun_is_bit_equal():
    """Forward and backward, also on several threads, where torch's own index backward adds up in any order."""
    layer, x = make_layer(ARGS["experts narrower than the model"]), torch.randn(4, 512, 64, requires_grad=True)
    num_threads = torch.get_num_threads()
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


# The grouped product


def groups(counts: list[int], *, dim: int, width: int, dtype=torch.float32):
    torch.manual_seed(0)
    x_RI, w_EOI = torch.randn(sum(counts), dim), torch.randn(len(counts), width, dim)
    ends_E = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    return x_RI.to(dtype).requires_grad_(), w_EOI.to(dtype).requires_grad_(), ends_E


def loop(x_RI: Tensor, w_EOI: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([x @ w.T for x, w in zip(x_RI.split(counts), w_EOI, strict=True)])


COUNTS = [[3, 0, 5, 1], [0, 0, 4], [4, 0, 0], [1], [0, 7, 0, 0, 2]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("dim", "width"), [(16, 24), (16, 16), (30, 24), (16, 27)])
def test_a_grouped_product_is_a_loop_of_products(counts, dim, width):
    x_RI, w_EOI, ends_E = groups(counts, dim=dim, width=width)
    output, wanted = grouped_product(x_RI, w_EOI, ends_E), loop(x_RI, w_EOI, counts)
    assert output.allclose(wanted, rtol=1e-6, atol=1e-6)
    upstream = torch.randn_like(wanted)
    for gradient in (upstream, upstream[:1, :1].expand_as(upstream)):  # `sum().backward()` gives one like the second
        found, exact = (torch.autograd.grad(o, (x_RI, w_EOI), gradient, retain_graph=True) for o in (output, wanted))
        assert all(a.allclose(b, rtol=1e-5, atol=1e-5) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_kernel_and_loop_agree_bit_by_bit(counts, monkeypatch):
    x_RI, w_EOI, ends_E = groups(counts, dim=16, width=24)
    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr(products, "_has_kernel", lambda *shape, answer=has_kernel: answer)
        output = grouped_product(x_RI, w_EOI, ends_E)
        found.append([output, *torch.autograd.grad(output.square().sum(), (x_RI, w_EOI))])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_torchs_kernel_is_used_where_it_can_be(monkeypatch):
    calls = []
    kernel = products._grouped_mm
    monkeypatch.setattr(products, "_grouped_mm", lambda *args: calls.append(1) or kernel(*args))
    for dim, num_calls in ((16, 3), (30, 0)):  # forward, and both gradients
        x_RI, w_EOI, ends_E = groups([3, 0, 5], dim=dim, width=24)
        grouped_product(x_RI, w_EOI, ends_E).sum().backward()
        assert len(calls) == num_calls
        calls.clear()
    assert not products._has_kernel(torch.empty(0), 1 << 21, torch.Size((8, 1024, 512)))  # torchtitan#1932


class UnwrittenOuter:
    """torch's kernel on Blackwell: the weight gradient of an expert without rows is what was in memory."""

    def __init__(self):
        self.kernel = products._grouped_mm

    def __call__(self, a, b, ends_E):
        out = self.kernel(a, b, ends_E)
        if b.dim() == 2:
            out[ends_E.diff(prepend=ends_E.new_zeros(1)) == 0] = torch.nan
        return out


def test_kernels_are_tried_with_experts_without_rows_before_they_are_used(monkeypatch, capsys):
    gpu, cpu, dtypes = torch.device("cuda", 0), torch.device("cpu"), (torch.float32, torch.bfloat16, torch.float16)
    assert all(products.kernels_are_right(cpu, dtype) for dtype in dtypes)
    kernel = products._grouped_mm
    faulty = {
        "unwritten gradient": UnwrittenOuter(),
        "rows of the next expert": lambda a, b, ends_E: kernel(a, b.roll(-1, 0) if b.dim() == 3 else b, ends_E),
        "NaN in a row": lambda a, b, ends_E: kernel(a, b, ends_E).index_fill(0, torch.tensor([3]), torch.nan),
    }
    for fault in faulty.values():
        monkeypatch.setattr(products, "_grouped_mm", fault)
        assert not any(products.kernels_are_right(cpu, dtype) for dtype in dtypes)
    tried = []
    monkeypatch.setattr(products, "kernels_are_right", lambda *which: tried.append(which) and False)
    products.kernels_work.cache_clear()
    assert products.kernels_work(cpu, torch.bfloat16) and not tried
    assert not products.kernels_work(gpu, torch.bfloat16) and not products.kernels_work(gpu, torch.bfloat16)
    products.kernels_work.cache_clear()
    assert len(tried) == 1 and "is wrong on this GPU" in capsys.readouterr().err


def test_experts_are_multiplied_one_by_one_where_the_kernel_is_wrong(monkeypatch):
    x_RI, w_EOI, ends_E = groups([0, 3, 0, 5], dim=16, width=24)
    expected = torch.autograd.grad(grouped_product(x_RI, w_EOI, ends_E).square().sum(), (x_RI, w_EOI))
    monkeypatch.setattr(products, "_grouped_mm", lambda *_: pytest.fail("the kernel was used"))
    monkeypatch.setattr(products, "kernels_work", lambda device, dtype: False)
    found = torch.autograd.grad(grouped_product(x_RI, w_EOI, ends_E).square().sum(), (x_RI, w_EOI))
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)], ids=["Hopper", "B200", "B300"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_blackwells_gradient_of_an_expert_without_rows_is_zero(counts, capability, monkeypatch):
    """The kernel is a CPU's; of the GPU there is what says that it is one."""

    class OnGpu(Tensor):
        is_cuda = True

    unwritten = UnwrittenOuter()
    monkeypatch.setattr(products, "_grouped_mm", lambda *args: unwritten(*args).as_subclass(OnGpu))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x_RI, w_EOI, ends_E = groups(counts, dim=16, width=24)
    grad_RO, parts = torch.ones(sum(counts), 24), x_RI.detach().split(counts)
    found = products._outer_mm(grad_RO, x_RI.detach(), ends_E).as_subclass(Tensor)
    if capability[0] == 9 and 0 in counts:  # what is not mended, the trial finds
        assert found.isnan().any()
        return
    expected = torch.stack([g.T @ x for g, x in zip(grad_RO.split(counts), parts, strict=True)])
    assert found.allclose(expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_tensors_have_the_shapes_of_real_ones(dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x_RI, w_EOI, ends_E = groups([3, 0, 5], dim=16, width=24, dtype=dtype)
        output = grouped_product(x_RI, w_EOI, ends_E)
        output.sum().backward()
        assert (output.shape, output.dtype) == ((8, 24), dtype)
        assert (x_RI.grad.shape, w_EOI.grad.shape) == (x_RI.shape, w_EOI.shape)


@pytest.mark.parametrize("counts", COUNTS[:2], ids=str)
def test_16_bit_products_without_instructions_for_them_are_computed_in_fp32_and_rounded(counts, monkeypatch):
    monkeypatch.setattr(products, "multiplies", lambda dtype, device: dtype == torch.float32)
    x_RI, w_EOI, ends_E = groups(counts, dim=16, width=24, dtype=torch.bfloat16)
    wide = [t.detach().float().requires_grad_() for t in (x_RI, w_EOI)]
    wanted = loop(*wide, counts)
    upstream = torch.randn_like(wanted).bfloat16()
    with fp32_products():
        output = grouped_product(x_RI, w_EOI, ends_E)
        output.backward(upstream)
    wanted.backward(upstream.float())
    for mine, theirs in ((output, wanted), (x_RI.grad, wide[0].grad), (w_EOI.grad, wide[1].grad)):
        assert mine.dtype == torch.bfloat16
        assert mine.float().allclose(theirs, rtol=2**-8, atol=1e-6)  # half a unit in the last place


# Counting


def count_of(mode: ActivationCheckpoint) -> tuple[Tensor, Tensor]:
    """Counts of two batches with gradients and one without, and the experts that the first two were sent to."""
    args = ARGS["mixed with dense layers"]
    torch.manual_seed(0)
    model = get_trainer_family("qwen3").build_model(args)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=GATE_STD if "gate" in name else 0.1)
    chosen: list[Tensor] = []
    moe = model.layers["1"].moe
    moe.load_E = torch.zeros(args.num_experts, dtype=torch.int64)
    moe.router.register_forward_hook(lambda _, inputs, routes: chosen.append(routes.ids_TK))
    apply_activation_checkpoint(model, mode)
    outputs = [model(tokens_of(args, length).roll(length)) for length in (5, 9)]
    ids = torch.cat([each.flatten() for each in chosen])
    for output in outputs:  # both forward passes first, as in a pipeline
        output.sum().backward()
    with torch.no_grad():
        model(tokens_of(args, 7))
    return moe.load_E, ids.bincount(minlength=args.num_experts)


@pytest.mark.parametrize(
    "mode",
    [
        ActivationCheckpoint(mode="none"),
        ActivationCheckpoint(mode="full"),
        ActivationCheckpoint(mode="selective", selective_ac_option="op"),
        ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    ],
    ids=["none", "full", "op", "every 2nd"],
)
def test_tokens_are_counted_once_where_they_are_trained_on(mode):
    found, wanted = count_of(mode)
    assert found.equal(wanted) and found.sum() == 2 * (5 + 9) * 3
