"""A tiny model of each kind that torchtune can build, written by transformers, and our three exports of it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torchtune import config

from converters.formats.base import OutputOptions
from tests.checkpoint_forms import write_byte_ranks
from tests.doors import convert
from tests.models.dense import SCALING
from tests.models.llama import write as write_llama
from tests.tiny_sentencepiece import write_sentencepiece

STYLES = ("hf", "meta", "torchtune")
KINDS = {
    "3": {"rope_scaling": None},
    "3.1": {"rope_scaling": SCALING | {"factor": 8.0}},
    "3.2": {"rope_scaling": SCALING | {"factor": 32.0}, "tie_word_embeddings": True},
    "tied, plain RoPE": {"rope_scaling": None, "tie_word_embeddings": True},
    "2": {"rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 400, "num_key_value_heads": 4},
}


@dataclass(frozen=True)
class Case:
    """The model as transformers has it, and a folder that holds theirs/, dcp/ and an export for each style."""

    kind: str
    model: torch.nn.Module
    root: Path

    def recipe(self, style: str, output_dir: Path):
        """torchtune.yaml as torchtune parses it, but for the place of what it writes."""
        recipe = OmegaConf.load(self.root / style / "torchtune.yaml")
        recipe.output_dir = str(output_dir)
        return recipe


def make_case(root: Path, kind: str, **numbers) -> Case:
    """Write all of it below `root`. Only Llama 2 has a SentencePiece tokenizer, the others have tiktoken's."""
    numbers = {
        "vocab_size": 302,
        "hidden_size": 64,
        "intermediate_size": 176,
        "max_position_embeddings": 16384,
        "rope_theta": 300000.0,  # not what torchtune's builders take by themselves
        **KINDS[kind],
        **numbers,
    }
    model = write_llama(root / "theirs", **numbers)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "theirs" / name).unlink()
    (write_sentencepiece if kind == "2" else write_byte_ranks)(root / "theirs" / "tokenizer.model")
    convert(root / "theirs", root / "dcp", to="dcp")
    for style in STYLES:
        convert(root / "dcp", root / style, to="torchtune", options=OutputOptions(style=style, device="cpu"))
    return Case(kind, model, root)


def load(recipe):
    """The model as torchtune's recipe builds and loads it: its own checkpointer, its own strict load_state_dict."""
    state = config.instantiate(recipe.checkpointer).load_checkpoint()["model"]
    model = config.instantiate(recipe.model).eval()
    model.load_state_dict(state)
    return model
