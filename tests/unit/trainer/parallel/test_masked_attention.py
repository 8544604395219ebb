"""Windows, chunks and sinks, alone and in documents: every inner attention against the formula, token by token."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from converters.families.blocks import GroupedQuery
from trainer.models.attention import CausalAttention
from trainer.parallel.attention_backend import WideAttention
from trainer.parallel.context import ContextParallelAttention, head_tail_positions
from trainer.parallel.document_attention import PerDocumentAttention, _pieces, chunks_of_documents
from trainer.parallel.gpu_attention import FlexAttention
from trainer.parallel.masked_attention import OneOfMasks

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 160, 4, 2, 8
ONE_DOCUMENT = torch.zeros(1, LENGTH, dtype=torch.int32)  # one row, for all samples
LENGTHS = ([LENGTH], [5, 1, 30, 20, LENGTH - 56])
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in LENGTHS])
KINDS = [
    GroupedQuery(None, window=8),
    GroupedQuery(None, window=1, has_sinks=True),
    GroupedQuery(None, window=140, has_sinks=True),  # longer than a band of queries
    GroupedQuery(None, chunk=24),
    GroupedQuery(None, chunk=100, window=30, has_sinks=True),
    GroupedQuery(None, has_sinks=True),
    GroupedQuery(None),
]

FLEX_KINDS = [GroupedQuery(None, window=8, has_sinks=True), GroupedQuery(None, chunk=24)]  # uncompiled it is slow
CASES = [
    *((PerDocumentAttention, kind, documents) for kind in KINDS for documents in (ONE_DOCUMENT, DOCUMENTS)),
    *((FlexAttention, kind, documents) for kind in FLEX_KINDS for documents in (ONE_DOCUMENT, DOCUMENTS)),
]


def name_of(value) -> str:
    if isinstance(value, GroupedQuery):
        return f"window {value.window}, chunk {value.chunk}, sinks {value.has_sinks}"
    return f"{len(value)} rows" if isinstance(value, torch.Tensor) else value.__name__


def inputs(num_queries: int = LENGTH, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    shapes = ((num_queries, HEADS, HEAD_DIM), (LENGTH, KV_HEADS, HEAD_DIM), (LENGTH, KV_HEADS, HEAD_DIM))
    drawn = [torch.randn(BATCH, *shape, generator=generator, dtype=dtype) for shape in shapes]
    drawn.append(3 * torch.randn(HEADS, generator=generator, dtype=dtype))  # sinks, some larger than all scores
    return [x.requires_grad_() for x in drawn]


@cache
def sees(kind: GroupedQuery, documents: torch.Tensor, *, restarts: bool = True) -> torch.Tensor:
    """[B, S, S] by GroupedQuery's definition: positions count from each document's first token."""
    found = np.zeros((BATCH, LENGTH, LENGTH), bool)
    for sample, numbers in enumerate(documents.expand(BATCH, -1).tolist()):
        firsts = {number: numbers.index(number) if restarts else 0 for number in set(numbers)}
        positions = [place - firsts[number] for place, number in enumerate(numbers)]
        for query in range(LENGTH):
            for key in range(query + 1):
                p, q = positions[key], positions[query]
                found[sample, query, key] = (
                    numbers[query] == numbers[key]
                    and (kind.window is None or q - p < kind.window)
                    and (kind.chunk is None or q // kind.chunk == p // kind.chunk)
                )
    return torch.from_numpy(found)


def by_hand(q, k, v, sinks, sees_BCE, *, has_sinks: bool, scale: float | None = None) -> torch.Tensor:
    """The softmax has one more column, without a value, for each head's sink."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * (HEAD_DIM**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~sees_BCE[:, None], -torch.inf)
    if has_sinks:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bnqk,bknh->bqnh", weights, v)


def assert_same(found, expected, given, *, backward: bool = True) -> None:
    torch.testing.assert_close(found, expected)
    if backward:
        upstream = torch.randn_like(found)
        gradients = [torch.autograd.grad(out, given, upstream, allow_unused=True) for out in (found, expected)]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)


def masked(module, kind, documents, given, *, num_queries: int = LENGTH, restarts: bool = True) -> torch.Tensor:
    attend = module(kind.window)
    if kind.chunk is not None:
        documents = chunks_of_documents(documents, kind.chunk, positions_restart=restarts)
    q, k, v, sinks = given
    mask = attend.make_mask(documents, num_queries=num_queries)
    return attend(q, k, v, mask, scale=0.5, sinks_N=sinks if kind.has_sinks else None)


@pytest.mark.parametrize(("module", "kind", "documents"), CASES, ids=name_of)
def test_a_kernel_computes_the_formula(module, kind, documents):
    given, seen = inputs(), sees(kind, documents)
    expected = by_hand(*given, seen, has_sinks=kind.has_sinks, scale=0.5)
    if module is FlexAttention:  # no backward on a CPU
        given = [x.detach() for x in given]
    assert_same(masked(module, kind, documents, given), expected, given, backward=module is not FlexAttention)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_so_do_the_last_queries(kind):
    given, seen = inputs(100), sees(kind, DOCUMENTS)[:, -100:]
    expected = by_hand(*given, seen, has_sinks=kind.has_sinks, scale=0.5)
    assert_same(masked(PerDocumentAttention, kind, DOCUMENTS, given, num_queries=100), expected, given)
    if kind in FLEX_KINDS:
        found = masked(FlexAttention, kind, DOCUMENTS, [x.detach() for x in given], num_queries=100)
        torch.testing.assert_close(found, expected)


def test_in_bf16_it_is_as_exact_as_its_inputs():
    """As context ranks on a CPU compute it."""
    kind, given = GroupedQuery(None, window=8, has_sinks=True), inputs(dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in given]
    found, expected = (
        masked(PerDocumentAttention, kind, DOCUMENTS, given),
        by_hand(*exact, sees(kind, DOCUMENTS), has_sinks=True, scale=0.5),
    )
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    ours, theirs = torch.autograd.grad(found, given, upstream), torch.autograd.grad(expected, exact, upstream.double())
    for mine, other in zip((found, *ours), (expected, *theirs), strict=True):
        assert mine.dtype == torch.bfloat16 and (mine - other).norm() <= 2**-7 * other.norm()


@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_a_scale_reaches_every_attention_that_a_layer_may_call(monkeypatch, named):
    """With masks of documents, without, in fp32 of a CPU, and of a context rank."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    q, k, v, sinks = (x.detach() for x in inputs())
    scale = ((), {"scale": 0.5}) if named else ((0.5,), {})
    causal = by_hand(q, k, v, sinks, sees(GroupedQuery(None), ONE_DOCUMENT), has_sinks=False, scale=0.5)
    within = by_hand(q, k, v, sinks, sees(GroupedQuery(None), DOCUMENTS), has_sinks=False, scale=0.5)
    masks, here = (None, DOCUMENTS), head_tail_positions(LENGTH, 0, 2)
    of_rank = ContextParallelAttention(None, gathers=False)
    for attend, expected, mask in (
        (CausalAttention(), causal, {}),
        (WideAttention(CausalAttention()), causal, {}),
        (OneOfMasks(CausalAttention(), 0), causal, {"mask": masks}),
        (OneOfMasks(PerDocumentAttention(), 1), within, {"mask": masks}),
        (OneOfMasks(WideAttention(PerDocumentAttention()), 1), within, {"mask": masks}),
    ):
        found = attend(q, k, v, *scale[0], **scale[1], **mask)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_rank(q[:, here], k, v, *scale[0], **scale[1]), causal[:, here])


def test_chunks_of_positions_that_do_not_restart():
    """torchtitan v0.2.2's meaning of documents, which `training.document_mask = eos` has."""
    kind, given = GroupedQuery(None, chunk=24), inputs()
    expected = by_hand(*given, sees(kind, DOCUMENTS, restarts=False), has_sinks=False, scale=0.5)
    assert_same(masked(PerDocumentAttention, kind, DOCUMENTS, given, restarts=False), expected, given)
    assert not sees(kind, DOCUMENTS, restarts=False).equal(sees(kind, DOCUMENTS))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_models_default_attention_computes_the_formula(kind):
    given = inputs()
    expected = by_hand(*given, sees(kind, ONE_DOCUMENT), has_sinks=kind.has_sinks)
    q, k, v, sinks = given
    assert_same(CausalAttention(kind)(q, k, v, sinks_N=sinks if kind.has_sinks else None), expected, given)


@pytest.mark.parametrize(("module", "kind", "documents"), [CASES[0], *CASES[1::2]], ids=name_of)
def test_context_ranks_count_positions_of_the_whole_sequence(module, kind, documents, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    q, k, v, sinks = (x.detach() for x in inputs())
    monkeypatch.setattr("trainer.parallel.context.gather_sequence", lambda own, group: torch.cat((k, v), dim=-1))
    expected = by_hand(q, k, v, sinks, sees(kind, documents), has_sinks=kind.has_sinks)
    chunks = documents if kind.chunk is None else chunks_of_documents(documents, kind.chunk)
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.get_rank", lambda group, rank=rank: rank)
        here = head_tail_positions(LENGTH, rank, 2)
        attend = ContextParallelAttention(None, masked=module(kind.window), kind=kind)
        found = attend(
            *(x[:, here] for x in (q, k, v)), mask=attend.make_masks(chunks), sinks_N=sinks if kind.has_sinks else None
        )
        torch.testing.assert_close(found, expected[:, here])


def test_a_context_rank_leaves_out_keys_that_none_of_its_queries_may_see(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    places = partial(ContextParallelAttention, None)
    of_window, of_chunk, of_all = (
        places(kind=kind)._keys_of_halves(40)
        for kind in (GroupedQuery(None, window=8), GroupedQuery(None, chunk=24), GroupedQuery(None))
    )
    assert of_window == (slice(0, 40), slice(113, 160))
    assert of_chunk == (slice(0, 40), slice(97, 160))  # a chunk of a document may begin anywhere
    assert of_all == (slice(0, 40), slice(0, 160))


def test_a_window_needs_no_scores_of_all_pairs_of_tokens():
    """Forward, and backward, which runs the same pieces."""
    q = torch.empty(BATCH, 8192, HEADS, HEAD_DIM)
    pieces = list(_pieces(torch.zeros(1, 8192), q, 128))
    assert sum((queries.stop - queries.start) * (keys.stop - keys.start) for _, queries, keys, _ in pieces) < 8192 * 256
    assert all(samples == slice(BATCH) for samples, *_ in pieces)
    assert len({id(bias) for *_, bias in pieces}) == 2  # the first band is causal; the others share one mask


def test_a_compiled_layer_takes_its_own_of_the_block_masks_of_all_batches():
    kind, given = FLEX_KINDS[0], [x.detach() for x in inputs()]
    flex, plain = FlexAttention(kind.window), FlexAttention()
    attend = torch.compile(OneOfMasks(flex, 1), backend="eager", fullgraph=True, dynamic=False)
    *qkv, sinks = given
    torch._dynamo.reset()
    counters.clear()
    try:
        for documents in (DOCUMENTS, DOCUMENTS.flip(0)):
            masks = tuple(each.make_mask(documents, num_queries=LENGTH) for each in (plain, flex))
            found = attend(*qkv, mask=masks, sinks_N=sinks)
            torch.testing.assert_close(found, by_hand(*given, sees(kind, documents), has_sinks=True))
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        torch._dynamo.reset()


def test_reruns_are_bit_equal():
    kind, results = GroupedQuery(None, window=8, has_sinks=True), []
    for _ in range(2):
        given = inputs(dtype=torch.float32)
        out = masked(PerDocumentAttention, kind, DOCUMENTS, given)
        results.append((out, *torch.autograd.grad(out.square().sum(), given)))
    assert all(first.equal(second) for first, second in zip(*results, strict=True))
