"""Learning-rate schedule: linear warm-up, stable, decay (WSD)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.config.sections import LRScheduler
from trainer.observability.log import note

DecayType = Literal["linear", "sqrt", "cosine"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Lengths in steps. The decay ends one step after the last, so that the last step has a nonzero rate."""

    warmup_steps: int
    stable_steps: int
    decay_steps: int
    decay_type: DecayType
    min_lr_factor: float

    @staticmethod
    def of(
        total_steps: int,
        *,
        warmup_steps: int,
        decay_ratio: float | None,
        decay_type: DecayType = "linear",
        min_lr_factor: float = 0.0,
    ) -> "Curve":
        """Fit the phases into `total_steps`: the warm-up is truncated to it, the decay to the remaining steps."""
        warmup = min(warmup_steps, total_steps)
        left = total_steps - warmup
        decay = left if decay_ratio is None else min(round(total_steps * decay_ratio), left)
        return Curve(warmup, left - decay, decay, decay_type, min_lr_factor)

    def factor(self, num_done: int) -> float:
        """Learning rate over peak for the step after `num_done` steps."""
        if num_done < self.warmup_steps:
            return (num_done + 1) / self.warmup_steps
        num_decayed = num_done - self.warmup_steps - self.stable_steps
        if num_decayed <= 0:
            return 1.0
        progress = min(num_decayed / self.decay_steps, 1.0) if self.decay_steps else 0.0
        shape = {
            "linear": 1.0 - progress,
            "sqrt": 1.0 - math.sqrt(progress),
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.min_lr_factor + (1.0 - self.min_lr_factor) * shape


def lr_curve(settings: LRScheduler, num_steps: int) -> Curve:
    """The curve of a config for a run of `num_steps`; prints a note if the warm-up is truncated."""
    total_steps = settings.total_steps or num_steps
    curve = Curve.of(
        total_steps,
        warmup_steps=settings.warmup_steps,
        decay_ratio=settings.decay_ratio,
        decay_type=settings.decay_type,
        min_lr_factor=settings.min_lr_factor,
    )
    if curve.warmup_steps < settings.warmup_steps:
        note(f"lr_scheduler.warmup_steps = {settings.warmup_steps} is truncated to the schedule's {total_steps} steps")
    return curve


class LRSchedule:
    """Sets each group's `lr` to `initial_lr` × the curve; its state is the number of steps done."""

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve):
        self.curve = curve
        self.last_epoch = 0  # torch's name for the number of steps done; the name on disk
        self._groups = optimizer.param_groups
        self._apply()

    @property
    def lr(self) -> float:
        return float(self._groups[0]["lr"])

    def step(self) -> None:
        self.last_epoch += 1
        self._apply()

    def _apply(self) -> None:
        factor = self.curve.factor(self.last_epoch)
        for group in self._groups:
            group["lr"] = group["initial_lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = int(state["last_epoch"])
        self._apply()
