"""Save, find and load the checkpoints of a run, all ranks together, under stock DCP.

A step is saved into a temporary sibling and renamed when every byte is on disk and the manifest, written last, agrees.
A step is loaded only after every file's CRC32 was compared and all ranks have voted, before a weight is touched.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from converters.catalog import Catalog, TensorSource
from converters.commit import require_space
from converters.engine.read import CatalogReader
from converters.errors import CheckpointError, list_offenders
from converters.families.registry import get_family
from converters.manifest import check_files, read_manifest
from converters.model_info import ModelInfo, read_model_info, says_model
from converters.names import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    RNG,
    TRAIN_STATE,
    section_of,
)
from converters.open import open_checkpoint
from converters.weights import open_native
from trainer.agree import on_each, on_first
from trainer.checkpoint_fit import refuse_misfits
from trainer.checkpoint_io import PlainPlanner, SourceReader, as_titan_error
from trainer.checkpoint_write import write_step
from trainer.config.sections import Checkpoint as CheckpointSection
from trainer.lr_schedule import LRSchedule
from trainer.metrics import note
from trainer.optim import optimizer_state
from trainer.step_folders import list_steps, refuse_foreign, retire, size_problem, step_folder, sweep
from trainer.train_model import TrainModel

_SKIPPED = f"{TRAIN_STATE}.skipped_steps"


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
    """Everything that decides how a run goes on."""

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


class Checkpoints:
    """The step folders of one run. Every method is called by all ranks alike, and raises the same on all."""

    def __init__(self, folder: Path, settings: CheckpointSection, info: ModelInfo, *, group: dist.ProcessGroup):
        """`group`: all ranks, over gloo and of its own, so that checkpoint traffic never meets the training's."""
        self.folder = folder
        self.last_good_step: int | None = None
        self._settings = settings
        self._info = info
        self._group = group
        self._damaged: set[int] = set()

    def find(self) -> Path | None:
        """The step to resume from: `load_step`, else the newest whole one; None where the run has none yet.

        A damaged step is told and passed over. Raises CheckpointError where only damaged ones are left, and where the
        folder holds something else: never random weights in silence.
        """

        def look() -> list[int]:
            refuse_foreign(self.folder)
            if not self._settings.load_only:  # then the folder is somebody else's, who may be saving to it
                sweep(self.folder)
            return list_steps(self.folder)

        steps = on_first(self._group, look)
        wanted = self._settings.load_step
        if wanted != -1 and wanted not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self.folder} has no step {wanted} to load", hint=f"steps there: {there}")
        problems = []
        for step in steps if wanted == -1 else [wanted]:
            path = step_folder(self.folder, step)
            problem = self.damage(path)
            if not problem:
                self.last_good_step = step
                if newer := [s for s in steps if s > step and s not in self._damaged]:
                    note(f"WARNING: newer steps stay in {self.folder} and come first at the next start: {newer}")
                return path
            self._damaged.add(step)
            problems.append(f"{path.name}: {problem}")
            note(f"WARNING: {path} is damaged and will not be used: {problem}")
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used:" + list_offenders(problems),
                hint="nothing was loaded; a folder without a manifest may come from another tool",
                tries=["--checkpoint.folder NEW_FOLDER --checkpoint.initial_load_path OTHER_CHECKPOINT"],
            )
        return None

    def damage(self, path: Path) -> str:
        """What is wrong with a step's files; empty when each has its CRC32 of the manifest. Ranks share the work."""
        return on_first(self._group, lambda: size_problem(path)) or self._changed_files(path)

    def _changed_files(self, path: Path) -> str:
        """Compare every file of a manifest with its CRC32, ranks sharing the files."""
        rank, world = self._group.rank(), self._group.size()

        def check_share() -> list[str]:
            manifest = read_manifest(path)
            return check_files(path, names=sorted(manifest.files)[rank::world]) if manifest else []

        return "; ".join(problem for share in on_each(self._group, check_share) for problem in share)

    def _refuse_damaged(self, catalog: Catalog) -> None:
        """For initial checkpoints: by the CRC32s of a manifest, and where none speaks for a file by its items' own.

        A pass of its own, although the load reads the bytes again: a rank that met damage while loading would stop with
        half of its weights copied in, and others with all of theirs. Here all ranks vote before the first copy.
        """
        rank, world, path = self._group.rank(), self._group.size(), catalog.root
        listed = on_first(self._group, lambda: _listed_files(path))
        unlisted = sorted(fqn for fqn, t in catalog.tensors.items() if not {chunk.file for chunk in t.chunks} <= listed)

        def check_share() -> list[str]:
            with CatalogReader(catalog) as reader:
                return [problem for fqn in unlisted[rank::world] for problem in reader.record_problems(fqn)]

        changed = self._changed_files(path) if listed else ""
        problems = [changed] if changed else [p for share in on_each(self._group, check_share) for p in share]
        if problems:
            raise CheckpointError(f"{path} is damaged:" + list_offenders(problems), tries=[f"titan verify {path}"])

    def load(self, path: Path, state: RunState) -> None:
        """Take everything from a DCP, but the sections that the config excludes."""
        catalog = open_checkpoint(path)
        if catalog.container != "dcp":
            raise CheckpointError(
                f"{path} holds weights only ({catalog.container}), and the run's whole state was asked for",
                tries=["--checkpoint.initial_load_model_only"],
            )
        if says_model(path):  # torchtitan's own do not
            self._refuse_other_model(read_model_info(path, catalog), path)
        excluded = set(self._settings.exclude_from_loading)
        wanted = dict(state.model.state_dict())
        for section, values in state.sections().items():
            if section in excluded:
                note(f"not loaded from {path}: {section}")
                continue
            wanted |= {f"{section}.{key}": value for key, value in values.items() if _is_loaded(section, key)}
        has_rng = self._has_rng_of_each_rank(catalog.tensors)
        # and of a device that was not there then there is no state
        wanted = {k: v for k, v in wanted.items() if section_of(k) != RNG or (has_rng and k in catalog.tensors)}
        if _SKIPPED not in catalog.blobs and _SKIPPED not in catalog.tensors:  # older checkpoints', and torchtitan's
            wanted.pop(_SKIPPED, None)
        with CatalogReader(catalog) as reader:
            loaded = self._load(wanted, reader, catalog.blobs, reader.read_blob, path=path, may_cast=False)
        sections: dict[str, dict[str, Any]] = {}
        for key, value in loaded.items():
            sections.setdefault(section_of(key), {})[key.partition(".")[2]] = value
        if LR_SCHEDULER in sections:
            state.schedule.load_state_dict(sections[LR_SCHEDULER])
        if DATALOADER in sections:
            state.loader.load_state_dict(sections[DATALOADER])
        if TRAIN_STATE in sections:
            for name, value in sections[TRAIN_STATE].items():
                setattr(state.progress, name, value)
        if RNG in sections:
            _set_rng_state(sections[RNG])

    def load_initial(self, path: Path, state: RunState) -> None:
        """Begin from a checkpoint of any format: its weights, or, if the config says so, everything in it.

        Each rank reads only the boxes that it holds. The weights' dtype may be another floating one; it is cast.
        """
        with open_native(path, otherwise=self._info) as weights:
            self._refuse_damaged(weights.catalog)
            self._refuse_other_model(weights.info, path)
            if self._settings.initial_load_model_only:
                self._load(state.model.state_dict(), weights.source, {}, _no_blob, path=path, may_cast=True)
                return
        self.load(path, state)

    def save(self, step: int, state: RunState, *, model_only: bool = False) -> Path:
        """Write a step, whole or not at all, then let go of those beyond keep_latest_k."""
        self.require_room(state.model, model_only=model_only)
        destination = step_folder(self.folder, step)
        nested = dict(state.model.state_dict()) | ({} if model_only else state.sections())
        write_step(destination, nested, info=self._info, group=self._group)
        self._damaged.discard(step)
        self.last_good_step = step
        keep = self._settings.keep_latest_k
        if keep:
            on_first(self._group, lambda: retire(self.folder, keep=keep, newest=step, damaged=self._damaged))
        return destination

    def require_room(self, model: TrainModel, *, model_only: bool = False) -> None:
        """Raise CheckpointError where the disk has no room for a checkpoint: the weights, and two moments of each."""
        itemsize = next(iter(model.named_parameters().values())).itemsize
        num_parameters = get_family(self._info.family).num_parameters(self._info.args)
        num_bytes = num_parameters * itemsize * (1 if model_only else 3)
        on_first(self._group, lambda: require_space(self.folder, num_bytes))

    def _refuse_other_model(self, found: ModelInfo, path: Path) -> None:
        """Numbers that leave no trace in the shapes, such as rope_theta, are compared too."""
        theirs, ours = asdict(found.args), asdict(self._info.args)
        problems = [
            f"{name}: {theirs[name]} in the checkpoint, {ours[name]} in the config"
            for name in ours
            if theirs[name] != ours[name] and name != "max_seq_len"  # says how far a model may look, not what it is
        ]
        if found.family != self._info.family:
            problems.insert(0, f"family: {found.family} in the checkpoint, {self._info.family} in the config")
        if problems:
            raise CheckpointError(
                f"{path} is of another model than the config names:" + list_offenders(problems),
                tries=["--model.name FAMILY --model.flavor FLAVOR; `titan models` lists them"],
            )

    def _has_rng_of_each_rank(self, tensors: Mapping[str, Any]) -> bool:
        num_saved = sum(key.startswith(f"{RNG}.cpu.") for key in tensors)
        if num_saved and num_saved != self._group.size():
            note(f"random number states of {num_saved} ranks do not fit {self._group.size()} ranks: seeded anew")
        return num_saved == self._group.size()

    def _load(
        self,
        wanted: Mapping[str, Any],
        source: TensorSource,
        blobs: Mapping[str, Any],
        read_blob: Callable[[str], bytes],
        *,
        path: Path,
        may_cast: bool,
    ) -> dict[str, Any]:
        """Fill the tensors of a flat state dict and return it with its plain values replaced."""
        refuse_misfits(wanted, source.tensors, blobs, group=self._group, path=path, may_cast=may_cast)
        loaded = dict(wanted)
        reader = SourceReader(source, blobs=blobs, read_blob=read_blob)
        try:
            dcp.load(loaded, storage_reader=reader, planner=PlainPlanner(), process_group=self._group)
        except CheckpointException as error:
            raise as_titan_error(f"cannot load {path}", error) from error
        return loaded


def _listed_files(path: Path) -> set[str]:
    """The files that a manifest speaks for: none where there is no manifest, as in other tools' checkpoints."""
    manifest = read_manifest(path) if path.is_dir() else None
    return set(manifest.files) if manifest else set()


def _is_loaded(section: str, key: str) -> bool:
    """The optimizer's settings come from the config, so that a changed one counts; saved, they are for other tools."""
    if section == RNG:
        return key.rpartition(".")[2] == str(dist.get_rank())
    return not (section == OPTIMIZER and key.startswith("param_groups."))


def _rng_state() -> dict[str, torch.Tensor]:
    """This rank's generators, as plain uint8 tensors under its own keys."""
    rank = dist.get_rank()
    states = {f"cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def _set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    for key, state in states.items():
        (torch.cuda.set_rng_state if key.startswith("cuda.") else torch.set_rng_state)(state)


def _no_blob(fqn: str) -> bytes:
    raise AssertionError(f"{fqn}: weights are tensors")
