"""Head-tail shards: complete, balanced, and in an order that gathering undoes."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from trainer.parallel.context import attend_to_prefix, head_tail_positions


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_token_once_and_the_same_work_for_each_rank(cp):
    shards = [head_tail_positions(24 * cp, rank, cp) for rank in range(cp)]
    assert torch.cat(shards).sort().values.equal(torch.arange(24 * cp))
    pairs = {int((shard + 1).sum()) for shard in shards}  # a token at place p looks at p + 1 tokens
    assert len(pairs) == 1


@pytest.mark.parametrize("start", [0, 5, 24])
def test_queries_see_the_keys_up_to_their_own(start):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 32, heads, 16, generator=generator) for heads in (4, 2, 2))
    whole = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    part = attend_to_prefix(q[:, start : start + 8], k[:, : start + 8], v[:, : start + 8])
    assert torch.allclose(part, whole[:, start : start + 8], atol=1e-6)


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
