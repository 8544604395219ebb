"""Attention within documents on a GPU: both kernels against dense SDPA, in layers and compiled layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from converters.families.llama3 import FLAVORS
from trainer.config.sections import Compile
from trainer.models.decoder import Transformer
from trainer.parallel.compile import apply_compile
from trainer.parallel.document_attention import positions_in_documents
from trainer.parallel.gpu_attention import FlexAttention, VarlenAttention
from trainer.parallel.masked_attention import apply_masks, masked_layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTH = 512
KERNELS = [FlexAttention, VarlenAttention]


def documents(seed: int) -> Tensor:
    begins = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.02
    return begins.cumsum(1).to(torch.int32).cuda()


def inputs(num_queries: int) -> list[Tensor]:
    torch.manual_seed(0)
    lengths = ((num_queries, 8), (LENGTH, 4), (LENGTH, 4))
    return [torch.randn(2, n, heads, 64, device="cuda").bfloat16().requires_grad_() for n, heads in lengths]


def dense(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    first = LENGTH - q.shape[1]
    own = numbers[:, first:, None] == numbers[:, None]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    sees = (own & torch.ones_like(own).tril(first))[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize(
    ("kernel", "num_queries"), [(FlexAttention, LENGTH), (FlexAttention, LENGTH // 4), (VarlenAttention, LENGTH)]
)
def test_a_kernel_equals_a_dense_mask_forward_and_backward(kernel, num_queries):
    attend, numbers = kernel(), documents(0)
    (q, k, v) = given = inputs(num_queries)
    found = attend(q, k, v, attend.make_mask(numbers, num_queries=num_queries))
    expected = dense(q, k, v, numbers)
    upstream = torch.randn_like(found)
    ours, theirs = torch.autograd.grad(found, given, upstream), torch.autograd.grad(expected, given, upstream.float())
    for mine, exact in zip((found, *ours), (expected, *theirs), strict=True):
        assert (mine.float() - exact.float()).norm() <= 2**-7 * exact.float().norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_compiled_model_computes_as_an_eager_one_for_all_batches(kernel):
    def made() -> Transformer:
        torch.manual_seed(0)
        model = Transformer(FLAVORS["debug_gqa"]).cuda().bfloat16()
        apply_masks(model, masked_layers(model, kernel, has_documents=True), torch.device("cuda"))
        return model

    eager, compiled = made(), made()
    apply_compile(compiled, Compile(enable=True))
    tokens = torch.randint(2048, (2, LENGTH), device="cuda")
    for seed in range(12):
        numbers = documents(seed)
        gradients = []
        for model in (eager, compiled):
            model.zero_grad()
            logits = model(tokens, positions_in_documents(numbers), documents=numbers)
            logits.float().logsumexp(-1).sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for mine, theirs in zip(*gradients, strict=True):
            assert (mine - theirs).norm() <= 2**-5 * theirs.norm()
