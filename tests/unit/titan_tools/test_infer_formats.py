"""`titan infer` on every kind of checkpoint: transformers' greedy tokens, without a conversion, or what is missing."""

import base64
import json

import pytest
import torch
from tokenizers import Tokenizer

from tests.checkpoint_forms import FORMS
from tests.greedy_reference import greedy
from tests.tiny_families import SCALING, write_tiny
from tests.tiny_llama import BOS, EOS, write_tokenizer

PROMPT = "def main("
NUM_NEW = 12
MODELS = {
    "llama": ("llama3", {"rope_scaling": SCALING, "max_position_embeddings": 131072}),
    "llama, tied": ("llama3_tied", {"rope_scaling": SCALING | {"factor": 32.0}, "max_position_embeddings": 131072}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2}),
    "qwen3, tied": ("qwen3_tied", {}),
}
ASK = ("--prompt", PROMPT, "--max-new-tokens", NUM_NEW, "--ignore-eos", "--json")
pytestmark = pytest.mark.usefixtures("one_thread")


def write_model(folder, called, dtype=torch.float32):
    """transformers' model and its HF folder, whose tokenizer has the bytes and BOS."""
    name, numbers = MODELS[called]
    common = {"vocab_size": 302, "bos_token_id": BOS, "eos_token_id": EOS}
    model = write_tiny(folder, name, dtype=dtype, numbers=common | numbers)
    if called.startswith("llama"):  # torchtune and Meta's code want a tiktoken file
        ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
        (folder / "tokenizer.model").write_text(ranks)
        return model, [BOS, *PROMPT.encode()]
    write_tokenizer(folder)
    return model, [BOS, *Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids]


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    """An HF folder, and transformers' greedy tokens after the prompt, each likeliest by far."""
    folder = tmp_path_factory.mktemp("hf")
    model, prompt = write_model(folder, request.param)
    (said,) = greedy(model, [prompt], NUM_NEW)
    assert min(said.gaps) > 1e-3
    return folder, prompt, said.tokens


def every_pair():
    """Every model in every form. Most are slow tests: one model goes through all of them, and the others some."""
    for model in MODELS:
        for name, form in FORMS.items():
            if model.startswith("llama") or not form.llama_only:
                quick = model == "llama, tied" or name in ("hf", "dcp for a mesh", "torchtitan")
                yield pytest.param(model, name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("source", "form"), every_pair(), indirect=["source"])
def test_greedy_tokens_are_those_of_transformers(titan, source, form, tmp_path):
    hf, prompt, expected = source
    place = FORMS[form].write(hf, tmp_path)
    model_from = () if FORMS[form].says_model else ("--model-from", hf)
    code, out, err = titan("infer", place, *ASK, *model_from)
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert result["prompt_tokens"] == prompt
    assert result["tokens"] == expected
