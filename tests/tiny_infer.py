"""Loading a folder for inference and continuing token lists, without the command around it."""

import torch

from converters.source.weights import open_native
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.generate import Completion, GenerationSettings, generate
from titan_tools.infer.model.load import SlicedModel, load_model
from titan_tools.infer.text.prompts import Prompt
from titan_tools.infer.text.vocabulary import Vocabulary

CPU = torch.device("cpu")


class _NoText:
    """A tokenizer for tests that look at ids alone."""

    prefix_ids, vocab_size = (), 1 << 30

    def encode(self, text, *, bos=False, eos=False, special=False):
        return []

    def decode(self, ids):
        return ""


NO_TEXT = Vocabulary(_NoText(), frozenset())


def load(folder, *, dtype=torch.float32, device=CPU, tp=1, rank=0, model_from=None, **options) -> SlicedModel:
    """This rank's part of the model in `folder`; `options` are load_model's others."""
    with open_native(folder, model_from=model_from) as weights:
        return load_model(weights.source, weights.info, dtype=dtype, device=device, tp=tp, rank=rank, **options)


def complete(model, prompts, *, rows=1, **settings) -> list[Completion]:
    """Completions of lists of tokens, whose ids are "0", "1", …; in the order of prompts and samples."""
    settings = GenerationSettings(**settings)
    room = max(map(len, prompts)) + settings.max_new_tokens
    asked = [Prompt(str(i), "", list(tokens)) for i, tokens in enumerate(prompts)]
    said = list(generate(Engine(model, rows=rows, room=room), asked, settings, NO_TEXT))
    return sorted(said, key=lambda c: (int(c.prompt.id), c.sample))
