"""An engine that tells what it was asked to do, and prompts of all lengths for it."""

import random

from tests.models.llama import BOS
from tests.tiny_infer import NO_TEXT
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import GenerationSettings, generate
from titan_tools.infer.text.prompts import Prompt


class Watched(Engine):
    """An engine that tells what it was asked to do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passes, self.copies, self.nums = [], [], []

    @property
    def prefills(self):
        return [prompt for prompts in self.passes for prompt in prompts]

    def prefill_rows(self, prompts):
        self.passes.append([(one.row, len(one.tokens), one.keep) for one in prompts])
        return super().prefill_rows(prompts)

    def copy_row(self, source, target, *, length=None):
        self.copies.append((source, target, length))
        super().copy_row(source, target, length=length)

    def decode(self, tokens):
        self.nums.append(len(tokens))
        return super().decode(tokens)

    def decode_likeliest(self, tokens, *, ahead):
        if self._static:  # otherwise it calls decode
            self.nums.append(len(tokens))
        return super().decode_likeliest(tokens, ahead=ahead)


def run(engine, prompts, *, timings=None, on_text=None, **settings):
    """Tokens of each (prompt, sample), and the order in which they ended."""
    prompts = [Prompt(str(i), "", tokens) for i, tokens in enumerate(prompts)]
    said = generate(engine, prompts, GenerationSettings(**settings), NO_TEXT, timings=timings, on_text=on_text)
    said = {(int(c.prompt.id), c.sample): (c.tokens, c.finish_reason) for c in said}
    return dict(sorted(said.items())), list(said)


def ragged(num, longest, seed=0):
    draw = random.Random(seed)
    return [[BOS, *(draw.randrange(256) for _ in range(draw.randrange(longest)))] for _ in range(num)]
