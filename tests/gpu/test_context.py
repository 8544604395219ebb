"""Context parallel attention on a GPU: cuDNN's kernel in two parts, compared with one kernel and with fp32."""

import pytest
import torch

from converters.families.llama3 import FLAVORS
from trainer.parallel.attention_backend import attention_backends, selects_cudnn
from trainer.parallel.context import attend_to_prefix, attend_with_cudnn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def test_hopper_attends_with_cudnn_in_context_parallel_runs():
    assert selects_cudnn(FLAVORS["8B"], torch.bfloat16, DEVICE) == IS_HOPPER
    assert not selects_cudnn(FLAVORS["8B"], torch.float32, DEVICE)


@pytest.mark.skipif(not IS_HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("start", [0, 1024, 7168])
def test_cudnn_in_two_parts_is_as_exact_as_one_kernel(start, compiled):
    """Llama 3 8B's heads; a chunk of 1,024 queries. Distances are from fp32, in the L2 norm."""
    torch.manual_seed(0)
    lengths, heads = (1024, start + 1024, start + 1024), (32, 8, 8)
    values = [torch.randn(2, n, h, 128, device=DEVICE) for n, h in zip(lengths, heads, strict=True)]
    weights = torch.randn(2, 1024, 32, 128, device=DEVICE)

    def run(attend, dtype):
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in values]
        out = attend(*inputs)
        (out.float() * weights).sum().backward()
        return [each.float() for each in (out.detach(), *(one.grad for one in inputs))]

    in_parts = torch.compile(attend_with_cudnn, fullgraph=True) if compiled else attend_with_cudnn
    with attention_backends(DEVICE):
        exact = run(attend_to_prefix, torch.float32)
        whole, parts = run(attend_to_prefix, torch.bfloat16), run(in_parts, torch.bfloat16)
    for expected, one, two in zip(exact, whole, parts, strict=True):
        assert (two - expected).norm() <= 1.2 * (one - expected).norm() + 1e-3 * expected.norm()
