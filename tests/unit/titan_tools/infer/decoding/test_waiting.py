"""Prompts that wait for a row: which of them begin together, when, and from what rows hold of them already."""

import random

import pytest

from tests.models.llama import BOS
from tests.models.llama import write as write_llama
from tests.tiny_infer import load
from tests.watched_engine import Watched, ragged, run
from titan_tools.infer.decoding import engine as engine_file
from titan_tools.infer.decoding import generate
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return load(folder)


def alike(seed=0):
    """Prompts in an order by chance: some share a long beginning, some are repeated or a part of another."""
    draw = random.Random(seed)
    heads = [[BOS, *(draw.randrange(256) for _ in range(num))] for num in (0, 20, 30)]
    heads.append([*heads[1], *heads[2]])
    prompts = [[*draw.choice(heads), *(draw.randrange(256) for _ in range(draw.randrange(1, 9)))] for _ in range(14)]
    return draw.choices([*prompts, *heads], k=20)


@pytest.mark.parametrize(("samples", "static"), [(1, True), (3, False)])
def test_what_prompts_share_is_computed_once_and_changes_nothing(model, monkeypatch, samples, static):
    prompts, stop_ids = alike(), frozenset(range(0, 301, 19))
    sampling = Sampling(1.5, repetition_penalty=1.2, seed=5)
    settings = {"sampling": sampling, "stop_ids": stop_ids, "samples": samples, "max_new_tokens": 12}
    monkeypatch.setitem(engine_file.LEAST_SHARED, "cpu", 1000)
    alone, _ = run(Engine(model, rows=1, room=96), prompts, **settings)
    monkeypatch.setitem(engine_file.LEAST_SHARED, "cpu", 4)
    for rows, share in ((1, 0.9), (5, 0.6), (32, 0.6)):
        engine = Watched(model, rows=rows, room=96, static=static)
        among, _ = run(engine, prompts, **settings)
        assert among == alone
        assert [length for _, length, _ in engine.prefills] == [len(p) for p in prompts]
        num_computed = sum(length - kept for _, length, kept in engine.prefills)
        assert num_computed < share * sum(map(len, prompts))


def test_a_beginning_that_all_prompts_share_is_computed_once(model):
    """By the first of them, while the others wait; as they are many, their rows are taken in one more pass."""
    head = ragged(1, 60, seed=3)[0] + list(range(40))
    engine = Watched(model, rows=4, room=128)
    run(engine, [[*head, n] for n in range(8)], max_new_tokens=3)
    assert engine.passes[0] == [(0, len(head) + 1, 0)]
    assert [len(prompts) for prompts in engine.passes] == [1, 3, 4]
    assert {kept for _, _, kept in engine.prefills[1:]} == {len(head)}


def test_copying_the_row_that_is_overwritten_next(model, monkeypatch):
    """Each prompt goes on from what the other's row held before it."""
    monkeypatch.setitem(engine_file.LEAST_SHARED, "cpu", 4)
    first, second = [1, *range(50, 80)], [2, *range(90, 120)]
    engine = Watched(model, rows=2, room=64)
    run(engine, [first, second], max_new_tokens=1)
    crossed = [[*second, 7], [*first[:20], 8], [*second[:25], 9], [*second, 7]]
    said, _ = run(engine, crossed, max_new_tokens=6)
    assert (1, 0, 31) in engine.copies
    free, _ = run(Engine(model, rows=1, room=64), crossed, max_new_tokens=6)
    assert said == free


def test_who_comes_alone_waits_for_others_but_not_long(model, monkeypatch):
    """A row that is free while prompts wait misses at most as many tokens as a step of all rows makes."""
    prompts, stop_ids = ragged(40, 12, seed=9), frozenset(range(0, 301, 29))
    passes = {}
    for full in (1, 64):
        monkeypatch.setitem(generate._FULL_PASS_TOKENS, "cpu", full)
        engine = Watched(model, rows=8, room=48)
        passes[full] = run(engine, prompts, stop_ids=stop_ids, max_new_tokens=24)[0], engine
    assert passes[1][0] == passes[64][0]
    at_once, together = (len(engine.passes) for _, engine in passes.values())
    assert together < 0.8 * at_once
    missed = worst = 0
    for num in passes[64][1].nums[:-24]:  # something waits
        missed = missed + 8 - num if num < 8 else 0
        worst = max(worst, missed)
    assert 0 < worst < 16


def test_a_long_prompt_waits_for_nobody(model):
    draw, stop_ids = random.Random(0), frozenset(range(0, 301, 13))
    prompts = [[BOS, *draw.choices(range(256), k=80)] for _ in range(20)]
    engine = Watched(model, rows=4, room=128)
    run(engine, prompts, stop_ids=stop_ids, max_new_tokens=32)
    assert set(engine.nums[: engine.nums.index(next(n for n in engine.nums if n < 4))]) == {4}
    assert sum(num < 4 for num in engine.nums) <= 32  # at the end alone
