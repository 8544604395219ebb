"""Mixtures of experts on a GPU: recorded and compiled steps, 8 bits, and batches with more rows than experts."""

import pytest
import torch
import torch.nn.functional as F

from tests.greedy_reference import assert_same, greedy, ragged_prompts
from tests.models.qwen3_moe import write as write_experts
from tests.tiny_infer import complete, load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import experts as experts_file
from titan_tools.infer.model.experts import StackedWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
# Rows of multiples of 16 bytes, as the grouped product takes them
NUMBERS = {"vocab_size": 301, "hidden_size": 64, "moe_intermediate_size": 48, "max_position_embeddings": 512}
TOKENS = torch.randint(301, (60,), generator=torch.Generator().manual_seed(0)).tolist()
ENGINES = [{"static": False}, {"static": True}, {"compile": True}]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder, and transformers' model of it, on the CPU."""
    folder = tmp_path_factory.mktemp("experts")
    return folder, write_experts(folder, **NUMBERS)


@pytest.fixture(scope="module")
def folder(written):
    return written[0]


@pytest.fixture(scope="module")
def reference(written):
    return written[1]


def logits_of(model, *, rows=1, **engine):
    """fp32 logits [30, V] of the last tokens, by decode steps in which all rows hold the same."""
    engine = Engine(model, rows=rows, room=512, **engine)
    for row in range(rows):
        engine.prefill(row, TOKENS[:30])
    logits = torch.stack([engine.decode([token] * rows) for token in TOKENS[30:]]).cpu()
    torch.testing.assert_close(logits, logits[:, :1].expand_as(logits), rtol=1e-3, atol=1e-3)
    return logits[:, 0]


@pytest.fixture(scope="module")
def expected(reference):
    with torch.inference_mode():
        return reference(torch.tensor([TOKENS])).logits[0, 30:]


@pytest.mark.parametrize("rows", [1, 8])  # 3 and 24 of 12 experts' rows
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_logits_in_fp32_are_those_of_transformers_on_a_cpu(reference, expected, folder, engine, rows):
    found = logits_of(load(folder, device=GPU), rows=rows, **engine)
    assert (found - expected).abs().max() < 2e-3 * expected.std()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("how", [None, "int8", "float8"])
def test_logits_in_bfloat16_and_8_bits_are_near(reference, folder, engine, rows, how):
    """Routing in bfloat16 differs in close calls, so most rows are compared, not all."""
    model, exact = load(folder, dtype=torch.bfloat16, device=GPU, quantize=how), load(folder, quantize=how)
    similarity = F.cosine_similarity(logits_of(model, rows=rows, **engine), logits_of(exact))
    assert similarity.median() > 0.99


def test_a_recorded_step_without_a_compiler_says_the_same(reference, expected, folder, monkeypatch):
    monkeypatch.setattr(experts_file, "_compiled_chosen_products", lambda: experts_file._gathered_products)
    found = logits_of(load(folder, device=GPU), static=True)
    assert (found - expected).abs().max() < 2e-3 * expected.std()


def test_large_batches_in_bfloat16_use_the_grouped_product_where_it_does_not_wait(folder, reference, monkeypatch):
    if torch.cuda.get_device_capability(GPU)[0] not in experts_file._GROUPED_WITHOUT_SYNC:
        pytest.skip("this GPU has no kernel for it")
    model = load(folder, dtype=torch.bfloat16, device=GPU)
    assert all(layer.experts.groups_without_sync for layer in model.experts)
    engine = Engine(model, rows=8, room=256)
    for row in range(8):
        engine.prefill(row, TOKENS)
    monkeypatch.setattr(StackedWeights, "multiply_chosen", lambda *_: pytest.fail("8 * 3 rows of 12 experts"))
    assert engine.decode([1] * 8).isfinite().all()


def test_greedy_tokens_in_fp32_are_those_of_transformers_on_a_cpu(reference, folder):
    prompts = ragged_prompts(num=16, longest=120, vocab_size=301)
    said = [c.tokens for c in complete(load(folder, device=GPU), prompts, rows=8, max_new_tokens=64)]
    assert_same(reference, prompts, said, greedy(reference, prompts, 64))


def test_a_greedy_step_waits_for_nothing_but_its_event(reference, folder):
    engine = Engine(load(folder, dtype=torch.bfloat16, device=GPU), rows=1, room=256)
    engine.prefill(0, TOKENS)
    tokens = [3]
    for step in range(12):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # the first one records, and fills the input
        try:
            (is_finite,), tokens = engine.decode_likeliest(tokens, ahead=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert is_finite
