"""The text of what is generated: all at its end where nobody follows it, and as it goes on behind the prompt's."""

import pytest

from tests.models.llama import BOS
from tests.tiny_infer import load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import GenerationSettings, generate
from titan_tools.infer.text.prompts import Prompt
from titan_tools.infer.text.vocabulary import Vocabulary

TOKENS = [BOS, 72, 101, 108, 108, 111]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(hf):
    return load(hf)


class Letters:
    """Token n is the letter with that number; counts how often it is asked."""

    bos_id, eos_ids, vocab_size = None, (), 1 << 30

    def __init__(self):
        self.num_decoded = 0

    def decode(self, ids):
        self.num_decoded += 1
        return "".join(map(chr, ids))


def test_text_that_nobody_follows_is_made_at_the_end(model):
    prompt, stop = Prompt("0", "", TOKENS), frozenset({5})
    said, counts = [], []
    for how in ({}, {"stop_strings": ("\x00\x01\x02",)}, {"on_text": lambda text: None}):
        letters, on_text = Letters(), how.pop("on_text", None)
        settings = GenerationSettings(max_new_tokens=40, stop_ids=stop, **how)
        engine = Engine(model, rows=1, room=64)
        (one,) = generate(engine, [prompt], settings, Vocabulary(letters, frozenset()), on_text=on_text)
        said.append((one.tokens, one.text))
        counts.append(letters.num_decoded)
    assert said[0] == said[1] == said[2]
    assert said[0][1] == "".join(map(chr, said[0][0])) and len(said[0][1]) == 40
    assert counts[0] <= 3 < 40 < counts[1]


class Words(Letters):
    """Token n is the word n behind a space, which a text's first word loses, as SentencePiece's does."""

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.mark.parametrize("on_text", [None, lambda text: None])
def test_text_is_what_a_prompts_text_becomes_longer_by(model, on_text):
    prompt, engine = Prompt("0", "", TOKENS), Engine(model, rows=1, room=16)
    vocabulary = Vocabulary(Words(), frozenset())
    (one,) = generate(engine, [prompt], GenerationSettings(max_new_tokens=4), vocabulary, on_text=on_text)
    assert one.text == "".join(f" {token}" for token in one.tokens)
