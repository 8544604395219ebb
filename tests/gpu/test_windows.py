"""Windows, chunks and sinks on a GPU: FlexAttention against float64 on the CPU, and models against the CPU's."""

import pytest
import torch
from torch import Tensor, nn

from converters.families import gpt_oss, llama4
from converters.families.blocks import GroupedQuery
from trainer.config.sections import Compile
from trainer.models.attention import attend_densely
from trainer.models.registry import get_trainer_family
from trainer.parallel.compile import apply_compile
from trainer.parallel.context import ContextParallelAttention, head_tail_positions
from trainer.parallel.document_attention import PerDocumentAttention, chunks_of_documents, positions_in_documents
from trainer.parallel.gpu_attention import FlexAttention
from trainer.parallel.masked_attention import apply_masks, masked_layers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda")
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 1024, 16, 2, 64  # eight query heads share keys, as GPT-OSS's
KINDS = [
    GroupedQuery(None, window=128, has_sinks=True),
    GroupedQuery(None, has_sinks=True),
    GroupedQuery(None, window=100),  # no multiple of FlexAttention's blocks
    GroupedQuery(None, chunk=256),
    GroupedQuery(None, chunk=200, has_sinks=True),
]
MODELS = {
    "debug_window": ("gpt_oss", gpt_oss.FLAVORS["debug_window"]),
    "debug_scout": ("llama4", llama4.FLAVORS["debug_scout"]),
}


def name_of(kind: GroupedQuery) -> str:
    return f"window {kind.window}, chunk {kind.chunk}, sinks {kind.has_sinks}"


def inputs(dtype: torch.dtype, num_queries: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((num_queries, HEADS, HEAD_DIM), (LENGTH, KV_HEADS, HEAD_DIM), (LENGTH, KV_HEADS, HEAD_DIM))
    drawn = [torch.randn(BATCH, *shape) for shape in shapes] + [3 * torch.randn(HEADS)]
    return [x.cuda().to(dtype).requires_grad_() for x in drawn]


def by_flex(kind: GroupedQuery, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    attend, whole = FlexAttention(kind.window), torch.zeros(1, LENGTH, dtype=torch.int32, device=GPU)
    numbers = whole if kind.chunk is None else chunks_of_documents(whole, kind.chunk)
    mask = attend.make_mask(numbers, num_queries=LENGTH)
    return attend(q, k, v, mask, sinks_N=sinks if kind.has_sinks else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_flex_attention_gives_the_result_and_the_gradients(kind, dtype):
    given = inputs(dtype)
    exact = [x.detach().cpu().double().requires_grad_() for x in given]
    q, k, v, sinks = exact
    wanted = attend_densely(q, k, v, kind, None, sinks if kind.has_sinks else None)
    upstream = torch.randn_like(wanted)
    found = by_flex(kind, *given)
    theirs = torch.autograd.grad(wanted, exact, upstream, allow_unused=True)
    ours = torch.autograd.grad(found, given, upstream.cuda().to(dtype), allow_unused=True)
    bound = 2e-2 if dtype == torch.bfloat16 else 5e-3  # TF32 products
    for mine, other in zip((found, *ours), (wanted, *theirs), strict=True):
        if other is not None:
            assert (mine.cpu().double() - other).norm() <= bound * other.norm()


def test_no_sequence_length_is_computed_with_all_scores_in_memory():
    """Dynamo gives up compiling after a number of versions."""
    attend = FlexAttention(KINDS[0].window)
    for length in range(4096, 4096 + 12 * 128, 128):
        q, k = (torch.randn(1, length, heads, HEAD_DIM, device=GPU, dtype=torch.bfloat16) for heads in (HEADS, 2))
        mask = attend.make_mask(torch.zeros(1, length, dtype=torch.int32, device=GPU), num_queries=length)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(q, k, k, mask, sinks_N=torch.zeros(HEADS, device=GPU))
        assert torch.cuda.max_memory_allocated() - before < HEADS * length**2


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_context_rank_computes_its_part(kind, rank, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    q, k, v, sinks = (x.detach() for x in inputs(torch.float32))
    monkeypatch.setattr("trainer.parallel.context.gather_sequence", lambda own, group: torch.cat((k, v), dim=-1))
    used = sinks if kind.has_sinks else None
    wanted = attend_densely(*(x.cpu().double() for x in (q, k, v)), kind, None, None if used is None else used.cpu())
    here, whole = head_tail_positions(LENGTH, rank, 2), torch.zeros(1, LENGTH, dtype=torch.int32, device=GPU)
    numbers = whole if kind.chunk is None else chunks_of_documents(whole, kind.chunk)
    attend = ContextParallelAttention(None, masked=FlexAttention(kind.window), kind=kind)
    found = attend(*(x[:, here] for x in (q, k, v)), mask=attend.make_masks(numbers), sinks_N=used)
    assert (found.cpu().double() - wanted[:, here]).norm() <= 5e-3 * wanted[:, here].norm()


def made(name: str, kernel: type[nn.Module], device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    family, args = MODELS[name]
    model = get_trainer_family(family).build_model(args)
    for fqn, parameter in model.named_parameters():
        if "norm" not in fqn:
            nn.init.normal_(parameter, std=1.0 if "gate" in fqn or "sinks" in fqn else 0.05)
    for buffer in model.buffers():
        buffer.zero_()
    model = model.to(device)
    apply_masks(model, masked_layers(model, kernel, has_documents=True), device)
    return model


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_as_on_a_cpu(name, is_compiled):
    """With documents and without, by turns: each has masks of its own."""
    on_cpu, on_gpu = made(name, PerDocumentAttention, torch.device("cpu")), made(name, FlexAttention, GPU)
    if is_compiled:
        apply_compile(on_gpu, Compile(enable=True))
    tokens, documents = torch.randint(2048, (2, 256)), (torch.arange(256) // 90).expand(2, -1)
    for numbers in (None, documents, None):
        positions = torch.arange(256) if numbers is None else positions_in_documents(numbers)
        gradients = []
        for model, device in ((on_cpu, torch.device("cpu")), (on_gpu, GPU)):
            model.zero_grad()
            here = None if numbers is None else numbers.to(device)
            logits = model(tokens.to(device), positions.to(device), documents=here)
            logits.float().logsumexp(-1).mean().backward()
            grads = {fqn: p.grad.cpu() for fqn, p in model.named_parameters()}
            gradients.append({"logits": logits.detach().cpu(), **grads})
        exact, found = gradients
        shares = {fqn: ((found[fqn] - theirs).norm() / theirs.norm()).item() for fqn, theirs in exact.items()}
        assert max(shares.values()) <= 1e-2, shares
