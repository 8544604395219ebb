"""The record of an objective: what cannot be one is refused, and so is what is no loss."""

from dataclasses import replace

import pytest
import torch

from converters.common.extensions import ExtensionError
from trainer.batch import Inputs
from trainer.models import registry
from trainer.models.objectives import get_objective
from trainer.models.registry import TrainerFamily
from trainer.next_token.objective import NEXT_TOKEN
from trainer.objective import Data, HeldOut, check_data
from trainer.runner import WholeModel


@pytest.fixture(autouse=True)
def no_family_stays(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        (
            "place",
            lambda job: None,
            r"test_objective.py:\d+: `place` of the objective .* is called with \(Job, Meshes, t",
        ),
        ("zeros", None, "`zeros` of the objective of family 'mine' is None, which cannot be called"),
        ("axes", ("cp", "sp"), "axes has sp; there are pp, cp, tp, ep"),
        ("reads", ("training.steps",), "reads has training.steps; there are model.attn_type"),
        ("unit", "images per step", "unit = 'images per step' is not a word"),
        ("stage_shapes", None, "the axis pp needs `stage_shapes`"),
    ],
)
def test_what_cannot_be_an_objective_is_refused(field, value, text):
    with pytest.raises(ExtensionError, match=text):
        registry.register("mine", TrainerFamily(lambda args: None, objective=replace(NEXT_TOKEN, **{field: value})))


def test_a_family_without_an_objective_predicts_the_next_token():
    images = replace(NEXT_TOKEN, unit="images")
    registry.register("mine", TrainerFamily(lambda args: None, objective=images))
    assert (get_objective("llama3"), get_objective("mine")) == (NEXT_TOKEN, images)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (torch.ones((), dtype=torch.bfloat16), r"a tensor of bfloat16 of shape \[\]"),
        (torch.ones(2), r"a tensor of float32 of shape \[2\]"),
        (None, "a NoneType"),
    ],
)
def test_a_forward_that_returns_no_summed_loss_is_refused(returned, text):
    model = WholeModel(lambda x: returned)
    for run in (model.forward_loss, lambda inputs: model.forward_backward(inputs, 1.0)):
        with pytest.raises(ExtensionError, match=f"returned {text}, not the summed loss, one number in fp32"):
            run(Inputs(torch.zeros(2)))


class Endless:
    def __iter__(self): ...
    def state_dict(self): ...
    def load_state_dict(self, state): ...


def no_metrics():
    return {"validation_loss": 0.0}


class WithoutIter:
    state_dict, load_state_dict = Endless.state_dict, Endless.load_state_dict


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "the Data that `open_data` returns is None"),
        (Endless(), "the Data that `open_data` returns has no loader"),
        (Data(WithoutIter()), "the loader of the Data that `open_data` returns has no __iter__"),
        (Data(Endless(), [Endless()]), "which is not a HeldOut"),
        (
            Data(Endless(), HeldOut([], None, no_metrics)),
            r"`metrics` of `held_out` .* is called with \(Sequence\[float",
        ),
    ],
)
def test_data_that_lack_what_the_loop_calls_are_refused(data, text):
    check_data(Data(Endless(), HeldOut([Endless()], 2, dict)), NEXT_TOKEN)
    with pytest.raises(ExtensionError, match=text):
        check_data(data, NEXT_TOKEN)
