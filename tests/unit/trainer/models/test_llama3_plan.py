"""The tensor plan: a style for every module with weights, the one that its sharded dim asks for."""

import pytest
import torch
from torch import nn

from converters.families.llama3 import FLAVORS, parameters
from trainer.models.decoder import Transformer
from trainer.models.tensor_plan import TensorStyle, tensor_plan


@pytest.mark.parametrize("flavor", ["debug_gqa", "debug_tied"])
def test_the_plan_names_modules_of_the_model(flavor):
    with torch.device("meta"):
        model = Transformer(FLAVORS[flavor])
    modules = dict(model.named_modules())
    plan = tensor_plan(parameters(FLAVORS[flavor]))
    assert plan.keys() <= modules.keys()
    assert {n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Embedding | nn.RMSNorm)} <= plan.keys()
    for n in range(4):
        assert plan[f"layers.{n}.attention.wo"] is TensorStyle.ROWS
        assert plan[f"layers.{n}.attention.wk"] is TensorStyle.COLUMNS
        assert plan[f"layers.{n}.ffn_norm"] is TensorStyle.SEQUENCE_SHARDS
        assert plan[f"layers.{n}.attention"] is plan[f"layers.{n}.feed_forward"] is TensorStyle.GATHER_SEQUENCE
    assert (plan["tok_embeddings"], plan["output"]) == (TensorStyle.EMBEDDING, TensorStyle.LOGITS)
