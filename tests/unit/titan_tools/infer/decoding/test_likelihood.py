"""Logits for tokens that are there already: in windows, several texts in one pass, behind a shared beginning."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.llama import BOS
from tests.tiny_infer import complete, load
from titan_tools.infer.decoding import engine as engine_file
from titan_tools.infer.decoding import likelihood
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.likelihood import Likelihood, windows

pytestmark = pytest.mark.usefixtures("one_thread")


@given(num_tokens=st.integers(2, 200), first=st.integers(1, 60), context=st.integers(1, 40))
def test_windows_predict_each_token_once_behind_half_a_context(num_tokens, first, context):
    predicted = first
    for window in windows(num_tokens, first=first, context=context):
        assert window.start >= 0 and len(window) - 1 <= context and window.stop > predicted
        assert predicted - window.start >= min(predicted, context / 2)
        predicted = window.stop
    assert predicted == max(first, num_tokens)


@dataclass
class Tokens:
    tokens: list[int]
    first: int


def nats(reader, texts, *, first=None):
    """-log p of each predicted token of each text, by the text's place."""
    texts = texts if first is None else [Tokens(tokens, first) for tokens in texts]
    output = {number: [] for number in range(len(texts))}
    numbers = {id(text): number for number, text in enumerate(texts)}
    for pieces, logits_PV in reader.logits(texts):
        assert len(logits_PV) == sum(len(piece.targets) for piece in pieces)
        for piece, logits in zip(pieces, logits_PV.split([len(piece.targets) for piece in pieces]), strict=True):
            targets = torch.tensor(piece.targets)
            output[numbers[id(piece.text)]] += torch.nn.functional.cross_entropy(
                logits, targets, reduction="none"
            ).tolist()
    return output


def test_what_was_generated_has_the_score_that_it_was_generated_with(hf):
    model = load(hf)
    prompt = [BOS, 72, 101, 108]
    (said,) = complete(model, [prompt], max_new_tokens=40, logprobs=0)
    reader = Likelihood(Engine(model, rows=1, room=64), context=256, vocab_size=301)
    (output,) = nats(reader, [prompt + said.tokens], first=len(prompt)).values()
    assert [-one for one in output] == pytest.approx([one.logprob for one in said.logprobs], abs=1e-4)


@pytest.fixture
def num_read(hf):
    """How many tokens each pass read of the model that comes with it."""
    model, num_read = load(hf), []
    model.body.register_forward_pre_hook(lambda _, args: num_read.append(args[0].shape[1]))
    return model, num_read


def test_a_shared_beginning_is_read_once_and_changes_nothing(num_read):
    model, num_read = num_read
    beginning = [BOS, *range(40, 80)]
    texts = [beginning + end for end in ([1, 2], [1, 3, 4], [5], [1, 2])]
    together = Likelihood(Engine(model, rows=1, room=64), context=256, vocab_size=301)
    shared = nats(together, texts, first=len(beginning))
    assert num_read == [len(beginning) + 1, 3 + 1 + 2]  # the first one alone, then all that go on from it
    for number, tokens in enumerate(texts):
        reader = Likelihood(Engine(model, rows=1, room=64), context=256, vocab_size=301)
        assert shared[number] == pytest.approx(nats(reader, [tokens], first=len(beginning))[0], abs=1e-5)


@pytest.mark.parametrize("num_positions", [1, 7, 1000])
def test_short_texts_go_through_together_and_change_nothing(num_read, monkeypatch, num_positions):
    """Among them long ones, and ones that share a beginning that is worth a pass of its own."""
    model, num_read = num_read
    monkeypatch.setitem(engine_file.PREFILL_TOKENS, "cpu", 48)
    monkeypatch.setitem(engine_file.LEAST_SHARED, "cpu", 6)
    monkeypatch.setattr(likelihood, "LOGITS_BYTES", num_positions * 4 * 301)
    draw = random.Random(0)
    heads = [[BOS], [BOS, *range(9)], [BOS, *range(20)]]
    texts = []
    for _ in range(60):
        head = draw.choice(heads)
        tokens = [*head, *draw.choices(range(256), k=draw.choice([1, 2, 3, 9, 9, 90]))]
        texts.append(Tokens(tokens, draw.choice([1, len(head), len(head)])))
    together = Likelihood(Engine(model, rows=1, room=64), context=40, vocab_size=301)
    found = nats(together, texts)
    assert max(num_read) > 40 and len(num_read) < 150
    read_together = sum(num_read)
    num_read.clear()
    for number, text in enumerate(texts):
        alone = nats(Likelihood(Engine(model, rows=1, room=64), context=40, vocab_size=301), [text])[0]
        assert len(alone) == len(text.tokens) - text.first
        assert found[number] == pytest.approx(alone, abs=1e-4)
    assert read_together < sum(num_read)
