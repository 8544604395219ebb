"""One training step: gradients of all accumulated batches, clipping, one verdict of all ranks, the update."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from trainer.data.batch import Batch
from trainer.mesh import Meshes
from trainer.optim.clip import GradientClip
from trainer.train_model import TrainModel

Phase = Literal["forward_backward", "clip", "update"]


class StepObserver(Protocol):
    """Follows a training step: the profiler names its phases, a dry run and an estimate record what happens in each."""

    def during(self, phase: Phase, number: int = 0) -> AbstractContextManager[Any]:
        """A context around a phase. `number` counts the accumulated forward and backward passes of the step from 0."""
        ...


class NoObserver:
    """The default."""

    def during(self, phase: Phase, number: int = 0) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, equal on all ranks."""

    loss: float  # mean over the valid tokens of all ranks and accumulated batches, in nats
    grad_norm: float  # before clipping
    num_valid_tokens: int
    stop_requested: bool  # on at least one rank

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainStep:
    """Computes clipped gradients from this rank's samples of a step, then updates the parameters."""

    def __init__(
        self,
        model: TrainModel,
        meshes: Meshes,
        *,
        max_norm: float,
        local_batch_size: int,
        observer: StepObserver | None = None,
    ):
        parameters, dims = model.named_parameters().values(), meshes.dims
        self._model = model
        self._observer: StepObserver = observer or NoObserver()
        self._device = next(iter(parameters)).device
        self._inputs_on = meshes.device_type  # under CPU offload not the parameters' device
        self._batch_group = meshes["batch"].get_group()
        self._tp = dims.tp
        self._local_batch_size = local_batch_size
        ranks_per_stage = dims.world_size // dims.pp
        self.clip = GradientClip(
            parameters, max_norm=max_norm, ranks_per_stage=ranks_per_stage, copies=model.tied_copies()
        )

    def compute_gradients(self, samples: Batch, *, stop_requested: bool) -> StepResult:
        """Forward and backward of all accumulated batches, then clipping. Parameters are not updated."""
        # Needed before the first backward: dividing later would clip gradients that are thousands of times too large,
        # and a mean of the batches' means would weigh their tokens unequally.
        # On a GPU the host synchronizes twice per step, here and for the verdict, for any number of batches: `full`
        # fills in place, where a copy from the host would synchronize too.
        num_valid = torch.full((), samples.num_valid_tokens, device=self._device)
        dist.all_reduce(num_valid, group=self._batch_group)
        num_valid_tokens = int(num_valid)
        batches = self._split(samples)
        shares = []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with (
                self._observer.during("forward_backward", number),
                nullcontext() if is_last else self._model.accumulating(),
            ):
                shares.append(self._model.forward_backward(batch, max(num_valid_tokens, 1)))
        self._model.sum_tied_gradients()
        with self._observer.during("clip"):
            grad_norm = self.clip()
        # One all-reduce for the loss and for stop requests. Tensor-parallel ranks hold the same share of the loss.
        share = torch.stack(shares).sum().to(grad_norm)  # under CPU offload the norm is on the CPU
        verdict = torch.stack([share, torch.full_like(grad_norm, stop_requested)])
        dist.all_reduce(verdict)
        loss, num_stop_requests, norm = torch.stack([*verdict, grad_norm]).tolist()
        return StepResult(loss / self._tp, norm, num_valid_tokens, num_stop_requests > 0)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters with the gradients that were computed."""
        with self._observer.during("update"):
            optimizer.step()

    def _split(self, samples: Batch) -> list[Batch]:
        """The samples as the batches that are accumulated, on the device."""
        size = self._local_batch_size
        # All copies now, while the device's queue is empty: a copy from unpinned memory waits for earlier work.
        tokens, targets = (ids.to(self._inputs_on, non_blocking=True) for ids in (samples.tokens, samples.targets))
        pairs = zip(torch.split(tokens, size), torch.split(targets, size), strict=True)
        return [Batch(tokens, targets) for tokens, targets in pairs]
