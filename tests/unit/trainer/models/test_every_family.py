"""What holds for the model of every family: the parameters that converters list, and a style for each of its layers."""

import pytest
import torch
from torch import nn

from converters.families.registry import get_family
from trainer.models.registry import get_trainer_family
from trainer.models.tensor_plan import TensorStyle

FAMILIES = ("llama3", "qwen3", "deepseek_v3", "gpt_oss", "llama4")
FLAVORS = [(family, flavor) for family in FAMILIES for flavor in get_family(family).flavors]


def built(family: str, flavor: str) -> tuple[nn.Module, list]:
    """The model on the meta device, and its parameters as converters list them."""
    args = get_family(family).flavors[flavor]
    with torch.device("meta"):
        return get_trainer_family(family).build_model(args), get_family(family).parameters(args)


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_parameters_are_those_that_converters_list(family, flavor):
    model, listed = built(family, flavor)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {p.fqn: p.shape for p in listed if p.is_trained}
    assert {n: tuple(b.shape) for n, b in model.named_buffers()} == {p.fqn: p.shape for p in listed if not p.is_trained}


@pytest.mark.parametrize(("family", "flavor"), [each for each in FLAVORS if each[1].startswith("debug_")])
def test_every_layer_with_weights_has_a_style(family, flavor):
    """The one that its sharded dim asks for; none is for a layer that is not there."""
    model, listed = built(family, flavor)
    modules, plan = dict(model.named_modules()), get_trainer_family(family).tensor_plan(listed)
    assert plan.keys() <= modules.keys() | dict(model.named_parameters()).keys()  # sinks are a parameter of attention
    assert {n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Embedding | nn.RMSNorm)} <= plan.keys()
    assert (plan["tok_embeddings"], plan["output"]) == (TensorStyle.EMBEDDING, TensorStyle.LOGITS)
    for n in range(len(model.layers)):
        at = f"layers.{n}."
        assert plan[f"{at}attention.wo"] is TensorStyle.ROWS
        assert plan[f"{at}attention_norm"] is plan[f"{at}ffn_norm"] is TensorStyle.SEQUENCE_SHARDS
        if family != "deepseek_v3":  # whose latents are gathered: test_deepseek_v3_model.py
            assert plan[f"{at}attention.wk"] is TensorStyle.COLUMNS
            assert plan[f"{at}attention"] is TensorStyle.GATHER_SEQUENCE
        if f"{at}feed_forward" in modules:
            assert plan[f"{at}feed_forward"] is TensorStyle.GATHER_SEQUENCE
        if family == "qwen3":
            assert plan[f"{at}attention.q_norm"] is plan[f"{at}attention.k_norm"] is TensorStyle.HEADS
