"""Cross-entropy of whole logits or of vocabulary shards, summed over valid tokens.

Sums, not means: the caller divides by the number of valid tokens of the whole step (all ranks, microbatches and
accumulated batches), so that every layout optimizes the same number.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.data.sample import IGNORED


def cross_entropy_sum(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """The summed loss in fp32; IGNORED targets add nothing."""
    return F.cross_entropy(
        logits_BLV.flatten(0, -2).float(), targets_BL.flatten(), reduction="sum", ignore_index=IGNORED
    )


def sharded_cross_entropy_sum(logits_BLV: Tensor, targets_BL: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The summed loss from this rank's columns of the logits (loss parallel), without whole logits.

    The vocabulary is split evenly over `group` in rank order; every rank of it returns the whole loss.
    """
    loss: Tensor = _ShardedCrossEntropySum.apply(logits_BLV.flatten(0, -2), targets_BL.flatten(), group)  # type: ignore[no-untyped-call]
    return loss


class _ShardedCrossEntropySum(torch.autograd.Function):
    """T tokens, V columns of this rank."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        shifted_TV = logits_TV.float()
        highest_T = shifted_TV.amax(-1)
        dist.all_reduce(highest_T, dist.ReduceOp.MAX, group)
        shifted_TV = shifted_TV - highest_T.unsqueeze(-1)

        num_columns = logits_TV.shape[-1]
        columns_T = targets_T - dist.get_rank(group) * num_columns
        here_T = (columns_T >= 0) & (columns_T < num_columns)  # IGNORED targets are in no rank's columns
        columns_T = columns_T.clamp(0, num_columns - 1)
        picked_T = shifted_TV.gather(-1, columns_T.unsqueeze(-1)).squeeze(-1) * here_T

        probabilities_TV = shifted_TV.exp_()
        sums_2T = torch.stack((probabilities_TV.sum(-1), picked_T))
        dist.all_reduce(sums_2T, dist.ReduceOp.SUM, group)
        valid_T = targets_T != IGNORED
        probabilities_TV /= sums_2T[0].unsqueeze(-1)
        ctx.save_for_backward(probabilities_TV, columns_T, here_T, valid_T)
        ctx.dtype = logits_TV.dtype
        return ((sums_2T[0].log() - sums_2T[1]) * valid_T).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities_TV, columns_T, here_T, valid_T = ctx.saved_tensors
        grad_TV = probabilities_TV * valid_T.unsqueeze(-1)
        grad_TV.scatter_add_(-1, columns_T.unsqueeze(-1), -here_T.to(grad_TV.dtype).unsqueeze(-1))
        return (grad_TV * gradient).to(ctx.dtype), None, None
