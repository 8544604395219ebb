"""`titan infer` on Qwen 3 and Llama 2, from what transformers wrote and from DCP: transformers' own greedy tokens."""

import json
import sys

import pytest
import torch

from converters.convert import convert
from tests.tiny_families import write_tiny
from tests.tiny_llama import BOS, EOS, write_tokenizer
from titan_tools import cli

PROMPT = "def main("
NUMBERS = {"vocab_size": 301, "max_position_embeddings": 256, "bos_token_id": BOS, "eos_token_id": EOS}
NUM_NEW = 24
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["qwen3", "qwen3_tied", "llama2"])
def written(request, tmp_path_factory):
    """A folder with hf/ and dcp/, and transformers' model."""
    root = tmp_path_factory.mktemp("written")
    model = write_tiny(root / "hf", request.param, numbers=NUMBERS)
    write_tokenizer(root / "hf")
    convert(root / "hf", root / "dcp", to="dcp")
    return root, model


def greedy(model, prompt_tokens: list[int]) -> list[int]:
    """transformers' likeliest tokens; each by far, so that rounding cannot turn one over."""
    tokens: list[int] = []
    while len(tokens) < NUM_NEW and EOS not in tokens:
        with torch.no_grad():
            best = model(torch.tensor([prompt_tokens + tokens])).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3
        tokens.append(best.indices[0].item())
    return tokens


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_greedy_tokens_are_those_of_transformers(written, form, monkeypatch, capsys):
    root, model = written
    arguments = ["infer", root / form, "--prompt", PROMPT, "--max-new-tokens", NUM_NEW, "--json"]
    monkeypatch.setattr(sys, "argv", ["titan", *map(str, arguments)])
    assert cli.run() == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["tokens"] == greedy(model, result["prompt_tokens"])
