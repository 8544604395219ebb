"""Everything that decides how a run goes on, as a checkpoint holds it: weights, and sections beside them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from converters.names import DATALOADER, LR_SCHEDULER, OPTIMIZER, RNG, TRAIN_STATE
from trainer.lr_schedule import LRSchedule
from trainer.optim import optimizer_state
from trainer.train_model import TrainModel


class Resumable(Protocol):
    """What tells and takes its state as plain values: the data loader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class Progress:
    """How far a run is: steps done, and tokens with a target that it has learnt from, over all ranks."""

    step: int = 0
    ntokens_seen: int = 0
    skipped_steps: int = 0  # of `step`: those without an update, under training.on_nonfinite = "skip"


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's state, live: loading fills its tensors in place."""

    model: TrainModel
    optimizer: torch.optim.Optimizer
    schedule: LRSchedule
    loader: Resumable
    progress: Progress

    def sections(self) -> dict[str, dict[str, Any]]:
        """What lies beside the weights, by section."""
        return {
            OPTIMIZER: optimizer_state(self.optimizer),
            LR_SCHEDULER: self.schedule.state_dict(),
            DATALOADER: self.loader.state_dict(),
            TRAIN_STATE: asdict(self.progress),
            RNG: _rng_state(),
        }

    def take(self, sections: Mapping[str, dict[str, Any]]) -> None:
        """Take the plain values of sections that were loaded; tensors, but those of generators, are filled already."""
        if LR_SCHEDULER in sections:
            self.schedule.load_state_dict(sections[LR_SCHEDULER])
        if DATALOADER in sections:
            self.loader.load_state_dict(sections[DATALOADER])
        for name, value in sections.get(TRAIN_STATE, {}).items():
            setattr(self.progress, name, value)
        for key, state in sections.get(RNG, {}).items():
            (torch.cuda.set_rng_state if key.startswith("cuda.") else torch.set_rng_state)(state)


def _rng_state() -> dict[str, torch.Tensor]:
    """This rank's generators, as plain uint8 tensors under its own keys."""
    rank = dist.get_rank()
    states = {f"cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    return states
