"""Attention within documents: each kernel against dense SDPA, or what is called where it does not run here."""

from contextlib import contextmanager
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention.varlen import varlen_attn

from converters.families.registry import get_family
from trainer.config.sections import Compile
from trainer.models.attention import CausalAttention
from trainer.models.registry import get_trainer_family
from trainer.parallel import masked_attention
from trainer.parallel.attention_backend import WideAttention
from trainer.parallel.compile import apply_compile
from trainer.parallel.context import ContextParallelAttention, head_tail_positions
from trainer.parallel.document_attention import PerDocumentAttention, positions_in_documents
from trainer.parallel.gpu_attention import FlexAttention, VarlenAttention
from trainer.parallel.masked_attention import apply_masks, choose_masked_attention, masked_layers

VARLEN_ASKS_FOR_GQA = "enable_gqa" in signature(varlen_attn).parameters  # torch 2.11 takes fewer keys unasked
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 24, 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 10 + [3] * 8, [0] * 24], dtype=torch.int32)


def inputs(
    num_queries: int = LENGTH, dtype: torch.dtype = torch.float32, value_dim: int = HEAD_DIM
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    shapes = ((num_queries, HEADS, HEAD_DIM), (LENGTH, KV_HEADS, HEAD_DIM), (LENGTH, KV_HEADS, value_dim))
    drawn = (torch.randn(BATCH, *shape, generator=generator, dtype=dtype) for shape in shapes)
    return [x.requires_grad_() for x in drawn]


def dense(q, k, v, documents=DOCUMENTS, scale=None) -> torch.Tensor:
    """Queries are the last ones."""
    first = documents.shape[1] - q.shape[1]
    own = documents[:, first:, None] == documents[:, None]
    sees = own & torch.ones_like(own).tril(first)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = sees[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("value_dim", [HEAD_DIM - 3, HEAD_DIM + 3])
def test_values_of_another_width_and_scores_of_another_scale(value_dim, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_sequence)
    for kernel in (PerDocumentAttention(), FlexAttention(), VarlenAttention()):
        q, k, v = inputs(value_dim=value_dim)
        wanted = dense(q, k, v, scale=0.5)
        if isinstance(kernel, FlexAttention):  # no backward on a CPU
            q, k, v = (x.detach() for x in (q, k, v))
        found = kernel(q, k, v, kernel.make_mask(DOCUMENTS, num_queries=LENGTH), scale=0.5)
        torch.testing.assert_close(found, wanted)
        if not isinstance(kernel, FlexAttention):
            gradient = torch.randn_like(found)
            grads = [torch.autograd.grad(out, (q, k, v), gradient) for out in (found, wanted)]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_queries", [24, 16, 9, 4], ids="{} queries".format)
def test_one_document_by_one_equals_a_dense_mask_forward_and_backward(num_queries, dtype):
    q, k, v = inputs(num_queries, dtype)
    attend = PerDocumentAttention()
    found = attend(q, k, v, attend.make_mask(DOCUMENTS, num_queries=num_queries))
    expected = dense(q, k, v)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    pairs = zip(
        torch.autograd.grad(found, (q, k, v), gradient),
        torch.autograd.grad(expected, (q, k, v), gradient),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_reruns_are_bit_equal_on_several_threads():
    def run() -> tuple[torch.Tensor, ...]:
        q, k, v = inputs()
        out = PerDocumentAttention()(q, k, v, DOCUMENTS)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first, *others = (run() for _ in range(5))
    finally:
        torch.set_num_threads(before)
    assert all(ours.equal(theirs) for other in others for ours, theirs in zip(first, other, strict=True))


def test_torchs_own_checks_of_the_operation():
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    for scale, window, own in ((None, None, None), (0.4, 3, sinks)):
        samples = inputs(16, torch.float64)
        torch.library.opcheck(
            torch.ops.titan.attend_within_documents.default, (*samples, DOCUMENTS, own, window, scale)
        )


def mask_documents(model, kernel) -> None:
    for layer in model.layers.values():
        layer.attention.inner_attention = CausalAttention()
    apply_masks(model, masked_layers(model, kernel, has_documents=True), torch.device("cpu"))


@contextmanager
def one_graph():
    """What is compiled in this block is one graph."""
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        torch._dynamo.reset()


def test_compiled_code_is_made_once_for_all_documents():
    attend = torch.compile(PerDocumentAttention(), backend="aot_eager", fullgraph=True, dynamic=False)
    with one_graph():
        for shift in (0, 1, 7):
            documents, (q, k, v) = DOCUMENTS.roll(shift, dims=0), inputs()
            out = attend(q, k, v, documents)
            torch.testing.assert_close(out, dense(q, k, v, documents))
            out.sum().backward()


def test_the_layers_of_a_model_share_one_graph_for_all_batches():
    model = get_trainer_family("llama3").build_model(get_family("llama3").flavors["debug_gqa"])
    mask_documents(model, PerDocumentAttention)
    apply_compile(model, Compile(enable=True, backend="aot_eager"))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with one_graph():
        for documents in (DOCUMENTS, DOCUMENTS * 0, DOCUMENTS.clamp(max=1)):
            model(tokens, positions_in_documents(documents), documents=documents).sum().backward()


def test_in_bf16_it_is_computed_in_fp32_on_a_cpu():
    q, k, v = (x.detach().bfloat16() for x in inputs())
    out = WideAttention(PerDocumentAttention())(q, k, v, mask=DOCUMENTS)
    assert out.dtype == torch.bfloat16
    assert out.equal(PerDocumentAttention()(q.float(), k.float(), v.float(), DOCUMENTS).bfloat16())


@pytest.mark.parametrize("num_queries", [24, 9], ids="{} queries".format)
def test_flex_attention_has_the_same_forward(num_queries):
    q, k, v = (x.detach() for x in inputs(num_queries))
    attend = FlexAttention()
    mask = attend.make_mask(DOCUMENTS, num_queries=num_queries)
    torch.testing.assert_close(attend(q, k, v, mask), dense(q, k, v))


def test_a_compiled_layer_takes_the_block_masks_of_all_batches():
    flex = FlexAttention()
    attend = torch.compile(flex, backend="eager", fullgraph=True, dynamic=False)
    q, k, v = (x.detach() for x in inputs())
    with one_graph():
        for shift in (0, 1, 7):
            documents = DOCUMENTS.roll(shift, dims=0)
            torch.testing.assert_close(
                attend(q, k, v, flex.make_mask(documents, num_queries=LENGTH)), dense(q, k, v, documents)
            )


@torch.library.custom_op("titan_tests::scaled_by_starts", mutates_args=())
def scaled_by_starts(q_TNH: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return q_TNH * starts.sum()


@scaled_by_starts.register_fake
def _(q_TNH: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q_TNH)


def test_a_compiled_layer_takes_any_number_of_documents_for_varlen(monkeypatch):
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda q, k, v, starts, *rest, **options: scaled_by_starts(q, starts)
    )
    varlen = VarlenAttention()
    attend = torch.compile(varlen, backend="aot_eager", fullgraph=True, dynamic=False)
    q, k, v = (x.detach() for x in inputs())
    with one_graph():
        for documents in (DOCUMENTS, DOCUMENTS * 0, torch.arange(LENGTH).expand(BATCH, -1), DOCUMENTS.clamp(max=1)):
            starts, _ = mask = varlen.make_mask(documents, num_queries=LENGTH)
            torch.testing.assert_close(attend(q, k, v, mask), q * starts.sum())


def by_sequence(
    q_TNH, k_TKH, v_TKH, starts_q, starts_k, longest_q, longest_k, *, window_size, enable_gqa=False, scale=None
):
    """What varlen_attn does, whose kernel runs on GPUs only: each sequence is attended to by itself."""
    assert window_size == (-1, 0)
    assert not VARLEN_ASKS_FOR_GQA or enable_gqa == (q_TNH.shape[1] != k_TKH.shape[1])
    assert starts_q.dtype == torch.int32 and starts_q is starts_k
    assert longest_q == longest_k == LENGTH
    out = []
    for start, stop in zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True):
        own = (x[start:stop].transpose(0, 1) for x in (q_TNH, k_TKH, v_TKH))
        out.append(F.scaled_dot_product_attention(*own, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out)


def test_varlen_gets_the_documents_of_the_flattened_batch(monkeypatch):
    attend = VarlenAttention()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_sequence)
    q, k, v = (x.detach() for x in inputs())
    mask = attend.make_mask(DOCUMENTS, num_queries=LENGTH)
    assert mask[0].tolist() == [0, 5, 6, 16, 24, 48]
    torch.testing.assert_close(attend(q, k, v, mask), dense(q, k, v))


@pytest.mark.parametrize(
    ("family", "flavor"), [("llama3", "debug_gqa"), ("qwen3", "debug_gqa"), ("deepseek_v3", "debug_v3")]
)
def test_a_model_computes_the_same_with_each_kernel(family, flavor, monkeypatch):
    """Every layer gets the mask; documents of a batch by themselves are those of a model without masks."""
    torch.manual_seed(0)
    model = get_trainer_family(family).build_model(get_family(family).flavors[flavor])
    for parameter in model.parameters():
        if parameter.ndim == 3:  # stacks of experts are made without values
            torch.nn.init.normal_(parameter, std=0.1)
    tokens, positions = torch.randint(2048, (BATCH, LENGTH)), positions_in_documents(DOCUMENTS)
    with torch.no_grad():
        expected = model(tokens)
        for start, stop in ((0, 5), (5, 6), (6, 16), (16, 24)):
            expected[0, start:stop] = model(tokens[:1, start:stop])[0]
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_sequence)
        for kernel in (PerDocumentAttention, FlexAttention, VarlenAttention):
            mask_documents(model, kernel)
            torch.testing.assert_close(model(tokens, positions, documents=DOCUMENTS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [PerDocumentAttention, FlexAttention])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_rank_masks_head_and_tail(rank, kernel, monkeypatch):
    """Of the whole sequence's keys, which it has gathered."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    q, k, v = (x.detach() for x in inputs())
    monkeypatch.setattr("trainer.parallel.context.gather_sequence", lambda own, group: torch.cat((k, v), dim=-1))
    attend, here = ContextParallelAttention(None, masked=kernel()), head_tail_positions(LENGTH, rank, 2)
    found = attend(q[:, here], k[:, here], v[:, here], mask=attend.make_masks(DOCUMENTS))
    torch.testing.assert_close(found, dense(q, k, v)[:, here])


def test_a_gpu_gets_the_kernel_that_is_asked_for():
    assert choose_masked_attention("flex", torch.device("cuda")) is FlexAttention
    assert choose_masked_attention("varlen", torch.device("cuda")) is VarlenAttention
    assert {choose_masked_attention(kernel, torch.device("cpu")) for kernel in ("flex", "varlen")} == {
        PerDocumentAttention
    }


def test_checkpointing_by_operation_keeps_what_the_kernels_return():
    FlexAttention(), VarlenAttention()
    kept = {str(operation) for operation in masked_attention.masked_operations()}
    assert kept == {"titan.attend_within_documents.default", "torch_attn._varlen_attn.default", "flex_attention"}


def test_positions_restart_in_each_document():
    expected = [[*range(5), 0, *range(10), *range(8)], [*range(24)]]
    assert positions_in_documents(DOCUMENTS).tolist() == expected
