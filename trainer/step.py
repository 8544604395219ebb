"""The gradients of a step: all microbatches, divided by the tokens of all ranks, clipped, and judged together."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.data.batch import Batch
from trainer.mesh import Meshes
from trainer.optim import GradientClip
from trainer.train_model import TrainModel


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks know of a step; equal on all of them."""

    loss: float  # mean over the valid tokens of all ranks and microbatches, in nats
    grad_norm: float  # before clipping
    num_valid_tokens: int
    stop_requested: bool  # of at least one rank

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainStep:
    """Takes this rank's samples of a step to a StepResult, and leaves clipped gradients for the optimizer."""

    def __init__(self, model: TrainModel, meshes: Meshes, *, max_norm: float, local_batch_size: int):
        parameters, dims = model.named_parameters().values(), meshes.dims
        self._model = model
        self._device = next(iter(parameters)).device
        self._inputs_on = meshes.device_type  # CPU offload keeps parameters elsewhere
        self._batch_group = meshes["batch"].get_group()
        self._tp = dims.tp
        self._local_batch_size = local_batch_size
        ranks_per_stage = dims.world_size // dims.pp
        self._clip = GradientClip(
            parameters, max_norm=max_norm, ranks_per_stage=ranks_per_stage, copies=model.tied_copies()
        )

    def compute_gradients(self, samples: Batch, *, stop_requested: bool) -> StepResult:
        """Forward and backward of all microbatches, then clipping. Nothing is updated yet."""
        # Known before the first backward: dividing by it later would clip gradients that are thousands of times too
        # large, and a mean of microbatch means would weigh their tokens unequally.
        # On a GPU the host waits twice in a step, here and for the verdict, however many microbatches there are: `full`
        # fills in place, where a copy from the host would wait.
        num_valid = torch.full((), samples.num_valid_tokens, device=self._device)
        dist.all_reduce(num_valid, group=self._batch_group)
        num_valid_tokens = int(num_valid)
        *most, last = self._microbatches(samples)
        with self._model.accumulating():
            shares = [self._model.forward_backward(part, max(num_valid_tokens, 1)) for part in most]
        shares.append(self._model.forward_backward(last, max(num_valid_tokens, 1)))
        self._model.sum_tied_gradients()
        grad_norm = self._clip()
        # One sum tells all ranks the loss, and whether any was asked to stop. tp ranks hold the same share of the loss.
        share = torch.stack(shares).sum().to(grad_norm)  # which CPU offload leaves on the CPU
        verdict = torch.stack([share, torch.full_like(grad_norm, stop_requested)])
        dist.all_reduce(verdict)
        loss, num_stop_requests, norm = torch.stack([*verdict, grad_norm]).tolist()
        return StepResult(loss / self._tp, norm, num_valid_tokens, num_stop_requests > 0)

    def _microbatches(self, samples: Batch) -> list[Batch]:
        size = self._local_batch_size
        # All of them now, while nothing is queued there: from memory that is not pinned a copy waits for its turn.
        tokens, targets = (ids.to(self._inputs_on, non_blocking=True) for ids in (samples.tokens, samples.targets))
        pairs = zip(tokens.split(size), targets.split(size), strict=True)
        return [Batch(tokens, targets) for tokens, targets in pairs]
