"""Ranks of a family with biases: each is added once, wherever tensor parallelism cuts its layer."""

import pytest
import torch
import torch.nn.functional as F

from tests.models.biased import BIASED, registered
from tests.models.biased import write as write_biased
from tests.tiny_infer import load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import linear as packed

TOKENS = [3, 14, 15, 92, 65, 35]


def logits_of(folder, tp, how, packs):
    """This rank's logits of a prefill and of two decode steps behind it: [3, V]."""
    least, packed._LEAST_PACKED_BYTES = packed._LEAST_PACKED_BYTES, 1
    try:
        with registered():
            model = load(folder, tp=tp, rank=torch.distributed.get_rank(), quantize=how, packed=packs)
    finally:
        packed._LEAST_PACKED_BYTES = least
    engine = Engine(model, rows=1, room=64)
    return torch.stack([engine.prefill(0, TOKENS), *(engine.decode([token])[0] for token in (7, 8))]).tolist()


# Two key/value heads: four ranks hold copies. 97 tokens and 58 features are cut unevenly
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", BIASED)
def test_ranks_say_what_transformers_says(pools, tmp_path, name, tp):
    theirs = write_biased(tmp_path, name, intermediate_size=58)
    with torch.inference_mode():
        expected = theirs(torch.tensor([[*TOKENS, 7, 8]])).logits[0, -3:]
    for how, packs in ((None, True), (None, False), ("int8", False)):
        ranks = pools[tp].run(logits_of, tmp_path, tp, how, packs)
        assert all(rank == ranks[0] for rank in ranks)  # bit for bit: each chooses by itself
        found = torch.tensor(ranks[0])
        if how is None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        else:
            assert F.cosine_similarity(found, expected).min() > 0.999
