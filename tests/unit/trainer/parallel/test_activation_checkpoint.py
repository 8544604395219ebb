"""Activation checkpointing changes what is computed twice, never the numbers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from converters.families.llama3 import FLAVORS
from trainer.config.sections import ActivationCheckpoint
from trainer.models.llama3.model import Transformer
from trainer.parallel.activation_checkpoint import apply_activation_checkpoint

ATTENTION, PRODUCT = "_scaled_dot_product_flash_attention_for_cpu", "mm"


class Count(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def gradients_and_calls(mode: str, option: str = "2") -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    torch.manual_seed(0)
    model = Transformer(FLAVORS["debug_gqa"])  # 4 layers
    apply_activation_checkpoint(model, ActivationCheckpoint(mode=mode, selective_ac_option=option))
    with Count() as count:
        model(torch.arange(32).reshape(2, 16)).logsumexp(-1).sum().backward()
    return {fqn: parameter.grad for fqn, parameter in model.named_parameters()}, count.calls


PLAIN, PLAIN_CALLS = gradients_and_calls("none")


@pytest.mark.parametrize(
    ("mode", "option", "attentions_again", "products_again"),
    # a layer has 7 matrix products, of which the last need not be computed again to get gradients
    [("full", "2", 4, 4 * 7), ("selective", "1", 4, 4 * 7), ("selective", "3", 1, 7), ("selective", "op", 0, 4 * 3)],
)
def test_gradients_are_bit_equal_and_the_right_things_run_twice(mode, option, attentions_again, products_again):
    gradients, calls = gradients_and_calls(mode, option)
    assert gradients.keys() == PLAIN.keys()
    assert all(gradients[fqn].equal(PLAIN[fqn]) for fqn in PLAIN)
    assert calls[ATTENTION] - PLAIN_CALLS[ATTENTION] == attentions_again
    assert 0 < calls[PRODUCT] - PLAIN_CALLS[PRODUCT] <= products_again


def test_every_nth_layer_counts_in_the_whole_model():
    model = Transformer(FLAVORS["debug_gqa"])
    del model.layers["0"]  # a later pipeline stage
    apply_activation_checkpoint(model, ActivationCheckpoint(mode="selective", selective_ac_option="2"))
    assert [number for number, layer in model.layers.items() if "forward" in vars(layer)] == ["1", "3"]
