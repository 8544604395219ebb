"""The state of a run that its checkpoints hold: weights, and sections of other state."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from converters.common.extensions import ExtensionError, where_defined
from converters.common.names import DATALOADER, LR_SCHEDULER, OPTIMIZER, RNG, TRAIN_STATE
from trainer.optim.lr_schedule import LRSchedule
from trainer.optim.optimizer import optimizer_state
from trainer.ranks.agree import on_each
from trainer.train_model import TrainModel


class Resumable(Protocol):
    """An object whose state is plain values: the data loader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


_SAVED_AS = {"units_seen": "ntokens_seen"}  # on disk, whatever the unit


@dataclass(slots=True)
class Progress:
    """The progress of a run: steps done, and units of progress that it was trained on, over all ranks."""

    step: int = 0
    units_seen: int = 0
    skipped_steps: int = 0  # of `step`: those without an update, under training.on_nonfinite = "skip"
    wandb_run_id: str | None = None  # saved only if there is one
    settings: str | None = None  # of the run that saves, as JSON: see trainer/job/resume.py

    def state_dict(self) -> dict[str, Any]:
        return {_SAVED_AS.get(name, name): value for name, value in asdict(self).items() if value is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved of these."""
        for name in (each.name for each in fields(self)):
            if (saved := _SAVED_AS.get(name, name)) in state:
                setattr(self, name, state[saved])


def refuse_differing(loader: Resumable, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise ExtensionError, on all ranks, if the loader's state is not the same on all of them: one is saved."""
    digests = on_each(group, lambda: {key: _digest(value) for key, value in state.items()})
    first = digests[0]
    differing = {key for each in digests for key in first | each if each.get(key) != first.get(key)}
    if differing:
        names = ", ".join(f"{DATALOADER}.{key}" for key in sorted(differing))
        raise ExtensionError(
            f"{where_defined(loader.state_dict)}: {names} differs between ranks, and a checkpoint holds one state"
            " for all",
            hint="`state_dict()` returns plain values that mean the same on any number of ranks, such as the number of"
            " samples that all ranks together have consumed",
        )


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=repr).encode())


@dataclass(frozen=True, slots=True)
class RunState:
    """The live state of a run: loading fills its tensors in place."""

    model: TrainModel
    optimizer: torch.optim.Optimizer
    schedule: LRSchedule
    loader: Resumable
    progress: Progress

    def sections(self) -> dict[str, dict[str, Any]]:
        """Everything but the weights, by section."""
        return {
            OPTIMIZER: optimizer_state(self.optimizer),
            LR_SCHEDULER: self.schedule.state_dict(),
            DATALOADER: self.loader.state_dict(),
            TRAIN_STATE: self.progress.state_dict(),
            RNG: _rng_state(),
        }

    def take(self, sections: Mapping[str, dict[str, Any]]) -> None:
        """Take the plain values and generator states that were loaded; other tensors were filled in place."""
        if LR_SCHEDULER in sections:
            self.schedule.load_state_dict(sections[LR_SCHEDULER])
        if DATALOADER in sections:
            self.loader.load_state_dict(sections[DATALOADER])
        self.progress.load_state_dict(sections.get(TRAIN_STATE, {}))
        for key, state in sections.get(RNG, {}).items():
            (torch.cuda.set_rng_state if key.startswith("cuda.") else torch.set_rng_state)(state)


def _rng_state() -> dict[str, torch.Tensor]:
    """The states of this rank's random number generators, as uint8 tensors under its own keys."""
    rank = dist.get_rank()
    states = {f"cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    return states
