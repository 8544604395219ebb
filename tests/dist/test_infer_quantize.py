"""Ranks with weights of 8 bits: each rounds its own slices, and what they say together is close to the exact model."""

import pytest
import torch
import torch.nn.functional as F

from tests.models.llama import BOS
from tests.models.llama import write as write_llama
from tests.models.qwen3_moe import write as write_experts
from tests.tiny_infer import complete, load
from titan_tools.infer.decoding.engine import Engine

PROMPT = [BOS, *range(30, 80)]


def say(folder, how, tp):
    """This rank's logits behind a prompt, and the tokens that follow it, in bfloat16 and fp32."""
    rank = torch.distributed.get_rank() if tp > 1 else 0
    said = []
    for dtype in (torch.bfloat16, torch.float32):
        model = load(folder, dtype=dtype, tp=tp, rank=rank, quantize=how)
        logits = Engine(model, rows=1, room=64).prefill(0, PROMPT)
        said.append((logits.tolist(), complete(model, [PROMPT, PROMPT[:5]], rows=2, max_new_tokens=8)[0].tokens))
    return said


EXPERTS = {"vocab_size": 301, "moe_intermediate_size": 18}
TIED = {"tie_word_embeddings": True}
ODD = {"intermediate_size": 9, "vocab_size": 259}  # a rank has no features of w2, and slices are odd


@pytest.mark.parametrize(
    ("how", "tp", "numbers"),
    [
        pytest.param("int8", 2, TIED, id="int8, tp 2 tied"),
        pytest.param("float8", 4, ODD, id="float8, tp 4, odd slices"),
        pytest.param("int8", 4, EXPERTS, id="int8, tp 4, experts"),
        pytest.param("float8", 2, EXPERTS, id="float8, tp 2, experts", marks=pytest.mark.slow),
        pytest.param("float8", 2, TIED, id="float8, tp 2 tied", marks=pytest.mark.slow),
        pytest.param("int8", 4, ODD, id="int8, tp 4, odd slices", marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_and_stay_close_to_the_exact_model(pools, tmp_path, how, tp, numbers):
    (write_experts if numbers is EXPERTS else write_llama)(tmp_path, **numbers)
    ranks, exact = pools[tp].run(say, tmp_path, how, tp), say(tmp_path, None, 1)
    for rank in ranks:
        assert rank == ranks[0]  # bit for bit: each chooses by itself
        for (logits, _), (expected, _) in zip(rank, exact, strict=True):
            similarity = F.cosine_similarity(torch.tensor(logits), torch.tensor(expected), dim=0)
            assert similarity > (0.999 if how == "int8" else 0.99)
