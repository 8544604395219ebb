"""Rows of one cache at every step of their lives hold what one pass of transformers over the same tokens says."""

import gc
import json
import mmap
import random
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.models.dense import write as write_tiny
from tests.models.llama import write as write_llama
from tests.tiny_infer import CPU, load
from titan_tools.infer.decoding import cache as cache_file
from titan_tools.infer.decoding import engine as engine_file
from titan_tools.infer.decoding import static_decode
from titan_tools.infer.decoding import steps as steps_file
from titan_tools.infer.decoding.engine import Engine, RowTokens
from titan_tools.infer.model import compiling

VOCAB_SIZE = 97
ROOM = 60
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["llama3", "qwen3_tied"])
def pair(request, tmp_path_factory):
    """A transformers model and ours, read from the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("hf")
    return write_tiny(folder, request.param), load(folder)


@pytest.fixture
def short_shapes(monkeypatch):
    """Fixed shapes that a test's lengths grow out of."""
    monkeypatch.setattr(static_decode, "SHORTEST", 16)


def flash_attention(
    q_BNH, keys, values, first_query, first_key, most_q, most_k, dropout, is_causal, _, *, scale, seqused_k
):
    """What torch.ops.aten._flash_attention_forward is on a GPU for sequences packed behind each other."""
    assert first_query.tolist() == [*range(len(q_BNH) + 1)] and (most_q, dropout, is_causal) == (1, 0, False)
    assert {first_query.dtype, first_key.dtype, seqused_k.dtype} == {torch.int32}
    out = []
    for q_NH, start, num, end in zip(q_BNH, first_key, seqused_k, first_key[1:], strict=False):
        assert 0 < num <= min(most_k, end - start)
        seen = (kept[start : start + num].transpose(0, 1)[None] for kept in (keys, values))
        out.append(F.scaled_dot_product_attention(q_NH[None, :, None], *seen, enable_gqa=True, scale=scale)[0, :, 0])
    return torch.stack(out), None


@pytest.fixture
def split_keys(monkeypatch):
    """Attention as on a GPU, over a cache of the same layout. The list tells for each call whether keys were copied."""
    memory, copied = set(), []

    def attend(q_BNH, keys, values, *others, **named):
        copied.append(not memory.issuperset((keys.data_ptr(), values.data_ptr())))
        return flash_attention(q_BNH, keys, values, *others, **named)

    def token_by_token(rows, num_kv_heads, room, head_dim, dtype, _):
        kept = torch.zeros(rows, room, num_kv_heads, head_dim, dtype=dtype)
        memory.add(kept.data_ptr())
        return kept.transpose(1, 2)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attend)
    monkeypatch.setattr(cache_file, "_zeros", token_by_token)
    monkeypatch.setattr(engine_file, "can_split", lambda *_, **named: True)
    return copied


def one_pass(reference, tokens):
    """Logits [L, V] of `tokens`."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


HOWS = ("dynamic", "one by one", "copied heads", "static", "split", "compiled")
QUICK = {("qwen3_tied", "one by one"), *(("llama3", how) for how in HOWS if how != "compiled")}


@pytest.mark.parametrize(
    ("pair", "how"),
    [
        pytest.param(name, how, marks=[pytest.mark.slow] * ((name, how) not in QUICK))
        for name in ("llama3", "qwen3_tied")
        for how in HOWS
    ],
    indirect=["pair"],
)
def test_any_order_of_steps_over_ragged_rows_equals_one_pass(pair, short_shapes, how, request, monkeypatch):
    """Rows begin, alone or several in one pass, go on, are taken up behind what they hold, copied and cut."""
    reference, model = pair
    copied = request.getfixturevalue("split_keys") if how == "split" else []
    monkeypatch.setattr(steps_file, "_MOST_PADDING", 0 if how == "one by one" else 1000)
    monkeypatch.setattr(steps_file, "copies_heads", lambda *_: how == "copied heads")
    modes = {"static": {"static": True}, "split": {"static": True}, "compiled": {"compile": True}}.get(how, {})
    engine = Engine(model, rows=5, room=ROOM, **modes, backend="aot_eager")
    draw = random.Random(1)
    expected, furthest, num_steps = [[] for _ in range(5)], 0, {"decode": 0, "prefill": 0, "copy": 0, "pack": 0}

    def check(row, logits_V):
        nonlocal furthest
        furthest = max(furthest, float((logits_V - one_pass(reference, expected[row])[-1]).abs().max()))

    while min(num_steps.values()) < 5:
        step, row = draw.choice(["decode", "decode", "decode", "prefill", "copy", "pack"]), draw.randrange(5)
        num_at_work = next((n for n, tokens in enumerate(expected) if not tokens), 5)
        if step == "prefill" or not num_at_work:
            row = min(row, num_at_work)  # no gap between rows at work
            keep = draw.randint(0, len(expected[row]))
            new = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 12))]
            expected[row] = expected[row][:keep] + new
            check(row, engine.prefill(row, expected[row], keep=keep))
        elif step == "pack":
            rows = draw.sample(range(5), 5)[: draw.randint(2, 5)]
            rows = [row for row in rows if row < num_at_work] + [num_at_work] * (num_at_work < 5)
            keeps = [draw.choice([0, draw.randint(0, len(expected[row]))]) for row in rows]
            for row, keep in zip(rows, keeps, strict=True):
                new = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 12))]
                expected[row] = expected[row][:keep] + new
            prompts = [RowTokens(row, expected[row], keep) for row, keep in zip(rows, keeps, strict=True)]
            for row, logits_V in zip(rows, engine.prefill_rows(prompts), strict=True):
                check(row, logits_V)
        elif step == "copy":
            source = draw.randrange(num_at_work)
            row, length = min(row, num_at_work), draw.randint(1, len(expected[source]))
            expected[row] = expected[source][:length]
            engine.copy_row(source, row, length=length)
        elif max(map(len, expected)) < ROOM:
            num_at_work = draw.randint(1, num_at_work)
            new = [draw.randrange(VOCAB_SIZE) for _ in range(num_at_work)]
            for tokens, token in zip(expected, new, strict=False):
                tokens.append(token)
            if modes:
                expected[num_at_work:] = [[] for _ in expected[num_at_work:]]
            for row, logits_V in enumerate(engine.decode(new)):
                check(row, logits_V)
        num_steps[step] += 1
        assert engine.held == expected
    assert furthest < 1e-4
    assert one_pass(reference, list(range(50))).std() > 0.5  # the bound above means something
    assert bool(copied) == (how == "split") and not any(copied)


def test_splitting_keys_is_tried_before_it_is_used(monkeypatch):
    """The operator is private to torch: one that sees a key too many, or too few, is not for us."""
    for off in (0, 1, -1):

        def attend(*given, off=off, seqused_k, **named):
            return flash_attention(*given, seqused_k=seqused_k + off, **named)

        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attend)
        found = [static_decode._is_right(CPU, torch.bfloat16, 16, num_heads=num) for num in (2, 8)]
        assert found == [off == 0] * 2
    assert not static_decode.can_split(CPU, torch.bfloat16, 16)


def test_a_sequence_grows_through_the_fixed_shapes(pair, short_shapes):
    reference, model = pair
    tokens = [(31 * i) % VOCAB_SIZE for i in range(ROOM)]
    engine, full = Engine(model, rows=1, room=ROOM, static=True), one_pass(reference, tokens)
    engine.prefill(0, tokens[:13])
    said = torch.cat([engine.decode([token]) for token in tokens[13:]])
    assert (said - full[13:]).abs().max() < 1e-4  # also the first of them: a step's logits are not the next one's


def test_shapes_are_few(pair, short_shapes):
    """Every number of rows and every length share what is made for the next power of two."""
    engine = Engine(pair[1], rows=6, room=ROOM, static=True)
    for num in (1, 3, 6):
        for row in range(num):
            engine.prefill(row, [1] * (ROOM - 20))
        for _ in range(20):
            engine.decode([2] * num)
    assert set(engine._static._steps) == {(n, t) for n in (1, 4, 6) for t in (64,)}
    assert [static_decode.power_of_two(n, 6) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]


def test_what_a_row_held_before_does_not_matter(pair, short_shapes):
    """A shorter sequence beside a longer one sees neither its own row's past nor, in a new cache, garbage."""
    reference, model = pair
    for static in (False, True):
        engine = Engine(model, rows=2, room=ROOM, static=static)
        engine.prefill(0, list(range(40)))
        engine.prefill(1, [7, 8])
        fresh = engine.decode([1, 2])[1]
        engine.prefill(1, list(range(50)))
        engine.prefill(1, [7, 8])
        engine.prefill(0, list(range(40)))
        assert (engine.decode([1, 2])[1] - fresh).abs().max() < 1e-6
        assert (fresh - one_pass(reference, [7, 8, 2])[-1]).abs().max() < 1e-4


class Graph:
    """Stands for a CUDA graph."""

    def replay(self):
        pass


@pytest.fixture
def captures(monkeypatch):
    """A CPU that records graphs: (graph, options) of each capture."""
    captures = []

    def capture(graph, **options):
        captures.append((weakref.ref(graph), options))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return captures


def test_all_shapes_are_recorded_alike_and_go_with_their_engine(pair, short_shapes, captures):
    """On one stream, each of which has a workspace, and into one memory.

    NCCL waits for CUDA graphs with its sums to be gone before it ends, so garbage collection would be too late.
    """
    _, model = pair
    gc.disable()
    try:
        engine = Engine(model, rows=2, room=ROOM, static=True)
        engine._static = engine_file.StaticDecoder(
            engine_file._step_of(model, engine._cache, backend=None),
            engine._cache,
            CPU,
            torch.float32,
            records=True,
            splits=False,
        )
        for num, length in ((1, 5), (1, 40), (2, 5)):
            for row in range(num):
                engine.prefill(row, list(range(length)))
            engine.decode([7] * num)
        assert len(captures) == 3
        assert len({(id(options["stream"]), options["pool"]) for _, options in captures}) == 1
        assert all(graph() is not None for graph, _ in captures)
        del engine
        assert all(graph() is None for graph, _ in captures)
    finally:
        gc.enable()


def test_room_takes_memory_when_it_is_used(pair):
    """A conversation has room for the whole context: 8 GiB of it cost nothing until tokens come."""
    heads_dim = pair[1].num_kv_heads * pair[1].body.layers["0"].attention.head_dim
    room = (8 << 30) // (2 * len(pair[1].body.layers) * heads_dim * 4)
    before = resident_bytes()  # of all tests before this one, which may be much
    engine = Engine(pair[1], rows=1, room=room)
    assert engine.model.cache_bytes(room) > 7 << 30
    engine.prefill(0, [1, 2, 3])
    assert resident_bytes() - before < 1 << 30


def resident_bytes():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.slow
def test_inductor_compiles_a_step_once_for_all_layers(pair, short_shapes):
    reference, model = pair
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    engine = Engine(model, rows=4, room=ROOM, compile=True)
    tokens = [(31 * i) % VOCAB_SIZE for i in range(ROOM)]
    full = one_pass(reference, tokens)
    for num in (1, 3):
        for row in range(num):
            engine.prefill(row, tokens[: 13 + row])
        for at in range(13, 20):
            for row, logits_V in enumerate(engine.decode([tokens[at + row] for row in range(num)])):
                assert (logits_V - full[at + row]).abs().max() < 1e-4
    shapes = len(engine._static._steps)
    assert shapes == 4
    assert counters["stats"]["unique_graphs"] == 2 + 2  # a layer and the head for each number of rows, not of keys
    assert not counters["graph_break"]


@pytest.mark.slow
def test_the_command_compiles_and_says_the_same(titan, tmp_path):
    """Weights large enough to be packed for a CPU, which nothing could compile."""
    write_llama(tmp_path, hidden_size=256, intermediate_size=1536)
    asked = ["infer", tmp_path, "--prompt", "def main(", "--max-new-tokens", "8", "--ignore-eos", "--json"]
    plainly, compiling = (json.loads(titan(*asked, *options)[1]) for options in ([], ["--compile"]))
    assert compiling["results"] == plainly["results"]
    assert compiling["stats"]["tokens_per_sec"] > 1  # compiling took longer, and is not in it


def test_a_missing_compiler_is_reported_before_anything_is_read(titan, tmp_path, monkeypatch):
    write_llama(tmp_path)
    monkeypatch.setattr(compiling, "why_inductor_cannot", lambda _: "no C++ compiler is found")
    code, out, err = titan("infer", tmp_path, "--prompt", "a", "--compile")
    assert code == 2 and not out
    assert "--compile: no C++ compiler is found" in err
