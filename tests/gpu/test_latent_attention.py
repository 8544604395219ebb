"""Latent attention on a GPU: q and k of 192 features, v of 128, scores of a scale of their own, against float64."""

import copy
from functools import partial

import pytest
import torch

from converters.families.deepseek_v3 import FLAVORS, block
from trainer.models.attention import CausalAttention
from trainer.models.registry import get_trainer_family
from trainer.parallel.attention_backend import attention_backends
from trainer.parallel.context import attend_to_prefix, attend_with_cudnn
from trainer.parallel.gpu_attention import FlexAttention, VarlenAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BATCH, LENGTH, HEADS = 2, 1024, 16
SCALE = block(FLAVORS["671B"], 0).attention.scale


def by_hand(q, k, v):
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * SCALE
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bnqk,bknv->bqnv", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def in_documents(kernel, q, k, v, *, scale):
    attend, whole = kernel(), torch.zeros(BATCH, LENGTH, dtype=torch.int32, device="cuda")
    return attend(q, k, v, attend.make_mask(whole, num_queries=LENGTH), scale=scale)


KERNELS = {
    "eager": CausalAttention(),
    "compiled": torch.compile(CausalAttention()),
    "of a context rank": attend_to_prefix,
    "of a context rank, compiled": torch.compile(attend_to_prefix),
    "of a context rank, cuDNN": attend_with_cudnn,
    "flex": partial(in_documents, FlexAttention),
    "varlen": partial(in_documents, VarlenAttention),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_the_result_and_the_gradients(name):
    if "cuDNN" in name and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuDNN's kernel is used on Hopper only")
    torch.manual_seed(0)
    shapes = [(BATCH, LENGTH, HEADS, width) for width in (192, 192, 128)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = by_hand(*exact)
    weights = torch.randn_like(wanted)
    (wanted * weights).sum().backward()
    with attention_backends(torch.device("cuda")):
        found = KERNELS[name](*inputs, scale=SCALE)
        (found * weights).sum().backward()
    for mine, theirs in ((found, wanted), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))):
        assert (mine.double() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("flavor", ["debug_v3", "debug_v2_lite"])
def test_logits_and_gradients_are_those_of_the_cpu(flavor):
    torch.manual_seed(0)
    on_cpu = get_trainer_family("deepseek_v3").build_model(FLAVORS[flavor])
    for name, parameter in on_cpu.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "gate" in name else 0.05)
    on_gpu, tokens = copy.deepcopy(on_cpu).cuda(), torch.randint(2048, (2, 128))
    expected, found = on_cpu(tokens), on_gpu(tokens.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    expected.logsumexp(-1).mean().backward()
    found.logsumexp(-1).mean().backward()
    ours = dict(on_gpu.named_parameters())
    for fqn, parameter in on_cpu.named_parameters():
        assert (ours[fqn].grad.cpu() - parameter.grad).norm() <= 1e-3 * parameter.grad.norm(), fqn
