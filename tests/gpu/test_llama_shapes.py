"""The shapes of Llama 3 8B (head_dim 128, sequence 8192, grouped keys): the attention kernel, and a block's numbers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from converters.families.llama3 import FLAVORS
from trainer.models.attention import CausalAttention
from trainer.models.decoder import Transformer
from trainer.parallel.attention_backend import attention_backends

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SEQ_LEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8192, 32, 8, 128
CUDNN = 3  # torch.nn.attention.SDPBackend


def attention_inputs():
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, SEQ_LEN, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for shape in shapes
    ]


def kernels_of(attention: nn.Module) -> list[str]:
    """Names of the kernels of a forward and backward pass."""
    inputs = attention_inputs()
    with attention_backends(torch.device("cuda")):
        attention(*inputs).sum().backward()  # compiles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            attention(*inputs).sum().backward()
            torch.cuda.synchronize()
    return [event.key.lower() for event in profiler.key_averages()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_hopper_attends_with_cudnn(compiled):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuDNN comes first on Hopper only")
    attention = torch.compile(CausalAttention()) if compiled else CausalAttention()
    kernels = kernels_of(attention)
    assert [name for name in kernels if "cudnn" in name and "fprop" in name], kernels
    assert [name for name in kernels if "cudnn" in name and "bprop" in name], kernels
    q, k, v = (x.transpose(1, 2) for x in attention_inputs())
    with attention_backends(torch.device("cuda")):
        assert torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True) == CUDNN


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_in_bf16_is_that_in_fp32(compiled):
    """Some rows of one key head and its query heads, against softmax in fp32."""
    attention = torch.compile(CausalAttention()) if compiled else CausalAttention()
    q, k, v = attention_inputs()
    with attention_backends(torch.device("cuda")), torch.no_grad():
        found = attention(q, k, v)[0, :, :4].float()  # the query heads of the first key head
    q, k, v = q[0, :, :4].float(), k[0, :, 0].float(), v[0, :, 0].float()
    for row in (0, 1, 777, SEQ_LEN - 1):
        scores = torch.einsum("nh,kh->nk", q[row], k[: row + 1]) / HEAD_DIM**0.5
        torch.testing.assert_close(found[row], scores.softmax(-1) @ v[: row + 1], rtol=2e-2, atol=2e-2)


def test_a_compiled_layer_of_8b_has_the_gradients_of_the_eager_one():
    torch.manual_seed(0)
    with torch.device("cuda"):
        # `.cuda()` for the rotary frequencies, which are always computed on the CPU
        model = Transformer(replace(FLAVORS["8B"], num_layers=1, vocab_size=1024)).cuda().bfloat16()
        tokens = torch.randint(1024, (1, SEQ_LEN))
    gradients = []
    for compiled in (False, True):
        if compiled:
            model.layers["0"].compile()
        model.zero_grad()
        with attention_backends(torch.device("cuda")):
            model(tokens).float().logsumexp(-1).mean().backward()
        gradients.append({fqn: parameter.grad.float() for fqn, parameter in model.named_parameters()})
    eager, found = gradients
    for fqn, exact in eager.items():
        assert (found[fqn] - exact).norm() <= 3e-2 * exact.norm(), fqn
