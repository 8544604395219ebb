"""float16: as close to exact logits as transformers' own float16, in prompts, decode steps and on several ranks."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.llama import write as write_llama
from tests.tiny_infer import load
from titan_tools.infer.decoding.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["llama", "tied"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    write_llama(folder, tie_word_embeddings=request.param == "tied").half().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("static", [False, True], ids=["ragged", "static"])
def test_logits_are_as_close_as_transformers_are_in_float16(folder, static):
    tokens = torch.randint(0, 256, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        exact, half = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(tokens).logits.float()
            for dtype in (torch.float32, torch.float16)
        )
    engine = Engine(load(folder, dtype=torch.float16), rows=2, room=64, static=static)
    lengths = (20, 33)
    ours = [
        [(n - 1, engine.prefill(row, tokens[row, :n].tolist()))] for row, n in enumerate(lengths)
    ]  # of each row, the position and its logits
    for step in range(27):
        logits = engine.decode([int(tokens[row, n + step]) for row, n in enumerate(lengths)])
        for row, n in enumerate(lengths):
            ours[row].append((n + step, logits[row]))
    assert engine.model.dtype == torch.float16
    for row, output in enumerate(ours):
        positions = [position for position, _ in output]
        error = (torch.stack([logits for _, logits in output]) - exact[row, positions]).abs().max()
        assert error <= 1.5 * (half[row] - exact[row]).abs().max() < 0.05


@pytest.mark.slow
def test_ranks_sum_in_float16(titan, folder):
    asked = ["infer", str(folder), "--prompt", "def main(", "--max-new-tokens", "8", "--json"]
    alone = json.loads(titan(*asked)[1])
    ranks = subprocess.run(
        [sys.executable, "-m", "titan_tools", *asked, "--tp", "2"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=True,
    )
    together = json.loads(ranks.stdout)
    assert [output["stats"]["dtype"] for output in (alone, together)] == ["float16", "float16"]
    assert together["stats"]["tp"] == 2 and together["results"] == alone["results"]
