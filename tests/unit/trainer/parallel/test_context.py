"""Head-tail shards: complete, balanced, and in an order that gathering undoes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

import trainer.parallel.context
from converters.families.deepseek_v3 import FLAVORS as LATENTS
from converters.families.llama3 import FLAVORS
from trainer.models.registry import get_trainer_family
from trainer.parallel.attention_backend import selects_cudnn
from trainer.parallel.context import (
    ContextParallelAttention,
    apply_cp,
    attend_to_prefix,
    attend_with_cudnn,
    head_tail_positions,
)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_token_once_and_the_same_work_for_each_rank(cp):
    shards = [head_tail_positions(24 * cp, rank, cp) for rank in range(cp)]
    assert torch.cat(shards).sort().values.equal(torch.arange(24 * cp))
    pairs = {int((shard + 1).sum()) for shard in shards}  # a token at place p looks at p + 1 tokens
    assert len(pairs) == 1


@pytest.mark.parametrize(("value_dim", "scale"), [(16, None), (10, 0.4), (20, 0.4)])
@pytest.mark.parametrize("start", [0, 5, 24])
def test_queries_see_the_keys_up_to_their_own(start, value_dim, scale):
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 16), (2, 16), (2, value_dim))
    q, k, v = (torch.randn(2, 32, *heads, generator=generator) for heads in shapes)
    whole = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    part = attend_to_prefix(q[:, start : start + 8], k[:, : start + 8], v[:, : start + 8], scale)
    assert torch.allclose(part, whole[:, start : start + 8], atol=1e-6)


def test_latents_are_gathered_and_not_the_keys_and_values_of_the_heads(monkeypatch):
    """Of each layer one message: 576 numbers of a token in the published models, here 32 + 8."""
    sent = []

    def gathered(x, group):
        sent.append(x.shape)
        return torch.cat((x, x), dim=1)

    monkeypatch.setattr(trainer.parallel.context, "gather_sequence", gathered)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    args = LATENTS["debug_v3"]
    model = get_trainer_family("deepseek_v3").build_model(replace(args, num_layers=2, num_dense_layers=2))
    apply_cp(model, None)
    model(torch.arange(16)[None], head_tail_positions(32, 1, 2))
    assert sent == [(1, 16, args.kv_rank + args.rotary_dim)] * 2


def cpu_forward(q, k, v, is_causal, scale):
    """A CPU's kernel in place of cuDNN's, which also returns the logarithms of sums."""
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out, sums.unsqueeze(-1), torch.empty(0), torch.empty(0)


def cpu_backward(gradient, q, k, v, out, sums, random, is_causal, scale):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, q, k, v, out, sums.squeeze(-1), 0.0, is_causal, scale=scale)


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("start", [0, 8, 24])
def test_attention_in_parts_is_that_of_the_whole(start, scale, monkeypatch):
    """Results, and gradients of queries, keys and values; with kernels that mask as many queries as keys."""
    monkeypatch.setattr(trainer.parallel.context, "cudnn_forward", cpu_forward)
    monkeypatch.setattr(trainer.parallel.context, "cudnn_backward", cpu_backward)
    generator = torch.Generator().manual_seed(0)
    found = []
    q, k, v, weights = (torch.randn(2, length, 4, 16, generator=generator) for length in (8, start + 8, start + 8, 8))
    for attend in (attend_with_cudnn, attend_to_prefix):
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        out = attend(*inputs, scale)
        (out * weights).sum().backward()
        found.append([out, *(each.grad for each in inputs)])
    for parts, whole in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=2e-6, rtol=1e-5)


def test_cudnn_is_called_for_keys_before_the_queries_and_for_their_own():
    """With shapes only; with grouped queries, whose heads the kernel groups itself."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is forward:
                called.append(("forward", args[1].shape[2], args[6:] == (True,)))  # defaults are left out
            if func is backward:
                called.append(("backward", args[2].shape[2], args[14]))
            return func(*args, **(kwargs or {}))

    shapes = ((8, 4), (32, 2), (32, 2))  # tokens and heads of q, k, v
    with FakeTensorMode(), Calls():
        inputs = [torch.empty(1, n, heads, 128, dtype=torch.bfloat16, requires_grad=True) for n, heads in shapes]
        out = attend_with_cudnn(*inputs)
        out.sum().backward()
    assert out.shape == inputs[0].shape
    assert [each.grad.shape for each in inputs] == [each.shape for each in inputs]
    keys = [(24, False), (8, True)]
    assert called == [(which, *each) for which in ("forward", "backward") for each in keys]


@pytest.mark.parametrize(
    ("version", "seq_len", "avoided"),
    [
        (92000, 4 * 192, {(0, "tail"), (1, "head")}),  # tokens before the part are an odd multiple of 64
        (92600, 4 * 192, set()),
        (92000, 4 * 256, set()),
        (92000, 4 * 160, {(1, "tail")}),  # 480, 160 and 320 before
        (91900, 4 * 48, set()),  # 144, 48 and 96 before
        (None, 8 * 32, {(2, "head"), (1, "tail")}),  # cp 4: 64 and 192 before
    ],
)
def test_parts_that_old_cudnn_may_make_nan_of_use_another_kernel(version, seq_len, avoided, monkeypatch):
    cp = 4 if seq_len == 8 * 32 else 2
    chosen = set()
    for kernel in (attend_with_cudnn, attend_to_prefix):

        def attend(q, k, v, scale, name=kernel.__name__):
            chosen.add((rank, "head" if k.shape[1] - q.shape[1] == rank * half else "tail", name))
            return q

        monkeypatch.setattr(trainer.parallel.context, kernel.__name__, attend)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: cp)
    half = seq_len // (2 * cp)
    for rank in range(cp):
        monkeypatch.setattr("torch.distributed.get_rank", lambda group: rank)  # noqa: B023
        inner = ContextParallelAttention(None, gathers=False, uses_cudnn=True)
        inner(torch.empty(1, 2 * half, 4, 16), *(torch.empty(1, seq_len, 4, 16) for _ in range(2)))
    assert {each[:2] for each in chosen if each[2] == "attend_to_prefix"} == avoided
    assert {each[:2] for each in chosen} == {(rank, part) for rank in range(cp) for part in ("head", "tail")}
    assert len(chosen) == 2 * cp


@pytest.mark.parametrize("samples", [1, 2])
def test_a_gradient_comes_to_cudnn_in_the_layout_of_the_result(samples, monkeypatch):
    """torch builds a kernel for the first strides that it sees, and uses it for all others of the same q, k and v."""
    strides = []

    def backward(gradient, q, k, v, out, *others, scale):
        strides.append((gradient.stride(), out.stride()))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", backward)
    monkeypatch.setattr(trainer.parallel.context, "cudnn_forward", cpu_forward)
    q, k, v = (torch.randn(samples, length, 4, 16, requires_grad=True) for length in (8, 24, 24))
    upstreams = torch.randn(samples, 16, 4, 16)[:, 8:], torch.ones(()).expand(samples, 8, 4, 16)
    upstreams += (torch.randn(samples, 4, 16, 8).permute(0, 3, 1, 2),)
    for upstream in upstreams:
        attend_with_cudnn(q, k, v).backward(upstream)
    assert len(strides) == 2 * len(upstreams) and all(of_gradient == of_out for of_gradient, of_out in strides)


@pytest.mark.parametrize("chosen", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_torchs_own_choice_of_kernel_is_followed(chosen, monkeypatch):
    asked = []

    def choose(q, k, v, **options):
        asked.append((q.shape[1:4:2], k.shape[1:4:2], v.shape[1:4:2], q.dtype, options))
        return chosen.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        found = selects_cudnn(FLAVORS["8B"], torch.bfloat16, torch.device("cuda", 0))
        selects_cudnn(LATENTS["671B"], torch.bfloat16, torch.device("cuda", 0), value_dim=128)
    assert found == (chosen == SDPBackend.CUDNN_ATTENTION)
    heads_and_widths = [((32, 128), (8, 128), (8, 128)), ((128, 192), (128, 192), (128, 128))]
    assert asked == [
        (*shapes, torch.bfloat16, {"is_causal": True, "enable_gqa": shapes[0] != shapes[1]})
        for shapes in heads_and_widths
    ]
    assert not selects_cudnn(FLAVORS["8B"], torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiler_traces_the_attention_of_a_gpu_in_one_piece(dtype):
    """torch's description of the mask is a class that cannot be traced. Of the GPU there are shapes only."""
    called = []

    def look(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    with FakeTensorMode():
        q_BCNH, k_BEKH, v_BEKH = (torch.empty(1, n, 4, 16, dtype=dtype, device="cuda") for n in (8, 32, 32))
        out = torch.compile(attend_to_prefix, backend=look, fullgraph=True)(q_BCNH, k_BEKH, v_BEKH)
    assert out.shape == q_BCNH.shape
    assert any("scaled_dot_product" in name for name in called)
    assert any("flash" in name for name in called) == (dtype is torch.bfloat16)  # which knows no fp32
