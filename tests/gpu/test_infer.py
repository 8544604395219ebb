"""Inference on a GPU: decode steps recorded as CUDA graphs, compiled, in 8 bits. One device; skipped where none is."""

import gc
import json

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.running import titan
from tests.greedy_reference import assert_same, greedy, ragged_prompts
from tests.models.llama import write as write_llama
from tests.tiny_infer import NO_TEXT, load
from titan_tools.infer.decoding import engine as engine_file
from titan_tools.infer.decoding import sampling as sampling_file
from titan_tools.infer.decoding.attention import attention_kernels
from titan_tools.infer.decoding.cache import LayerCache
from titan_tools.infer.decoding.engine import Engine, RowTokens
from titan_tools.infer.decoding.generate import GenerationSettings, generate
from titan_tools.infer.decoding.generate import _Run as Run
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.decoding.static_decode import SplitKeys, can_split
from titan_tools.infer.decoding.steps import Prefill, Span
from titan_tools.infer.model.quantize import quantize_weight
from titan_tools.infer.model.reach import Reach
from titan_tools.infer.text.prompts import Prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
HOW = [None, "int8", "float8"]
VOCAB_SIZE = 301
# Heads as large as flash attention's, grouped, and long enough for three lengths of recorded steps
NUMBERS = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
}
ASK = ["--prompt", "def main(", "--max-new-tokens", "24", "--ignore-eos", "--json"]
COMMANDS = [
    ([], "float32"),
    (["--dtype", "bfloat16"], "bfloat16"),
    (["--dtype", "float16"], "float16"),
    (["--dtype", "bfloat16", "--compile"], "bfloat16"),
    (["--dtype", "bfloat16", "--quantize", "int8"], "int8"),
    (["--dtype", "bfloat16", "--quantize", "float8"], "float8"),
    (["--dtype", "bfloat16", "--quantize", "int8", "--compile"], "int8"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder, and transformers' model, on the CPU, read back from it."""
    folder = tmp_path_factory.mktemp("hf")
    return folder, write_llama(folder, **NUMBERS)


@pytest.fixture(scope="module")
def folder(written):
    return written[0]


@pytest.fixture(scope="module")
def reference(written):
    return written[1]


def tokens_of(num, *, seed=0):
    return torch.randint(VOCAB_SIZE, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def said(model, prompts, *, rows, engine=None, **settings):
    """Tokens after each prompt; `engine`: how it decodes."""
    settings = GenerationSettings(**settings)
    room = max(map(len, prompts)) + settings.max_new_tokens
    asked = [Prompt(str(n), "", list(tokens)) for n, tokens in enumerate(prompts)]
    completions = generate(Engine(model, rows=rows, room=room, **(engine or {})), asked, settings, NO_TEXT)
    return [c.tokens for c in sorted(completions, key=lambda c: int(c.prompt.id))]


def output(model, tokens, *, behind, room=700, **engine):
    """fp32 logits [N, V] of the tokens from place `behind` on: the first by prefill, the others by decode steps."""
    engine = Engine(model, rows=1, room=room, **engine)
    logits = [engine.prefill(0, tokens[: behind + 1])]
    logits += [engine.decode([token])[0] for token in tokens[behind + 1 :]]
    return torch.stack(logits).cpu()


def expected(reference, tokens, *, behind):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0, behind:].float()


def assert_close(found, exact, *, cosine):
    """Every row of logits points where it should."""
    assert found.isfinite().all() and found.shape == exact.shape
    assert F.cosine_similarity(found, exact).min() > cosine


@pytest.mark.parametrize("rows", [1, 8])
def test_greedy_tokens_in_fp32_are_those_of_transformers_on_a_cpu(reference, folder, rows):
    """Ragged rows that end, move up and make room, all in recorded steps."""
    prompts = ragged_prompts(num=8 if rows == 1 else 24, longest=120, vocab_size=VOCAB_SIZE)
    ours = said(load(folder, device=GPU), prompts, rows=rows, max_new_tokens=64)
    assert_same(reference, prompts, ours, greedy(reference, prompts, 64))


def test_seeded_tokens_in_fp32_are_those_of_the_cpu(reference, folder, monkeypatch):
    monkeypatch.setattr(sampling_file, "_FEW", 16)  # which is enough for top-p at some steps only
    prompts = ragged_prompts(num=6, longest=60, vocab_size=VOCAB_SIZE, seed=1)
    how = {"max_new_tokens": 32, "sampling": Sampling(0.9, top_k=80, top_p=0.95, seed=3)}
    on_gpu, on_cpu = (said(load(folder, device=d), prompts, rows=4, **how) for d in (GPU, torch.device("cpu")))
    assert on_gpu == on_cpu and len(set(map(tuple, on_gpu))) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", [{"static": False}, {"static": True}, {"compile": True}], ids=str)
def test_logits_of_decode_steps_are_those_of_one_pass(reference, folder, engine, dtype):
    """From 240 to 530 tokens: recorded steps of three lengths, each of which takes over what the last one wrote."""
    tokens = tokens_of(530)
    found, exact = (
        output(load(folder, dtype=dtype, device=GPU), tokens, behind=240, **engine),
        expected(reference, tokens, behind=240),
    )
    assert_close(found, exact, cosine=0.99 if dtype == torch.bfloat16 else 0.99999)
    if dtype == torch.float32:
        assert (found - exact).abs().max() < 2e-3 * exact.std()


def test_keys_are_split_where_flash_attention_is():
    is_ampere_or_newer = torch.cuda.get_device_capability(GPU) >= (8, 0) and torch.version.hip is None
    assert [can_split(GPU, torch.bfloat16, dim) for dim in (64, 128, 256)] == [is_ampere_or_newer] * 3
    assert not can_split(GPU, torch.float32, 128) and not can_split(GPU, torch.bfloat16, 36)


@pytest.mark.parametrize("compile", [False, True])
def test_ragged_rows_with_split_keys_are_those_with_masked_ones(folder, monkeypatch, compile):
    model, prompts = load(folder, dtype=torch.bfloat16, device=GPU), [tokens_of(n, seed=n) for n in (3, 250, 700)]
    found = []
    for splits in (False, True):
        monkeypatch.setattr(engine_file, "can_split", lambda *_, splits=splits: splits)
        engine = Engine(model, rows=5, room=900, compile=compile)
        for row, prompt in enumerate(prompts):
            engine.prefill(row, prompt)
        found.append(torch.cat([engine.decode([token] * 3) for token in tokens_of(20)]).cpu())
    assert_close(found[1], found[0], cosine=0.999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_are_launched_ahead_change_no_token(folder, monkeypatch, dtype):
    """One row with stop tokens, several without: in both, a step is launched before the last token is read."""
    model, prompts = load(folder, dtype=dtype, device=GPU), ragged_prompts(num=7, longest=300, vocab_size=VOCAB_SIZE)
    cases = [(1, {"stop_ids": frozenset(range(0, VOCAB_SIZE, 9))}), (3, {}), (3, {"samples": 2})]
    ahead = [said(model, prompts, rows=rows, max_new_tokens=80, **settings) for rows, settings in cases]
    monkeypatch.setattr(Run, "_all_continue", lambda _: False)
    assert ahead == [said(model, prompts, rows=rows, max_new_tokens=80, **settings) for rows, settings in cases]


def test_a_greedy_step_waits_for_nothing_but_its_event(folder):
    """Between the launch of a step and the reading of its token nothing synchronizes."""
    engine = Engine(load(folder, dtype=torch.bfloat16, device=GPU), rows=1, room=256)
    engine.prefill(0, tokens_of(20))
    tokens = [3]
    for step in range(12):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # the first one records, and fills the input
        try:
            (is_finite,), tokens = engine.decode_likeliest(tokens, ahead=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert is_finite


@pytest.mark.parametrize("num_kv_heads", [2, 8], ids=["grouped heads", "heads of their own"])
def test_keys_are_split_for_every_sort_of_heads(num_kv_heads):
    if not can_split(GPU, torch.bfloat16, 128):
        pytest.skip("flash attention does not run here")
    keys, values = (
        torch.randn(1, 8192, num_kv_heads, 128, device=GPU, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)
    )
    q_B1NH = torch.randn(1, 1, 8, 128, device=GPU, dtype=torch.bfloat16)
    key_range = SplitKeys(num=1, length=8192, room=8192, device=GPU)
    key_range.begin(torch.tensor([[8000]], device=GPU))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = key_range.attend(q_B1NH, LayerCache(keys, values, Reach(8192)))
        torch.cuda.synchronize()
    assert any("splitkv_combine" in event.name for event in profile.events()), [e.name for e in profile.events()]
    seen = (kept[:, :, :8001].float() for kept in (keys, values))
    exact = F.scaled_dot_product_attention(q_B1NH.float().transpose(1, 2), *seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found.float(), exact, atol=5e-3, rtol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["masked keys", "split keys"])
def test_all_lengths_share_what_is_compiled(folder, dtype):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = Engine(load(folder, dtype=dtype, device=GPU), rows=1, room=2048, compile=True)
    for length in (10, 300, 600, 1500):
        engine.prefill(0, tokens_of(length))
        engine.decode([1])
    assert len(engine._static._steps) == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 + 1  # layer, head; one more for the whole room


def test_every_shape_more_takes_little_memory(folder):
    """A stream for each would have a workspace of 32 MiB for each."""
    engine = Engine(load(folder, dtype=torch.bfloat16, device=GPU), rows=4, room=1100)
    held = []
    for num in (1, 2, 3):
        for length in (10, 300, 600, 1030):
            for row in range(num):
                engine.prefill(row, tokens_of(length))
            engine.decode([1] * num)
            held.append(torch.cuda.memory_allocated(GPU))
    assert len(engine._static._steps) == 12
    assert held[-1] - held[0] < 32 << 20


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("engine", [{}, {"compile": True}], ids=str)
def test_eight_bits_decode_alike_however_they_are_multiplied(reference, folder, how, engine):
    """In recorded steps and compiled, against products with the rounded weights written out, on the CPU in fp32."""
    tokens = tokens_of(60, seed=2)
    found = output(load(folder, dtype=torch.bfloat16, device=GPU, quantize=how), tokens, behind=30, **engine)
    exact = output(load(folder, quantize=how), tokens, behind=30)
    assert_close(found, exact, cosine=0.99)


@pytest.mark.parametrize("engine", [{}, {"compile": True}], ids=str)
def test_rows_of_a_batch_in_eight_bits_are_those_of_each_alone(reference, folder, engine):
    model = load(folder, dtype=torch.float32, device=GPU, quantize="int8")
    prompts = ragged_prompts(num=5, longest=40, vocab_size=VOCAB_SIZE, seed=4)
    alone, together = (said(model, prompts, rows=rows, max_new_tokens=16, engine=engine) for rows in (1, 5))
    differing = sum(a != b for one, other in zip(alone, together, strict=True) for a, b in zip(one, other, strict=True))
    assert differing <= 16  # a close call of one row changes what follows it


def ordinals(codes):
    """Numbers in the order of the codes: neighbours differ by 1."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.parametrize("shape", [(301, 45), (1000, 512), (5, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["int8", "float8"])
def test_a_product_of_eight_bits_is_that_of_the_rounded_weight(how, dtype, shape):
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(shape, generator=generator) * torch.logspace(-4, 1, shape[0])[:, None]
    weight, on_cpu = quantize_weight(exact.to(GPU, dtype), how), quantize_weight(exact.to(dtype), how)
    # torch divides by a number on a GPU as it multiplies by its reciprocal: a scale differs by a few units of 2**-24
    # from the CPU's, and a quotient, of at most 448, by less than 2**-12 of a step. Those so near the middle of two
    # codes are rounded to the other one: 0.02 % of all, and exact middles, which are rare
    torch.testing.assert_close(weight.scale_N.cpu().float(), on_cpu.scale_N.float(), rtol=2**-21, atol=0)
    steps = (ordinals(weight.data_NK.cpu()) - ordinals(on_cpu.data_NK)).abs()
    assert steps.max() <= 1 and steps.float().mean() <= 0.01
    for num_rows in (1, 3, 70):
        x = torch.randn(num_rows, 1, shape[1], generator=generator).to(dtype)
        with torch.inference_mode():
            found = F.linear(x.to(GPU), weight)
        truth = F.linear(x.double(), weight.dequantize().double().cpu())
        assert found.dtype == dtype
        assert (found.cpu().double() - truth).norm() <= (8e-3 if dtype == torch.bfloat16 else 1e-5) * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_in_pieces_sees_what_lies_before_it(reference, folder, monkeypatch, dtype):
    """Behind earlier tokens bfloat16 goes to flash attention without a mask, fp32 to a mask."""
    monkeypatch.setitem(engine_file.PREFILL_TOKENS, "cuda", 48)
    tokens = tokens_of(200, seed=5)
    engine = Engine(load(folder, dtype=dtype, device=GPU), rows=2, room=256)
    engine.prefill(0, tokens_of(90, seed=6))  # another row's keys are not looked at
    hidden_LD = torch.cat(list(engine.hidden(1, tokens)))
    with torch.inference_mode():
        found = engine.model.head(hidden_LD).float().cpu()
    assert_close(found, expected(reference, tokens, behind=0), cosine=0.99 if dtype == torch.bfloat16 else 0.99999)
    again = engine.prefill(1, [*tokens[:150], *tokens_of(20, seed=7)], keep=150).cpu()
    exact = expected(reference, [*tokens[:150], *tokens_of(20, seed=7)], behind=169)[0]
    assert F.cosine_similarity(again, exact, dim=0) > (0.99 if dtype == torch.bfloat16 else 0.99999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_in_one_pass_are_those_of_each_alone(reference, folder, dtype):
    """Some from their beginning, some behind what their row holds or was given of another's."""
    engine = Engine(load(folder, dtype=dtype, device=GPU), rows=4, room=512)
    head = tokens_of(300)
    engine.prefill(1, head)
    engine.prefill(2, tokens_of(90, seed=1))
    prompts = [tokens_of(3, seed=2), [*head, *tokens_of(20, seed=3)], tokens_of(110, seed=1), [*head[:280], 5, 6]]
    keeps = [engine.take_beginning(row, prompt) for row, prompt in enumerate(prompts)]
    assert keeps == [0, 300, 90, 280]
    found = engine.prefill_rows([RowTokens(row, *each) for row, each in enumerate(zip(prompts, keeps, strict=True))])
    exact = torch.cat([expected(reference, prompt, behind=len(prompt) - 1) for prompt in prompts])
    assert_close(found.cpu(), exact, cosine=0.99 if dtype == torch.bfloat16 else 0.99999)


def test_prompts_that_share_a_beginning_say_what_transformers_says(reference, folder):
    head = tokens_of(280, seed=8)
    prompts = [[*head, *prompt] for prompt in ragged_prompts(num=12, longest=20, vocab_size=VOCAB_SIZE, seed=9)]
    ours = said(load(folder, device=GPU), [*prompts, prompts[0]], rows=4, max_new_tokens=32)
    assert ours[-1] == ours[0]
    assert_same(reference, prompts, ours[:-1], greedy(reference, prompts, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_grouped_heads_never_holds_all_scores(dtype):
    """2048 queries of 32 heads over 16k keys: the scores alone would be 4 GiB in fp32."""
    num_new, num_keys, head_dim = 2048, 16384, 64
    keys, values = (torch.randn(1, num_keys, 4, head_dim, dtype=dtype, device=GPU).transpose(1, 2) for _ in range(2))
    q_1LNH = torch.randn(1, num_new, 32, head_dim, dtype=dtype, device=GPU)
    k_1LKH, v_1LKH = (torch.randn(1, num_new, 4, head_dim, dtype=dtype, device=GPU) for _ in range(2))
    for start in (0, num_keys - num_new):
        step = Prefill([Span(0, start, start + num_new)], device=GPU, dtype=dtype)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with attention_kernels(GPU):
            out_1LNH = step.attend(LayerCache(keys, values, Reach(num_keys)), q_1LNH, k_1LKH, v_1LKH)
        assert torch.cuda.max_memory_allocated() - before < 1 << 30
        for at in (0, 1, 777, 2047):
            seen = (kept[:, :, : start + at + 1].double() for kept in (keys, values))
            exact = F.scaled_dot_product_attention(
                q_1LNH[:, at : at + 1].double().transpose(1, 2), *seen, enable_gqa=True
            )
            close = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out_1LNH[:, at].double(), exact[:, :, 0], atol=close, rtol=close)


@pytest.mark.parametrize("how", HOW)
def test_loading_holds_the_shard_and_little_more(tmp_path, how):
    """Device memory of a model of 60 million weights: read, joined and rounded one layer at a time."""
    write_llama(
        tmp_path, **NUMBERS | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "head_dim": 64}
    )
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(tmp_path, dtype=torch.bfloat16, device=GPU, quantize=how)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    embedding = model.body.tok_embeddings.weight
    assert held <= 1.02 * (model.bytes_per_token + embedding.numel() * embedding.element_size()) + (2 << 20)
    largest = 2 * 4096 * 1024  # elements: w1 and w3 are one
    ahead = 96 << 20  # read ahead of what is kept, and the largest of that
    assert peak <= held + ahead + (6 * 4 * largest if how else 0)  # rounding goes through fp32


@pytest.mark.parametrize(("options", "dtype"), COMMANDS, ids=lambda value: " ".join(value) if value else "")
def test_the_command_tells_how_fast_memory_was_read(reference, folder, options, dtype):
    result = json.loads(titan("infer", folder, *ASK, *options).stdout)
    stats = result["stats"]
    assert len(result["results"][0]["tokens"]) == 24
    assert stats["dtype"] == dtype and stats["tp"] == 1
    assert stats["bandwidth_gb_per_sec"] > 0 and 0 < stats["peak_memory_gib"] < 4
    if any(name in torch.cuda.get_device_name() for name in ("H100", "H200", "A100")):
        assert 0 < stats["bandwidth_share"] < 1
