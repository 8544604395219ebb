"""Activation checkpointing: which layers, or which operations, are computed again in backward."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config.sections import ActivationCheckpoint

_aten = torch.ops.aten
# Costly to compute again: attention, and what waits for other ranks. Matrix products are dealt with on their own.
# Only functional operations: one that fills a buffer (c10d's own collectives) would leave it empty when not run again.
_KEPT_OPS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._efficient_attention_forward.default,  # a context rank's, in fp32 on CUDA
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
    }
)
_MATRIX_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default})


def apply_activation_checkpoint(model: nn.Module, settings: ActivationCheckpoint) -> None:
    """Make layers compute themselves again in backward; `selective` with a number n takes every n-th of the model.

    Only `forward` is replaced, no module is wrapped: FQNs stay, and what FSDP hooks around the layer stays outside.
    """
    if settings.mode == "none":
        return
    run = partial(checkpoint, use_reentrant=False)
    every = 1
    if settings.mode == "selective" and settings.selective_ac_option == "op":
        run = partial(run, context_fn=_keep_costly_operations)
    elif settings.mode == "selective":
        every = int(settings.selective_ac_option)
    for number, layer in model.layers.items():
        if (int(number) + 1) % every == 0:  # by number in the whole model: a pipeline does not change the choice
            layer.forward = partial(run, layer.forward)


def _keep_costly_operations():
    """Contexts of one checkpointed layer: attention and collectives are kept, and every second matrix product.

    Half the products balance memory against time, as in torchtitan. Forward and recomputation count apart, so that they
    decide alike.
    """
    num_products = {"forward": 0, "recompute": 0}

    def policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
        if operation in _MATRIX_PRODUCTS:
            phase = "recompute" if context.is_recompute else "forward"
            num_products[phase] += 1
            keep = num_products[phase] % 2 == 1
        else:
            keep = operation in _KEPT_OPS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
