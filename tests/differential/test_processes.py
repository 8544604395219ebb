"""The same through the command line in processes of its own: outputs, exit codes, and what a refusal leaves behind."""

import json
import subprocess
import sys

import pytest
import torch

from tests.differential.compare import load_reference
from tests.differential.makers import tiny_config, tiny_model
from tests.differential.sampling import chosen
from tests.models.llama import write_tokenizer

ROWS = 300  # of the embedding: bytes and two special tokens


def _titan(*arguments):
    command = [sys.executable, "-P", "-m", "titan_tools", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("model_type", chosen(["llama", "qwen3"], ["llama"]))
def test_convert_and_score(model_type, tmp_path, count):
    src = tmp_path / "src"
    tiny_model(tiny_config(model_type, vocab_size=ROWS, bos_token_id=256, eos_token_id=257)).save_pretrained(src)
    write_tokenizer(src)
    done = _titan("convert", "hf-to-dcp", src, tmp_path / "dcp")
    assert done.returncode == 0, done.stderr
    done = _titan("infer", tmp_path / "dcp", "--score", "--prompt", "def main(): return 3", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    tokens = torch.tensor([[*result["prompt_tokens"], *result.get("tokens", [])]])
    with torch.no_grad():
        logprobs = load_reference(src).model(input_ids=tokens).logits.log_softmax(-1)
    expected = logprobs[0, :-1].gather(-1, tokens[0, 1:, None]).sum().item()
    assert result["logprob"] == pytest.approx(expected, rel=1e-5)
    count("processes", "same")


@pytest.mark.parametrize("model_type", chosen(["gpt2", "mistral", "gemma3", "qwen2_moe"], []))
def test_a_class_that_is_refused(model_type, tmp_path, count):
    src = tmp_path / "src"
    model = tiny_model(tiny_config(model_type))
    model.save_pretrained(src)
    before = sorted(tmp_path.rglob("*"))
    for arguments in (("convert", "hf-to-dcp", src, tmp_path / "dcp"), ("infer", src, "--prompt", "x")):
        done = _titan(*arguments)
        assert done.returncode == 2, done.stderr
        assert type(model).__name__ in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    count("processes", "refused")
