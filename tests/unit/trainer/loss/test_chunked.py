"""The loss in pieces: torch's numbers, for any output module, and no whole logits at any moment."""

from math import ceil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from converters.common.errors import UnsupportedError
from converters.families.args import DecoderArgs
from trainer.batch import Inputs
from trainer.config.sections import Compile, Training
from trainer.data.batch import IGNORED
from trainer.loss.chunked import ChunkedOutput
from trainer.loss.cross_entropy import cross_entropy_sum
from trainer.loss.install import install_loss
from trainer.loss.registry import ALL_FORWARD_FIRST
from trainer.models.decoder import Transformer
from trainer.runner import WholeModel

DIM, VOCAB = 32, 200
FP32_ERROR = 5e-7


def sample(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    h_BLD = torch.randn(3, 50, DIM, generator=generator).to(dtype).requires_grad_()
    targets_BL = torch.randint(VOCAB, (3, 50), generator=generator)
    targets_BL[0, 3:47] = IGNORED
    return h_BLD, targets_BL


def make_output(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(DIM, VOCAB, bias=bias).to(dtype)


def chunk(output: nn.Module, *, num_chunks: int = 7, in_backward: bool = False) -> ChunkedOutput:
    chunk_tokens = ceil(3 * 50 / num_chunks)
    chunked = ChunkedOutput(output, cross_entropy_sum, chunk_tokens=chunk_tokens, in_backward=in_backward)
    output.forward = chunked
    return chunked


def exact(output: nn.Linear, h_BLD: torch.Tensor, targets_BL: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The mean loss over valid tokens in fp64, and its gradients for h and the parameters."""
    h, *parameters = (t.detach().double().requires_grad_() for t in (h_BLD, *output.parameters()))
    logits_TV = F.linear(h, *parameters).flatten(0, 1)
    loss = F.cross_entropy(logits_TV, targets_BL.flatten(), ignore_index=IGNORED)
    return loss, list(torch.autograd.grad(loss, [h, *parameters]))


def gradients_of(loss: torch.Tensor, h_BLD: torch.Tensor, output: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [h_BLD, *output.parameters()]))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 2, 7, 8, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_as_exact_as_those_of_torch(dtype, num_chunks, in_backward):
    (h_BLD, targets_BL), output = sample(dtype), make_output(dtype, bias=True)
    expected, gradients = exact(output, h_BLD, targets_BL)
    num_valid = (targets_BL != IGNORED).sum()
    plain = cross_entropy_sum(output(h_BLD), targets_BL) / num_valid
    # in bf16 a gradient is rounded three times here: for a piece, as a sum, and divided by the tokens
    bounds = [2.5 * error(g, e) for g, e in zip(gradients_of(plain, h_BLD, output), gradients, strict=True)]
    with chunk(output, num_chunks=num_chunks, in_backward=in_backward).given(targets_BL):
        loss = output(h_BLD)
    assert loss.dtype == torch.float32
    (loss / num_valid).backward()
    assert (loss / num_valid).item() == pytest.approx(expected.item(), rel=1e-6 if dtype == torch.float32 else 1e-3)
    for tensor, gradient, bound in zip((h_BLD, *output.parameters()), gradients, bounds, strict=True):
        assert tensor.grad.dtype == dtype
        assert error(tensor.grad, gradient) < bound
    assert (h_BLD.grad[0, 3:47] == 0).all()


def test_gradients_come_on_top_of_those_that_are_there():
    (h_BLD, targets_BL), output = sample(), make_output()
    chunked = chunk(output)
    for _ in range(2):
        with chunked.given(targets_BL):
            output(h_BLD).backward()
    with chunked.given(targets_BL):
        once = torch.autograd.grad(output(h_BLD), output.weight)[0]
    assert torch.equal(output.weight.grad, 2 * once)


def test_the_outputs_gradient_is_added_up_in_fp32():
    """With a bf16 sum the error would grow with the pieces."""
    (h_BLD, targets_BL), output = sample(torch.bfloat16), make_output(torch.bfloat16)
    num_valid = (targets_BL != IGNORED).sum()
    _, (_, expected) = exact(output, h_BLD, targets_BL)
    in_bf16 = torch.zeros_like(output.weight)
    for h_LD, target_L in zip(h_BLD.detach().flatten(0, 1).split(1), targets_BL.flatten().split(1), strict=True):
        in_bf16 += torch.autograd.grad(cross_entropy_sum(output(h_LD), target_L), output.weight)[0]
    with chunk(output, num_chunks=150).given(targets_BL):
        (output(h_BLD) / num_valid).backward()
    assert error(output.weight.grad, expected) < 0.5 * error(in_bf16 / num_valid, expected)


def test_a_sum_of_two_gradients_is_rounded_once_as_in_fp32():
    (h_BLD, targets_BL), output = sample(torch.bfloat16), make_output(torch.bfloat16, bias=True)
    chunks = zip(h_BLD.detach().flatten(0, 1).split(75), targets_BL.flatten().split(75), strict=True)
    grads = [torch.autograd.grad(cross_entropy_sum(output(h), target), [*output.parameters()]) for h, target in chunks]
    with chunk(output, num_chunks=2).given(targets_BL):
        output(h_BLD).backward()
    for parameter, first, second in zip(output.parameters(), *grads, strict=True):
        assert torch.equal(parameter.grad, (first.float() + second.float()).bfloat16())


class Shared(nn.Module):
    """Both parameters have the same gradient, and autograd gives the same tensor for both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(make_output().weight.detach() / 2) for _ in range(2))

    def forward(self, h_BLD):
        return F.linear(h_BLD, self.a + self.b)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_parameters_that_share_a_gradient_do_not_add_it_twice(num_chunks):
    (h_BLD, targets_BL), output, plain = sample(), Shared(), Shared()
    wanted = torch.autograd.grad(cross_entropy_sum(plain(h_BLD), targets_BL), [*plain.parameters()])
    with chunk(output, num_chunks=num_chunks).given(targets_BL):
        found = torch.autograd.grad(output(h_BLD), [*output.parameters()])
    assert all(error(ours, theirs.double()) < FP32_ERROR for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("in_backward", [False, True])
def test_without_gradients_the_loss_is_the_same(in_backward):
    (h_BLD, targets_BL), output = sample(), make_output()
    chunked = chunk(output, in_backward=in_backward)
    with chunked.given(targets_BL):
        expected = output(h_BLD).item()
        with torch.no_grad():
            loss = output(h_BLD)
    assert not loss.requires_grad
    assert loss.item() == expected


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_of_weights_may_be_computed_apart(in_backward):
    """As zero-bubble schedules do: first for the inputs, and from the same graph later for the weights."""
    (h_BLD, targets_BL), output = sample(), make_output()
    with chunk(output, in_backward=in_backward).given(targets_BL):
        loss = output(h_BLD)
        (for_input,) = torch.autograd.grad(loss, h_BLD, retain_graph=True)
        edge = [GradientEdge(loss.grad_fn, 0)]
        (for_weight,) = torch.autograd.grad(edge, output.weight, grad_outputs=[torch.ones(())])
        together = torch.autograd.grad(output(h_BLD), [h_BLD, output.weight])
    assert torch.equal(for_input, together[0])
    assert torch.equal(for_weight, together[1])


class ScaledOutput(nn.Module):
    """An output of one's own: more than a product, and not all of it trained."""

    def __init__(self):
        super().__init__()
        self.inner = make_output()
        self.scale = nn.Parameter(torch.full((VOCAB,), 0.5))
        self.shift = nn.Parameter(torch.ones(VOCAB), requires_grad=False)

    def forward(self, h_BLD):
        return 30 * torch.tanh(self.inner(h_BLD) * self.scale / 30) + self.shift


def test_any_output_module_will_do():
    (h_BLD, targets_BL), output, plain = sample(), ScaledOutput(), ScaledOutput()
    expected = cross_entropy_sum(plain(h_BLD), targets_BL)
    wanted = torch.autograd.grad(expected, [h_BLD, plain.inner.weight, plain.scale])
    with chunk(output).given(targets_BL):
        loss = output(h_BLD)
    found = torch.autograd.grad(loss, [h_BLD, output.inner.weight, output.scale])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours, theirs.double()) < FP32_ERROR


# --- in a model

ARGS = DecoderArgs(64, 2, 4, 2, 16, 128, vocab_size=4096)
BATCH, LENGTH = 2, 128
CHUNK_TOKENS = BATCH * LENGTH // 8


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.num_elements = max(self.num_elements, *made, 0)
        return result


def make_model(**training) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ARGS)
    install_loss(model, Training(**training), Compile(), chunk_tokens=CHUNK_TOKENS)
    return model


def step_of(model: nn.Module) -> tuple[float, LargestTensor]:
    tokens_BL = torch.randint(ARGS.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        targets, positions = {"targets": tokens_BL.roll(-1, 1)}, {"positions": torch.arange(LENGTH)}
        loss = WholeModel(model).forward_backward(Inputs(tokens_BL, targets, positions), 256.0)
    return loss.item(), largest


def test_a_model_trains_as_with_whole_logits_and_never_makes_them():
    plain, chunked = make_model(loss="plain"), make_model(loss="chunked")
    (expected, whole), (loss, pieces) = step_of(plain), step_of(chunked)
    assert loss == pytest.approx(expected, rel=1e-6)
    for (name, ours), theirs in zip(chunked.named_parameters(), plain.parameters(), strict=True):
        assert error(ours.grad, theirs.grad.double()) < 1e-6, name
    assert whole.num_elements == BATCH * LENGTH * ARGS.vocab_size
    # the gradient of the output, the logits of a piece being half as large
    assert pieces.num_elements == ARGS.dim * ARGS.vocab_size == 2 * whole.num_elements // 8


@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS", "1F1B"])
def test_pieces_wait_for_backward_where_many_microbatches_go_forward_first(schedule):
    model = Transformer(ARGS)
    is_first = schedule in ALL_FORWARD_FIRST
    install_loss(model, Training(), Compile(), chunk_tokens=CHUNK_TOKENS, all_forward_first=is_first)
    tokens_BL = torch.zeros(1, LENGTH, dtype=torch.int64)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(tokens_BL, torch.arange(LENGTH), tokens_BL)
    # the output's gradient, of the output's size
    assert any(t.shape == model.output.weight.shape and t is not model.output.weight for t in kept) == (
        schedule == "1F1B"
    )


def test_names_stay_and_a_part_without_the_output_passes_its_hidden_states_on():
    model = make_model()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Transformer(ARGS).named_parameters()]
    stage = Transformer(ARGS)
    stage.norm = stage.output = None
    tokens_BL = torch.zeros(1, 8, dtype=torch.int64)
    expected = stage(tokens_BL, torch.arange(8))
    install_loss(stage, Training(), Compile(), chunk_tokens=CHUNK_TOKENS)
    assert torch.equal(stage(tokens_BL, torch.arange(8), tokens_BL), expected)


class AfterTheOutput(Transformer):
    def forward(self, x, positions=None):
        return super().forward(x, positions)[..., None].expand(2, 2)


class PastTheOutput(Transformer):
    def forward(self, x, positions=None):
        return F.linear(self.tok_embeddings(x), self.output.weight)


@pytest.mark.parametrize("family", [AfterTheOutput, PastTheOutput])
def test_a_model_that_does_not_end_with_its_output_is_refused(family):
    model = family(ARGS)
    install_loss(model, Training(), Compile(), chunk_tokens=CHUNK_TOKENS)
    with pytest.raises(UnsupportedError, match="ends with a call of its `output` module") as text:
        step_of(model)
    assert text.value.tries == ("--training.loss plain",)


@pytest.mark.parametrize("num_chunks", [1, 2, 7])
def test_gradients_of_chunks_are_not_widened_to_what_fsdp_reduces_in(num_chunks, monkeypatch):
    """From torch 2.15 on, FSDP's parameters ask autograd for gradients in the dtype of the reduction."""
    (h_BLD, targets_BL), output = sample(torch.bfloat16), make_output(torch.bfloat16)
    output.weight.grad_dtype = torch.float32
    grad, seen = torch.autograd.grad, []
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: seen.append(grad(*args)) or seen[-1])
    with chunk(output, num_chunks=num_chunks).given(targets_BL):
        output(h_BLD)
    of_weight = [found[1] for found in seen if len(found) == 2]
    assert [gradient.dtype for gradient in of_weight] == [torch.bfloat16] * num_chunks
    assert output.weight.grad_dtype == torch.float32
