"""Windows, chunks and sinks in the cache, against transformers: prompts and steps past them, rows cut back and copied.

Sequences are some times as long as a window (8) or a chunk (12), so that every slot is written several times.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch

from tests.models.in_memory import NUMBERS, load_native, make
from tests.tiny_infer import CPU, complete
from tests.watched_engine import Watched, run
from titan_tools.infer.decoding import attention, static_decode, steps
from titan_tools.infer.decoding import engine as engine_file
from titan_tools.infer.decoding.engine import Engine, RowTokens
from titan_tools.infer.decoding.likelihood import Likelihood, ScoredText
from titan_tools.infer.model import tensor_parallel
from titan_tools.infer.model.reach import Reach

ROOM, VOCAB = 64, 97
TEXT = [(37 * n + 11) % VOCAB for n in range(60)]
pytestmark = pytest.mark.usefixtures("one_thread")


class Pair:
    """transformers' model and ours; logits of the first differ by `error` from those in float64, at most."""

    def __init__(self, name):
        self.name, self.theirs = name, make(name)
        self.ours = load_native(self.theirs)
        exact = one_pass(deepcopy(self.theirs).double(), TEXT)
        self.bound = max(1e-5 * exact.abs().max(), 8 * (one_pass(self.theirs, TEXT) - exact).abs().max())

    def assert_near(self, found_V, tokens):
        assert (found_V - one_pass(self.theirs, tokens)[-1]).abs().max() < self.bound


@torch.inference_mode()
def one_pass(model, tokens):
    """Logits [L, V] of `tokens`."""
    return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=NUMBERS)
def pair(request):
    return Pair(request.param)


@pytest.fixture(scope="module")
def oss():
    return Pair("gpt_oss")


@pytest.fixture(scope="module")
def scout():
    return Pair("scout")


HOWS = {
    "dynamic": {},
    "one by one": {},
    "static": {"static": True},
    "split": {"static": True},
    "compiled": {"compile": True, "backend": "eager"},
    "without sums": {},
}
QUICK = {("scout", "static"), ("maverick", "dynamic"), *(("gpt_oss", how) for how in HOWS if how != "compiled")}


def prepare(how, monkeypatch):
    monkeypatch.setattr(engine_file, "_ROOM_STEP", 1)
    monkeypatch.setattr(static_decode, "SHORTEST", 64 if how == "compiled" else 4)
    if how == "one by one":
        monkeypatch.setattr(steps, "_MOST_PADDING", 0)
    if how == "without sums":
        monkeypatch.setattr(attention, "has_sums_on_cpu", lambda dtype: False)
        monkeypatch.setattr(attention, "_SCORES", 300)
    if how == "split":
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention)
        monkeypatch.setattr(engine_file, "can_split", lambda *_, **named: True)
        monkeypatch.setattr(steps, "can_flash", lambda *_: True)


def flash_attention(
    q, keys, values, first_query, first_key, most_q, most_k, dropout, is_causal, _,
    *, scale, seqused_k=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """torch.ops.aten._flash_attention_forward on a GPU: sequences of one query behind each other, or a batch of one."""
    if first_query is None:
        assert is_causal and window_size_right == (None if window_size_left is None else 0)
        k, v = (x[0].transpose(0, 1).repeat_interleave(q.shape[2] // x.shape[2], dim=0) for x in (keys, values))
        scores = q[0].transpose(0, 1) @ k.mT * (scale or q.shape[-1] ** -0.5)
        places = torch.arange(k.shape[1])
        far = places[-q.shape[1] :, None] - places
        most = len(places) if window_size_left is None else window_size_left
        scores = scores.masked_fill((far < 0) | (far > most), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)[None], scores.logsumexp(-1)[None], None, None, None
    out, sums = [], []
    for q_NH, start, num in zip(q, first_key, seqused_k, strict=False):
        assert 0 < num <= most_k
        seen = (x[start : start + num].transpose(0, 1) for x in (keys, values))
        k, v = (x.repeat_interleave(q.shape[1] // len(x), dim=0) for x in seen)
        scores = (q_NH[:, None] @ k.mT)[:, 0] * (scale or q.shape[-1] ** -0.5)
        out.append((scores.softmax(-1)[:, None] @ v)[:, 0])
        sums.append(scores.logsumexp(-1))
    return torch.stack(out), torch.stack(sums, dim=1), None, None, None


@pytest.mark.parametrize(
    ("pair", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) in QUICK else pytest.mark.slow)
        for name in NUMBERS
        for how in HOWS
    ],
    indirect=["pair"],
)
def test_any_order_of_steps_says_what_one_pass_says(pair, how, monkeypatch):
    """Also where rows are cut back, as far as they can be, and continued otherwise."""
    prepare(how, monkeypatch)
    model = pair.ours if not HOWS[how].get("compile") else load_native(pair.theirs, packed=False)
    engine = Engine(model, rows=4, room=ROOM, **HOWS[how])
    assert {reach.size for reach in engine._cache.reaches} == {ROOM, 8 if pair.name == "gpt_oss" else 12}
    draw = random.Random(3)
    expected, num_kept, num_refused = [[] for _ in range(4)], 0, 0
    num_steps = 45 if how == "dynamic" else 15
    for _ in range(num_steps):
        step, row = draw.choice(["decode", "decode", "prefill", "copy", "pack"]), draw.randrange(4)
        at_work = next((n for n, tokens in enumerate(expected) if not tokens), 4)
        if step in ("prefill", "pack") or not at_work:
            rows = [min(row, at_work)] if step != "pack" else [*range(min(at_work + 1, 4))]
            for row in rows:
                wanted = draw.randint(0, len(expected[row]))
                keep = engine.num_usable(row, expected[row], most=wanted)
                num_kept, num_refused = num_kept + (keep > 12), num_refused + (keep < wanted)
                new = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 14))]
                expected[row] = (expected[row][:keep] + new)[:50]
                if keep >= len(expected[row]):
                    expected[row], keep = new, 0
                rows[rows.index(row)] = RowTokens(row, list(expected[row]), keep)
            for one, logits_V in zip(rows, engine.prefill_rows(rows), strict=True):
                pair.assert_near(logits_V, expected[one.row])
        elif step == "copy":
            source, target = draw.randrange(at_work), min(draw.randrange(4), at_work)
            length = engine.num_usable(source, expected[source], most=draw.randint(1, len(expected[source])))
            if length:
                engine.copy_row(source, target, length=length)
                expected[target] = expected[source][:length]
        else:
            for _ in range(draw.randint(1, 14)):
                if max(map(len, expected)) == 60:
                    break
                new = [draw.randrange(VOCAB) for _ in range(at_work)]
                logits_BV = engine.decode(new)
                for row, token in enumerate(new):
                    expected[row].append(token)
            for row, logits_V in enumerate(logits_BV):
                pair.assert_near(logits_V, expected[row])
            if HOWS[how]:
                expected[at_work:] = [[] for _ in expected[at_work:]]
        assert engine.held == expected
    torch._dynamo.reset()
    assert how != "dynamic" or (num_kept > 1 and num_refused > 1)


@pytest.mark.parametrize("pieces", [(60,), (1,) * 30 + (30,), (8, 4, 13, 35)])
def test_prompts_in_pieces(pair, pieces, monkeypatch):
    engine, done = Engine(pair.ours, rows=1, room=ROOM), 0
    for num in pieces:
        logits_V = engine.prefill(0, TEXT[: done + num], keep=done)
        done += num
    pair.assert_near(logits_V, TEXT)
    monkeypatch.setitem(engine_file.PREFILL_TOKENS, "cpu", 7)  # the engine's own pieces
    engine.prefill(0, TEXT[:50])
    pair.assert_near(engine.decode([TEXT[50]])[0], TEXT[:51])


def test_layers_have_as_many_slots_as_they_reach(oss, scout):
    for pair, small in ((oss, 2 * 8), (scout, 3 * 12)):
        engine = Engine(pair.ours, rows=2, room=ROOM)
        num_slots = sum(layer.reach.size for layer in engine._cache.layers)
        assert num_slots == small + ROOM * (2 if pair is oss else 1)
        a_slot = 2 * 4 * 16 * 4  # keys and values of 4 heads
        assert sum(t.nbytes for layer in engine._cache.layers for t in layer.tensors) == 2 * num_slots * a_slot
        copies = 2 * small if pair is oss else 0
        assert pair.ours.cache_bytes(ROOM) == (num_slots + copies) * a_slot
        engine.prefill(0, TEXT)
        engine.prefill(0, [*TEXT[:30], 1, 2, 3])
        kept = [t for mark in engine._cache.marks[0].values() for pair_of in mark for t in pair_of]
        assert sum(t.nbytes for t in kept) == copies * a_slot
    assert oss.ours.cache_bytes_seen(5) == 4 * 5 * a_slot and oss.ours.cache_bytes_seen(20) == (2 * 8 + 2 * 20) * a_slot
    assert scout.ours.cache_bytes_seen(26) == (3 * 2 + 26) * a_slot


def test_an_answer_is_forgotten_without_computing_the_prompt_again(oss):
    """Harmony's template leaves out what earlier answers thought: the next prompt continues behind the question."""
    engine = Watched(oss.ours, rows=1, room=ROOM)
    run(engine, [TEXT[:20]], max_new_tokens=15)
    answer = engine.held[0][20:]
    turn = [*TEXT[:20], answer[0], 90, 91, 92]
    assert engine.take_beginning(0, turn) == 20  # the first token of the answer is computed again
    found, _ = run(engine, [turn], max_new_tokens=3)
    assert engine.prefills[-1] == (0, 24, 20)
    assert found[0, 0] == run(Engine(oss.ours, rows=1, room=ROOM), [turn], max_new_tokens=3)[0][0, 0]


@pytest.mark.parametrize("length", [11, *(pytest.param(each, marks=pytest.mark.slow) for each in (5, 20))])
def test_samples_that_begin_late_continue_the_same_prompt(pair, length):
    """By then the prompt's row has decoded past the window, and into the next chunk."""
    said = complete(pair.ours, [TEXT[:length]] * 2, rows=2, max_new_tokens=18, samples=5)
    (alone,) = complete(pair.ours, [TEXT[:length]], rows=1, max_new_tokens=18)
    assert len(said) == 10 and all(c.tokens == alone.tokens for c in said)
    tokens = [*TEXT[:length], *alone.tokens]
    assert one_pass(pair.theirs, tokens)[length - 1 : -1].argmax(-1).tolist() == alone.tokens


def test_prompts_with_a_common_beginning(pair):
    """It is found in another row, or not, and is computed once where it can be kept."""
    prompts = [[*TEXT[:40], *([7 * n % VOCAB] * (n % 5 + 1))] for n in range(6)]
    among = complete(pair.ours, prompts, rows=2, max_new_tokens=6)
    for prompt, said in zip(prompts, among, strict=True):
        (alone,) = complete(pair.ours, [prompt], max_new_tokens=6)
        assert said.tokens == alone.tokens


def test_completions_of_one_text_are_scored_from_its_end(pair, monkeypatch):
    engine = Watched(pair.ours, rows=1, room=ROOM)
    spans, forward = [], engine._pass

    def watched(prompts, marks):
        spans.extend((one.keep, len(one.tokens)) for one in prompts)
        return forward(prompts, marks)

    monkeypatch.setattr(engine, "_pass", watched)
    texts = [[*TEXT[:40], n, *TEXT[n : n + 12]] for n in range(4)]
    monkeypatch.setitem(engine_file.PREFILL_TOKENS, "cpu", 60)  # each needs a pass of its own
    scored = [ScoredText(n, "", "", text, 40, 1) for n, text in enumerate(texts)]
    found = {}
    for pieces, logits_PV in Likelihood(engine, context=ROOM, vocab_size=VOCAB).logits(scored):
        at = 0
        for piece in pieces:
            found.setdefault(piece.text.id, []).append(logits_PV[at : at + len(piece.targets)])
            at += len(piece.targets)
    for n, text in enumerate(texts):
        expected = one_pass(pair.theirs, text)[39:-1]
        assert (torch.cat(found[n]) - expected).abs().max() < pair.bound
    # of the first, the chunk's or none of the text is kept, once; then a copy of the windows has been made behind it
    assert spans[-1][0] == (36 if pair.name != "gpt_oss" else 39)


LONG = random.Random(0).choices(range(VOCAB), k=500)
PASSES = {  # texts of one pass, and how many of their tokens are not scored
    "a first text within the window": ("gpt_oss", {"sliding_window": 128}, [(LONG[:60], LONG[n:][:m], 80)
        for n, m in ((60, 40), (100, 90), (190, 90))]),
    "a first text within the chunk": ("scout", {"attention_chunk_size": 80}, [(LONG[:60], LONG[n:][:m], 65)
        for n, m in ((60, 10), (100, 60), (190, 60))]),
    "a mark of another text": ("gpt_oss", {"sliding_window": 8}, [(LONG[:31], [1, 2], 1),
        (LONG[:31], [50, 3, 4, 5, 6], 1), (LONG[:31], [50, 3, 96, *LONG[40:60]], 36)]),
}  # fmt: skip


@pytest.mark.parametrize("case", PASSES)
def test_texts_that_share_a_pass_are_scored_as_alone(case, monkeypatch):
    name, numbers, parts = PASSES[case]
    numbers = numbers | {"max_position_embeddings": 256}
    theirs = make(name, **numbers)
    engine = Engine(load_native(theirs), rows=1, room=256)
    shared, together = [], engine.hidden_of_all
    monkeypatch.setattr(engine, "hidden_of_all", lambda prompts: shared.append(len(prompts)) or together(prompts))
    texts = [ScoredText(n, "", "", [*a, *b], first, 1) for n, (a, b, first) in enumerate(parts)]
    found = {n: [] for n in range(len(texts))}
    for pieces, logits_PV in Likelihood(engine, context=256, vocab_size=VOCAB).logits(texts):
        for piece, part in zip(pieces, logits_PV.split([len(piece.targets) for piece in pieces]), strict=True):
            found[piece.text.id].append(part)
    assert shared  # several texts in a pass
    for text in texts:
        expected = one_pass(theirs, text.tokens)[text.first - 1 : -1]
        assert (torch.cat(found[text.id]) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_pass_that_is_interrupted_leaves_nothing_wrong(pair, monkeypatch):
    engine = Engine(pair.ours, rows=1, room=ROOM)
    engine.prefill(0, TEXT[:30])
    last = pair.ours.body.layers["3"].attention
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(0, TEXT, keep=30)
        with pytest.raises(KeyboardInterrupt):
            engine.decode([5])
    keep = engine.take_beginning(0, TEXT)
    pair.assert_near(engine.prefill(0, TEXT, keep=keep), TEXT)


def test_the_window_of_every_position():
    """Each query of a row sees what it should, whatever was in the slots before."""
    last_five = Reach(5, is_window=True), lambda p: range(max(0, p - 4), p + 1)
    of_chunk = Reach(5), lambda p: range(p // 5 * 5, p + 1)
    for reach, seen in (last_five, of_chunk):
        slots = {}
        for p in range(23):
            slots[p % 5] = p
            last = int(reach.last_slot(torch.tensor(p)))
            assert sorted(slots[s] for s in range(last + 1)) == [*seen(p)] and reach.num_seen(p) == len(seen(p))
            for num in range(1, p + 2):
                before = [q for q in seen(num) if q < num]
                assert reach.holds(num, written=p + 1) == all(slots[q % 5] == q for q in before)
        for start in range(12):
            parts = [*reach.pieces(start, 23)]
            assert [q for _, begin, end in parts for q in range(begin, end)] == [*range(start, 23)]
            assert all(first == seen(begin)[0] for first, begin, _ in parts)


@pytest.mark.parametrize("heads", [2, 8])
def test_splitting_keys_with_sinks_is_tried_before_it_is_used(monkeypatch, heads):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention)
    assert static_decode._is_right(CPU, torch.float32, 16, num_heads=heads, sinks=True)
    assert attention._flash_is_right(CPU, torch.float32, 16, 70)

    def without_sums(*args, **named):
        out, lse, *rest = flash_attention(*args, **named)
        return out, lse + 1, *rest

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", without_sums)
    assert not static_decode._is_right(CPU, torch.float32, 16, num_heads=heads, sinks=True)
    assert static_decode._is_right(CPU, torch.float32, 16, num_heads=heads)
    assert not attention._flash_is_right(CPU, torch.float32, 16, 70)


@pytest.mark.parametrize("wrong_length", [0, 128, 512])
def test_splitting_keys_with_sinks_is_tried_with_a_window_and_more(monkeypatch, wrong_length):
    def with_wrong_sums(q, keys, values, first_query, first_key, most_q, most_k, *args, **named):
        out, lse, *rest = flash_attention(q, keys, values, first_query, first_key, most_q, most_k, *args, **named)
        return out, lse + (most_k == wrong_length), *rest

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", with_wrong_sums)
    monkeypatch.setattr(static_decode, "may_flash", lambda *_: True)
    can_split = static_decode.can_split.__wrapped__  # without its cache
    assert can_split(CPU, torch.float32, 16, sinks=True) == (wrong_length == 0)


def test_sums_of_the_cpus_kernel_are_tried_before_they_are_used(monkeypatch):
    assert attention.has_sums_on_cpu(torch.float32) and attention.has_sums_on_cpu(torch.bfloat16)
    attention.has_sums_on_cpu.cache_clear()
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def off(*args, **named):
        out, lse = kernel(*args, **named)
        return out, lse + 0.5

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", off)
    assert not attention.has_sums_on_cpu(torch.float32)
    attention.has_sums_on_cpu.cache_clear()


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_biases_are_added_once(name, tp, monkeypatch):
    """Ranks in threads of one process: heads, sinks and features that three do not divide, sums over ranks."""
    theirs = make(name, intermediate_size=90)  # 4 ranks have 23, 23, 23 and 21
    meeting, said = Meeting(tp), [None] * tp
    monkeypatch.setattr(tensor_parallel, "sum_of_ranks", lambda part: torch.stack(meeting.exchange(part)).sum(0))
    monkeypatch.setattr(tensor_parallel, "concatenated", lambda part, tp: torch.cat(meeting.exchange(part), dim=-1))

    def be_rank(rank):
        meeting.thread.rank = rank
        model = load_native(theirs, tp=tp, rank=rank)
        engine = Engine(model, rows=1, room=ROOM)
        said[rank] = torch.stack([engine.prefill(0, TEXT[:40]), *(engine.decode([t])[0] for t in TEXT[40:44])])

    with ThreadPoolExecutor(tp) as pool:
        list(pool.map(be_rank, range(tp)))
    expected = one_pass(theirs, TEXT[:44])[39:]
    for found in said:
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


class Meeting:
    """Tensors that threads hand each other."""

    def __init__(self, num):
        self.barrier, self.parts = threading.Barrier(num, timeout=60), [None] * num
        self.thread = threading.local()

    def exchange(self, part):
        self.parts[self.thread.rank] = part.clone()
        self.barrier.wait()
        found = [one.clone() for one in self.parts]
        self.barrier.wait()
        return found
