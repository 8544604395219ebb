"""Prompts on their way into the cache: in pieces, several in one pass, behind what rows hold already."""

import random

import pytest
import torch

from tests.models.dense import write as write_tiny
from tests.tiny_infer import load
from titan_tools.infer.decoding import engine as engine_file
from titan_tools.infer.decoding.attention import copies_heads
from titan_tools.infer.decoding.engine import Engine, RowTokens, num_common

VOCAB_SIZE = 97
ROOM = 60
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A transformers model and ours, read from the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("hf")
    return write_tiny(folder, "qwen3_tied"), load(folder)


def one_pass(reference, tokens):
    """Logits [L, V] of `tokens`."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("keep", [0, 11])
def test_a_long_prompt_in_pieces_equals_one_pass(pair, monkeypatch, keep):
    reference, model = pair
    tokens = [(17 * i) % VOCAB_SIZE for i in range(50)]
    full = one_pass(reference, tokens)
    monkeypatch.setitem(engine_file.PREFILL_TOKENS, "cpu", 16)
    engine = Engine(model, rows=2, room=ROOM)
    if keep:
        engine.prefill(1, tokens[:keep])
    pieces = list(engine.hidden(1, tokens, keep=keep))
    assert [len(p) for p in pieces] == ([16, 16, 16, 2] if not keep else [16, 16, 7])
    with torch.inference_mode():
        assert (model.head(torch.cat(pieces)) - full[keep:]).abs().max() < 1e-4
    assert (engine.decode([5, 6])[1] - one_pass(reference, [*tokens, 6])[-1]).abs().max() < 1e-4


def test_pieces_and_their_masks_stay_bounded():
    starts = [0, 2048, 1 << 15, 1 << 17, 1 << 20]
    sizes = [engine_file._piece_tokens(start, most=2048) for start in starts]
    assert sizes[:2] == [2048, 2048]
    assert all(size * (start + size) <= 1 << 26 for start, size in zip(starts, sizes, strict=True))
    assert min(sizes) >= 60


def test_the_head_sees_one_token_of_a_prompt(pair):
    _, model = pair
    shapes = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape[:-1])))
    engine = Engine(model, rows=2, room=ROOM)
    engine.prefill(0, list(range(40)))
    engine.prefill(1, [1, 2, 3])
    engine.decode([1, 2])
    hook.remove()
    assert shapes == [(1,), (1,), (2,)]


def test_who_is_interrupted_holds_only_what_is_there(pair, monkeypatch):
    """Ctrl-C in a prefill of new tokens: what was held behind them is gone, what was held before them is not."""
    reference, model = pair
    engine = Engine(model, rows=1, room=ROOM)
    engine.prefill(0, list(range(30)))

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.body.layers["2"].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.prefill(0, [*range(10), *range(50, 70)], keep=10)
    hook.remove()
    assert engine.held == [list(range(10))]
    assert (engine.prefill(0, list(range(30)), keep=10) - one_pass(reference, list(range(30)))[-1]).abs().max() < 1e-4


def test_who_is_interrupted_in_a_pass_of_several_rows_holds_only_what_is_there(pair):
    reference, model = pair
    engine = Engine(model, rows=3, room=ROOM)
    for row in range(3):
        engine.prefill(row, list(range(row, 30)))

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.body.layers["1"].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.prefill_rows([RowTokens(0, [7, 8, 9]), RowTokens(2, [*range(2, 12), 50, 60], 10)])
    hook.remove()
    assert engine.held == [[], list(range(1, 30)), list(range(2, 12))]
    logits_BV = engine.prefill_rows([RowTokens(2, [*range(2, 20)], 10), RowTokens(0, [5])])
    for tokens, logits_V in zip(([*range(2, 20)], [5]), logits_BV, strict=True):
        assert (logits_V - one_pass(reference, tokens)[-1]).abs().max() < 1e-4


def test_who_is_interrupted_in_a_copy_holds_nothing_that_is_half_there(pair, monkeypatch):
    engine = Engine(pair[1], rows=2, room=ROOM)
    engine.prefill(0, list(range(40)))
    engine.prefill(1, list(range(20, 50)))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._cache, "copy_row", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.copy_row(0, 1, length=35)
    assert engine.held == [list(range(40)), []]


def test_what_fits_one_pass(pair, monkeypatch):
    monkeypatch.setitem(engine_file.PREFILL_TOKENS, "cpu", 16)
    monkeypatch.setattr(engine_file, "_MASK_ELEMENTS", 100)
    engine = Engine(pair[1], rows=2, room=ROOM)

    def fit(*prompts):
        return engine.fit_one_pass([RowTokens(0, [1] * num, keep) for num, keep in prompts])

    assert fit((10, 0), (6, 0)) and fit((20, 15), (11, 0))
    assert not fit((10, 0), (7, 0)) and not fit((20, 14))  # 6 × 20 scores are masked
    with pytest.raises(AssertionError):
        engine.prefill_rows([RowTokens(0, [1] * 10), RowTokens(1, [1] * 10)])
    with pytest.raises(AssertionError, match="last token"):
        engine.prefill(0, [1, 2], keep=2)


def test_how_much_sequences_have_in_common():
    draw = random.Random(0)
    for _ in range(300):
        a = [draw.randrange(2) for _ in range(draw.randrange(9))]
        b = [*a[: draw.randrange(9)], *(draw.randrange(2) for _ in range(draw.randrange(5)))]
        assert num_common(a, b) == next(
            (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
        )
    for same in range(130):  # more than are worth copying
        assert num_common([*range(same), -1, 0], [*range(same), -2, 0]) == same


def test_a_row_takes_a_beginning_from_where_it_is_longest(pair):
    engine = Engine(pair[1], rows=3, room=ROOM)
    for row, num in enumerate((40, 35, 3)):
        engine.prefill(row, list(range(num)))
    assert engine.take_beginning(2, list(range(38))) == 37  # of the last one the logits are needed
    assert engine.held[2] == list(range(37)) and engine.take_beginning(1, list(range(36))) == 35
    assert engine.take_beginning(0, [*range(5), *range(60, 90)]) == 5  # at no cost
    assert engine.take_beginning(1, [*range(4), *range(60, 90)]) == 0
    assert engine.lengths() == [40, 35, 37]


def test_fp32_attention_on_a_gpu_never_holds_the_scores_of_all_heads():
    """Only flash attention takes grouped heads there, and not in fp32."""
    kinds = [("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.float32), ("cpu", torch.bfloat16)]
    assert [kind for kind in kinds if copies_heads(*kind)] == [("cuda", torch.float32)]
