"""One training step: gradients of all accumulated batches, clipping, one verdict of all ranks, the update."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from converters.common.extensions import ExtensionError, check_protocol, where_defined
from trainer.batch import Batch
from trainer.optim.clip import GradientClip
from trainer.optim.expert_balance import ExpertBalance, ExpertLoad
from trainer.ranks.mesh import Meshes
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
class OwnShare:
    """The part of a step's loss that a rank has computed: its share in the mean, and the units of its samples.

    Shares add up over the ranks of all stages, context shards and batches.
    """

    loss: float
    num_units: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, equal on all ranks but for `own`."""

    loss: float  # mean over the units of all ranks and accumulated batches
    grad_norm: float  # before clipping
    num_units: int
    stop_requested: bool  # on at least one rank
    expert_loads: tuple[ExpertLoad, ...] = ()  # of layers with experts
    own: OwnShare | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Verdict:
    """The outcome of a step while the host does not know it yet.

    It is copied to the host at once, so that `read` waits for the copy but not for an update that was launched after.
    """

    def __init__(
        self,
        loss: Tensor,
        grad_norm: Tensor,
        num_units: Tensor,
        num_stop_requests: Tensor,
        *,
        share: Tensor,
        num_own: int,
        copies: int,
        balance: ExpertBalance | None = None,
        counts_LE: Tensor | None = None,
    ):
        """0-dim tensors on one device: float64, but for the number of units. `copies`: how often loss has the loss.

        `share`: this rank's in the loss, whose samples have `num_own` units.
        `counts_LE`: of the rows of each expert, for `balance`, summed over all ranks.
        """
        values = torch.stack([loss, grad_norm, num_units.to(loss), num_stop_requests, share])
        self.found_inf = 1 - values.isfinite().all().float()  # 1 if the loss or the norm is not finite, else 0
        self.counts_LE, self._balance = counts_LE, balance
        if balance is not None and counts_LE is not None:
            values = torch.cat([values, balance.loads(counts_LE)])
        self._values = values.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._copies, self._num_own = copies, num_own
        self._copied = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None

    def read(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
        loss, norm, num_units, num_stop_requests, share, *loads = self._values.tolist()
        expert_loads = self._balance.read(loads) if self._balance else ()
        own = OwnShare(share / self._copies, self._num_own)
        return StepResult(loss / self._copies, norm, int(num_units), num_stop_requests > 0, expert_loads, own)


class TrainStep:
    """Computes clipped gradients from this rank's samples of a step, then updates the parameters."""

    def __init__(
        self,
        model: TrainModel,
        meshes: Meshes,
        *,
        max_norm: float,
        local_batch_size: int,
        num_batches: int | None = None,
        observer: StepObserver | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        """`num_batches`: of a step, accumulated by each rank; None: not checked.

        `stop_requested` is called late in each step; if a rank returns True, the StepResult of all says so.
        """
        parameters, dims = model.named_parameters().values(), meshes.dims
        self._model = model
        self._observer: StepObserver = observer or NoObserver()
        self._stop_requested = stop_requested
        self._device = next(iter(parameters)).device
        self._inputs_on = meshes.device_type  # under CPU offload not the parameters' device
        self._batch_group = meshes["batch"].get_group()
        self._tp = dims.tp
        self._local_batch_size, self._num_batches = local_batch_size, num_batches
        self._checked_batch: type | None = None
        self.balance = ExpertBalance.of(model, device=self._inputs_on)
        ranks_per_stage = dims.world_size // dims.pp
        self.clip = GradientClip(
            parameters, max_norm=max_norm, ranks_per_stage=ranks_per_stage, copies=model.tied_copies()
        )

    def run(self, samples: Batch, optimizer: torch.optim.Optimizer) -> StepResult:
        """The whole step. A loss or a norm that is not finite leaves parameters and optimizer as they are.

        On a GPU the host waits once, for the verdict. Optimizers that can leave out an update on the device, as fused
        ones for torch's GradScaler, are launched before that.
        """
        verdict = self.compute_gradients(samples)
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            result = verdict.read()
            if result.is_finite:
                self._update(optimizer, verdict)
            return result
        guarded: Any = optimizer
        guarded.found_inf = verdict.found_inf
        try:
            self._update(optimizer, verdict)
        finally:
            del guarded.found_inf
        return verdict.read()

    def compute_gradients(self, samples: Batch) -> Verdict:
        """Forward and backward of all accumulated batches, then clipping. Parameters are not updated."""
        self._check_batch(samples)
        # Needed before the first backward: dividing later would clip gradients that are thousands of times too large,
        # and a mean of the batches' means would weigh their units unequally. It stays on the device, and `full` fills
        # in place: the host would have to wait for it, and for a copy.
        num_own = samples.num_units
        num_units = torch.full((), num_own, device=self._device)
        dist.all_reduce(num_units, group=self._batch_group)
        divisor = num_units.clamp(min=1)
        batches = samples.to(self._inputs_on).split(self._local_batch_size)
        shares = []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with (
                self._observer.during("forward_backward", number),
                nullcontext() if is_last else self._model.accumulating(),
            ):
                shares.append(self._model.forward_backward(batch, divisor))
        self._model.sum_tied_gradients()
        with self._observer.during("clip"):
            grad_norm = self.clip()
        # One all-reduce for the loss, stop requests and experts' loads. Tensor-parallel ranks hold the same share of
        # the loss.
        share = torch.stack(shares).sum().to(grad_norm)  # under CPU offload the norm is on the CPU
        sums = torch.stack([share, torch.full_like(grad_norm, self._stop_requested())])
        counts_LE = self.balance.take().to(grad_norm) if self.balance else None
        if counts_LE is not None:
            sums = torch.cat([sums, counts_LE.flatten()])
        dist.all_reduce(sums)
        return Verdict(
            sums[0],
            grad_norm,
            num_units,
            sums[1],
            share=share,
            num_own=num_own,
            copies=self._tp,
            balance=self.balance,
            counts_LE=None if counts_LE is None else sums[2:].view_as(counts_LE),
        )

    def _check_batch(self, samples: Batch) -> None:
        """Raise ExtensionError before any collective: ranks with more batches would wait for the others."""
        if type(samples) is not self._checked_batch:
            check_protocol(samples, Batch, "a batch of the data")
            self._checked_batch = type(samples)
        if self._num_batches is not None:
            num_batches = len(samples.split(self._local_batch_size))
            if num_batches != self._num_batches:
                raise ExtensionError(
                    f"{where_defined(samples.split)}: a rank's samples of a step are split into {num_batches} batches"
                    f" of {self._local_batch_size}, not {self._num_batches}",
                    hint="the loader yields global_batch_size / data-parallel degree samples, and `split(size)` returns"
                    " a sequence of batches of `size`",
                )

    def _update(self, optimizer: torch.optim.Optimizer, verdict: Verdict) -> None:
        with self._observer.during("update"):
            optimizer.step()
            if self.balance is not None and verdict.counts_LE is not None:
                self.balance.update(verdict.counts_LE, verdict.found_inf)
