"""Save, find and load the checkpoints of a run, all ranks together, with stock DCP.

A step is written to a temporary sibling folder and renamed once every byte is on disk and the manifest is written,
synchronously or asynchronously (`background.py`). No weight is changed before all ranks have agreed that every file of
a step has its CRC32.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import DATALOADER, RUN_LOCK
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.store.base import is_present
from converters.store.location import Location
from converters.store.outputs import require_space
from converters.tokenizers.assets import TOKEN_IDS
from trainer.checkpoints.background import make_saver
from trainer.checkpoints.failed_saves import FailedSaves, SaveFailed
from trainer.checkpoints.load import DamagedFiles, left_out_of_checkpoints, load_state, load_weights
from trainer.checkpoints.problems import bytes_of_state, dropout_note, export_dtype_note
from trainer.checkpoints.recorded import Recorded, first_recorded
from trainer.checkpoints.resumable import refuse_other_weights
from trainer.checkpoints.run_lock import only_run
from trainer.checkpoints.run_state import RunState, refuse_differing
from trainer.checkpoints.shared_folder import require_seen
from trainer.checkpoints.step_folders import (
    list_steps,
    no_usable_step,
    refuse_foreign,
    size_problem,
    step_folder,
    steps_to_load,
    sweep,
)
from trainer.checkpoints.write import StepToSave
from trainer.config.sections import Checkpoint as CheckpointSection
from trainer.observability.log import note
from trainer.ranks.agree import on_each, on_first
from trainer.ranks.mesh import local_part
from trainer.train_model import TrainModel


class Checkpoints:
    """The step folders of one run. All ranks make the same calls, and all raise the same errors.

    A context manager: leaving it stops asynchronous saving; after an error an unfinished save is abandoned.
    """

    def __init__(self, folder: Location, settings: CheckpointSection, info: ModelInfo, *, group: dist.ProcessGroup):
        """`group` is a gloo group of all ranks, separate from training's groups."""
        self.folder = folder
        self.last_good_step: int | None = None  # committed or verified
        self._settings = settings
        self._info = info
        self._group = group
        self._damaged: set[int] = set()
        self._saver = make_saver(settings.async_mode, group=group, on_committed=self._is_committed)
        self._failed = FailedSaves(folder, at_most=settings.max_failed_saves, say=note)
        self._needed_bytes = 0  # by the latest save
        self._is_final = False  # whether the run ends with the latest save
        self._held = ExitStack()  # the lock of a folder that was created again

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        with self._held:
            self._saver.close(at_once=kind is not None)

    def resume(self, state: RunState) -> Location | None:
        """Load `load_step`, else the newest intact step; returns it, or None if the run has no step yet.

        Damaged steps are reported and skipped. Raises CheckpointError if all steps are damaged, or if the folder
        holds other files: a run never starts from random weights by mistake.
        """

        steps = on_first(self._group, self._look)
        problems = []
        for step in steps_to_load(self.folder, steps, self._settings.load_step):
            path = step_folder(self.folder, step)
            problem = self._load_unless_damaged(path, state)
            if not problem:
                self.last_good_step = step
                if newer := [s for s in steps if s > step and s not in self._damaged]:
                    note(f"WARNING: newer steps stay in {self.folder} and are used at the next start: {newer}")
                return path
            self._damaged.add(step)
            problems.append(f"{path.name}: {problem}")
            note(
                f"WARNING: {path} is damaged and will not be used: {problem}"
                f" (if the change is intended: titan verify {path} --accept)"
            )
        if problems:
            raise no_usable_step(self.folder, problems)
        return None

    def candidates(self, initial: Location | None) -> list[Location]:
        """Checkpoints to resume from: the own steps, newest first, else `initial` if it gives the whole state."""
        settings = self._settings

        def find() -> list[Location]:
            steps = steps_to_load(self.folder, self._look(), settings.load_step) if settings.enable else []
            if not steps and initial and not settings.initial_load_model_only:
                return [initial]
            return [path for path in (step_folder(self.folder, step) for step in steps) if not size_problem(path)]

        return on_first(self._group, find)

    def recorded(self, paths: Iterable[Location], *, units_per_sample: int) -> Recorded | None:
        """The record of the first of these checkpoints whose small files can be read; `units_per_sample` now."""
        excluded = self._settings.exclude_from_loading
        return on_first(
            self._group, lambda: first_recorded(paths, excluded=excluded, units_per_sample=units_per_sample)
        )

    def _look(self) -> list[int]:
        """The run's steps, the newest first, after cleaning up what killed saves have left. For one process."""
        refuse_foreign(self.folder)
        if not self._settings.load_only:  # another run may be saving to a folder that is only loaded from
            sweep(self.folder)
        return list_steps(self.folder)

    def _load_unless_damaged(self, path: Location, state: RunState) -> str:
        """Load a step. If its files do not match the manifest, nothing is changed, and what is wrong is returned."""
        require_seen(path, self._group)
        if problem := on_first(self._group, lambda: size_problem(path)):
            return problem
        try:
            self.load(path, state)
        except DamagedFiles as error:
            return "; ".join(error.problems)
        return ""

    def load(self, path: Location, state: RunState, *, select: str | None = None) -> None:
        """Load everything from a DCP except the sections that the config excludes."""
        excluded = self._settings.exclude_from_loading
        found = load_state(path, state, info=self._info, excluded=excluded, group=self._group, select=select)
        self._keep_fields(found)

    def load_initial(self, place: Location, state: RunState) -> None:
        """Start from a checkpoint of any format: its weights, or with initial_load_model_only = false everything."""
        require_seen(place, self._group)
        if self._settings.initial_load_model_only:
            saved_info = load_weights(place, state, info=self._info, settings=self._settings, group=self._group)
            self._keep_fields(saved_info)
            if text := dropout_note(saved_info, place):
                note(text)
            if left_out := left_out_of_checkpoints(saved_info, self._info):
                note(f"not copied from {place} into this run's checkpoints: {', '.join(left_out)}")
        else:
            select = self._settings.initial_load_select
            refuse_other_weights(place, info=self._info, select=select)
            self.load(place, state, select=select)

    def _keep_fields(self, saved_info: ModelInfo) -> None:
        """Copy config.json's other fields from `saved_info` into this run's checkpoints, except the token ids."""
        fields = {key: value for key, value in saved_info.untranslated.items() if key not in TOKEN_IDS}
        self._info = replace(self._info, untranslated=fields)

    def get_ready(self, model: TrainModel) -> None:
        """Raise now what the first save would raise, and start asynchronous saving."""
        if text := export_dtype_note(self._settings):
            note(text)
        self.require_room(model)
        self._saver.open()

    def save(self, step: int, state: RunState, *, model_only: bool = False, is_final: bool = False) -> None:
        """Write a step completely or not at all, then delete steps beyond keep_latest_k. `is_final`: the run ends then.

        An asynchronous save is copied now and written later; it waits for the save before it. Failures of both are
        reported, and raised after more than max_failed_saves in a row, or if this save is the final one.
        """
        self.finish()
        self._needed_bytes = self.bytes_of_step(state.model, model_only=model_only)
        self._is_final = is_final
        weights, buffers = state.model.state_dict(), state.model.named_buffers()
        if model_only:
            nested = self._cast(weights, kept=buffers)
        else:
            sections = state.sections()
            refuse_differing(state.loader, sections[DATALOADER], self._group)
            nested = weights | sections
        damaged = frozenset(self._damaged - {step})
        keep = self._settings.keep_latest_k
        try:
            self._have_folder(state.model, model_only=model_only)
            self._saver.save(StepToSave(step, self.folder, self._info, keep=keep, damaged=damaged), nested)
        except SaveFailed as error:
            self._settle(error)

    @property
    def must_stop(self) -> bool:
        """Whether an asynchronous save has failed fatally, as far as this rank knows; the next call raises on all."""
        error = self._saver.error
        return error is not None and self._failed.is_fatal(error)

    def finish(self) -> None:
        """Wait for the current save. Its failure is reported or raised, on all ranks."""
        error = self._saver.wait()
        is_common = error is None or isinstance(error, SaveFailed)
        messages = [text for text in on_each(self._group, lambda: None if is_common else str(error)) if text]
        if messages and is_common:  # this rank's writer succeeded, another rank's is broken
            error = CheckpointError(messages[0])
        if error is not None:
            self._settle(error)

    def _settle(self, error: BaseException) -> None:
        needed, good = self._needed_bytes, self.last_good_step
        self._failed.settle(error, num_bytes=needed, last_good_step=good, is_final=self._is_final)

    def _have_folder(self, model: TrainModel, *, model_only: bool) -> None:
        """Raise SaveFailed if the disk has no room. A folder that was removed is created again, with a warning.

        The state in memory may be the only copy left, so it is saved rather than lost.
        """

        def create_again() -> bool:
            if is_present(self.folder / RUN_LOCK):
                return False
            note(f"WARNING: {self.folder} was REMOVED with its contents: it is created again, and used from now on")
            self._held.enter_context(only_run(self.folder))
            return True

        try:
            if on_first(self._group, create_again):
                self.last_good_step = None
            self.require_room(model, model_only=model_only)
        except CheckpointError as error:
            raise SaveFailed(error.message, hint=error.hint, tries=error.tries) from error

    def require_room(self, model: TrainModel, *, model_only: bool = False) -> None:
        """Raise CheckpointError if the disk has no room for a checkpoint."""
        num_bytes = self.bytes_of_step(model, model_only=model_only)
        on_first(self._group, lambda: require_space(self.folder, num_bytes))

    def bytes_of_step(self, model: TrainModel, *, model_only: bool = False) -> int:
        """Approximate size of a checkpoint: the weights and their two moments."""
        width = next(iter(model.named_parameters().values())).itemsize
        num_parameters = get_family(self._info.family).num_parameters(self._info.args)
        return (
            num_parameters * itemsize(self._settings.export_dtype)
            if model_only
            else bytes_of_state(num_parameters, width)
        )

    def _is_committed(self, step: int) -> None:
        self._damaged.discard(step)
        self._failed.forget()
        self.last_good_step = step
        note(f"saved {step_folder(self.folder, step)}")

    def _cast(self, weights: Mapping[str, torch.Tensor], *, kept: Collection[str] = ()) -> dict[str, Any]:
        """The weights, but for `kept`, in `export_dtype`. Raises CheckpointError on all ranks if one overflows."""
        dtype = getattr(torch, self._settings.export_dtype)
        narrow = {fqn: tensor if fqn in kept else tensor.to(dtype) for fqn, tensor in weights.items()}
        overflown = [fqn for fqn, tensor in narrow.items() if _has_more_infinities(tensor, weights[fqn])]
        if names := sorted({fqn for part in on_each(self._group, lambda: overflown) for fqn in part}):
            raise CheckpointError(
                f"numbers too large for checkpoint.export_dtype = {self._settings.export_dtype!r}:"
                + list_offenders(names),
                tries=["--checkpoint.export_dtype bfloat16"],
            )
        return narrow


def _has_more_infinities(cast: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool((local_part(cast).isinf() & ~local_part(tensor).isinf()).any())
