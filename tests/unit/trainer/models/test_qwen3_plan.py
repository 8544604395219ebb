"""Qwen 3's tensor plan: Llama's for what Llama has, and the norms of q and k over the heads here."""

import torch
from torch import nn

from converters.families.qwen3 import FLAVORS
from converters.families.registry import get_family
from trainer.models.registry import get_trainer_family
from trainer.models.tensor_plan import TensorStyle


def test_the_plan_names_modules_of_the_model():
    args, family = FLAVORS["debug_gqa"], get_trainer_family("qwen3")
    with torch.device("meta"):
        modules = dict(family.build_model(args).named_modules())
    plan = family.tensor_plan(get_family("qwen3").parameters(args))
    assert plan.keys() <= modules.keys()
    assert {n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Embedding | nn.RMSNorm)} <= plan.keys()
    for n in range(4):
        assert plan[f"layers.{n}.attention.q_norm"] is plan[f"layers.{n}.attention.k_norm"] is TensorStyle.HEADS
        assert plan[f"layers.{n}.attention_norm"] is TensorStyle.SEQUENCE_SHARDS
        assert plan[f"layers.{n}.attention.wk"] is TensorStyle.COLUMNS
