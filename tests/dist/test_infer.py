"""Tensor-parallel inference over gloo ranks gives what one rank gives: logits, greedy tokens, seeded samples."""

import pytest
import torch

from tests.models.dense import write as write_tiny
from tests.models.llama import BOS
from tests.models.llama import write as write_llama
from tests.tiny_infer import complete, load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.sampling import Sampling

PROMPTS = [[BOS, 72, 101, 108], [BOS, *range(30, 80)]]
SAMPLINGS = [Sampling(), Sampling(1.0, top_k=50, top_p=0.95, seed=11)]
NUM_NEW = 24


def say(folder, tp):
    """This rank's logits along the greedy path, and the tokens of each prompt and sampling."""
    model = load(folder, tp=tp, rank=torch.distributed.get_rank() if tp > 1 else 0)
    tokens = [
        [c.tokens for c in complete(model, PROMPTS, max_new_tokens=NUM_NEW, sampling=sampling)]
        for sampling in SAMPLINGS
    ]
    engine = Engine(model, rows=1, room=len(PROMPTS[1]) + 8)
    logits = [engine.prefill(0, PROMPTS[1]), *(engine.decode([token])[0] for token in range(8))]
    num_held = sum(p.numel() for p in model.body.parameters()) + model.head.weight.numel()
    return {"tokens": tokens, "logits": torch.stack(logits).tolist(), "num_held": num_held}


@pytest.mark.parametrize(
    "tp, numbers",
    [
        pytest.param(2, {}, id="tp 2", marks=pytest.mark.slow),
        pytest.param(2, {"tie_word_embeddings": True}, id="tp 2 tied", marks=pytest.mark.slow),
        pytest.param(4, {}, id="tp 4: kv heads copied, vocabulary and feed-forward cut unevenly"),
        pytest.param(4, {"num_key_value_heads": 1, "vocab_size": 259}, id="tp 4: one kv head", marks=pytest.mark.slow),
    ],
)
def test_ranks_say_what_one_rank_says(pools, tmp_path, tp, numbers):
    write_llama(tmp_path, **numbers)
    _assert_ranks_say_what_one_says(pools, tmp_path, tp)


@pytest.mark.parametrize(
    ("tp", "name"), [pytest.param(2, "qwen3_tied", marks=pytest.mark.slow), (4, "qwen3")]
)  # 4: each of the 2 kv heads is copied
def test_qwen3_whose_norms_of_q_and_k_are_whole_on_every_rank(pools, tmp_path, tp, name):
    write_tiny(tmp_path, name, numbers={"vocab_size": 301, "num_hidden_layers": 2})
    _assert_ranks_say_what_one_says(pools, tmp_path, tp)


def _assert_ranks_say_what_one_says(pools, tmp_path, tp):
    alone, ranks = say(tmp_path, 1), pools[tp].run(say, tmp_path, tp)
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]
        difference = (torch.tensor(rank["logits"]) - torch.tensor(alone["logits"])).abs().max()
        assert difference < 1e-4
        assert rank["logits"] == ranks[0]["logits"]  # bit for bit: each rank chooses by itself
        assert rank["num_held"] < 0.75 * alone["num_held"]
    assert torch.tensor(alone["logits"]).std() > 0.5


def say_in_fixed_shapes(folder, tp, how):
    """This rank's logits of two ragged rows that decode together, as a GPU would."""
    model = load(folder, tp=tp, rank=torch.distributed.get_rank() if tp > 1 else 0, packed=False)
    engine = Engine(model, rows=2, room=80, **how)
    logits = [engine.prefill(row, prompt) for row, prompt in enumerate(PROMPTS)]
    for token in range(6):
        logits += engine.decode([token, 9 * token])
    return torch.stack(logits).tolist()


@pytest.mark.parametrize(
    "how", [{"static": True}, {"compile": True, "backend": "aot_eager"}], ids=["static", "compiled"]
)
def test_ranks_decode_in_fixed_shapes_and_compiled(pools, tmp_path, how):
    """All-reduces inside compiled layers, an all-gather inside the compiled output layer."""
    write_llama(tmp_path)
    alone = torch.tensor(say_in_fixed_shapes(tmp_path, 1, {}))
    ranks = pools[2].run(say_in_fixed_shapes, tmp_path, 2, how)
    assert ranks[0] == ranks[1]
    assert (torch.tensor(ranks[0]) - alone).abs().max() < 1e-4
