"""Save, find and load the checkpoints of a run, all ranks together, under stock DCP.

A step is saved into a temporary sibling and renamed when every byte is on disk and the manifest, written last, agrees:
at once, or beside the training (`background.py`). A step is loaded only after every file's CRC32 was compared and
all ranks have voted, before a weight is touched.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converters.assets import TOKEN_IDS
from converters.commit import require_space
from converters.dtypes import itemsize
from converters.errors import CheckpointError, list_offenders
from converters.families.registry import get_family
from converters.model_info import ModelInfo
from trainer.agree import on_each, on_first
from trainer.checkpoints.background import make_saver
from trainer.checkpoints.failed_saves import FailedSaves, SaveFailed
from trainer.checkpoints.load import changed_files, load_state, load_weights, not_carried, refuse_damaged
from trainer.checkpoints.problems import idle_dropout, idle_export_dtype
from trainer.checkpoints.run_lock import only_run
from trainer.checkpoints.run_state import RunState
from trainer.checkpoints.step_folders import list_steps, refuse_foreign, size_problem, step_folder, sweep
from trainer.checkpoints.write import StepToSave
from trainer.config.sections import Checkpoint as CheckpointSection
from trainer.mesh import local_part
from trainer.observability.log import note
from trainer.train_model import TrainModel


class Checkpoints:
    """The step folders of one run. Every method is called by all ranks alike, and raises the same on all.

    A context manager: leaving it ends what saves beside the training, and with an error what is not yet saved.
    """

    def __init__(self, folder: Path, settings: CheckpointSection, info: ModelInfo, *, group: dist.ProcessGroup):
        """`group`: all ranks, over gloo and of its own, so that checkpoint traffic never meets the training's."""
        self.folder = folder
        self.last_good_step: int | None = None  # committed, or found whole
        self._settings = settings
        self._info = info
        self._group = group
        self._damaged: set[int] = set()
        self._saver = make_saver(settings.async_mode, group=group, on_committed=self._is_committed)
        self._failed = FailedSaves(folder, at_most=settings.max_failed_saves, say=note)
        self._needed_bytes = 0  # by the save that was begun last
        self._is_final = False  # that one: the run ends with it
        self._held = ExitStack()  # the lock of a folder that was made anew

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        with self._held:
            self._saver.close(at_once=kind is not None)

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
            note(
                f"WARNING: {path} is damaged and will not be used: {problem}"
                f" (if it was changed on purpose: titan verify {path} --accept)"
            )
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used:" + list_offenders(problems),
                hint="nothing was loaded; a folder without a manifest may come from another tool",
                tries=["--checkpoint.folder NEW_FOLDER --checkpoint.initial_load_path OTHER_CHECKPOINT"],
            )
        return None

    def damage(self, path: Path) -> str:
        """What is wrong with a step's files; empty when each has its CRC32 of the manifest. Ranks share the work."""
        return on_first(self._group, lambda: size_problem(path)) or changed_files(path, self._group)

    def load(self, path: Path, state: RunState) -> None:
        """Take everything from a DCP, but the sections that the config excludes."""
        excluded = self._settings.exclude_from_loading
        self._keep_fields(load_state(path, state, info=self._info, excluded=excluded, group=self._group))

    def load_initial(self, path: Path, state: RunState) -> None:
        """Begin from a checkpoint of any format: its weights, or, if the config says so, everything in it."""
        if self._settings.initial_load_model_only:
            only_hf = self._settings.initial_load_in_hf
            found = load_weights(path, state, info=self._info, only_hf=only_hf, group=self._group)
            self._keep_fields(found)
            if told := idle_dropout(found, path):
                note(told)
            if left := not_carried(found, self._info):
                note(f"not carried from {path} into this run's checkpoints: {', '.join(left)}")
        else:
            refuse_damaged(path, info=self._info, group=self._group)
            self.load(path, state)

    def _keep_fields(self, found: ModelInfo) -> None:
        """Have this run's checkpoints carry config.json's other fields, as `found` says them, but for the token ids."""
        fields = {key: value for key, value in found.untranslated.items() if key not in TOKEN_IDS}
        self._info = replace(self._info, untranslated=fields)

    def get_ready(self, model: TrainModel) -> None:
        """Raise now what the first save would raise, and start what saves beside the training."""
        if told := idle_export_dtype(self._settings):
            note(told)
        self.require_room(model)
        self._saver.open()

    def save(self, step: int, state: RunState, *, model_only: bool = False, is_final: bool = False) -> None:
        """Write a step, whole or not at all, then let go of those beyond keep_latest_k. `is_final`: the run's last.

        Beside the training it is copied now and written later, once the save before it is done. What went wrong, with
        either, is told, and raised where it is one failure too many; in a final one, any is.
        """
        self.finish()
        self._needed_bytes = self.bytes_of_step(state.model, model_only=model_only)
        self._is_final = is_final
        weights = state.model.state_dict()
        nested = self._cast(weights) if model_only else dict(weights) | state.sections()
        damaged = frozenset(self._damaged - {step})
        keep = self._settings.keep_latest_k
        try:
            self._have_folder(state.model, model_only=model_only)
            self._saver.save(StepToSave(step, self.folder, self._info, keep=keep, damaged=damaged), nested)
        except SaveFailed as error:
            self._settle(error)

    @property
    def must_stop(self) -> bool:
        """Whether a save beside the training has come to nothing that none may, as far as this rank knows.

        The next call raises, on all ranks.
        """
        error = self._saver.error
        return error is not None and self._failed.is_fatal(error)

    def finish(self) -> None:
        """Wait for the save under way. What went wrong with it is told, or raised, on all ranks."""
        error = self._saver.wait()
        is_common = error is None or isinstance(error, SaveFailed)
        troubles = [told for told in on_each(self._group, lambda: None if is_common else str(error)) if told]
        if troubles and is_common:  # this rank's writer has done its part, but another rank has none any more
            error = CheckpointError(troubles[0])
        if error is not None:
            self._settle(error)

    def _settle(self, error: BaseException) -> None:
        needed, good = self._needed_bytes, self.last_good_step
        self._failed.settle(error, num_bytes=needed, last_good_step=good, is_final=self._is_final)

    def _have_folder(self, model: TrainModel, *, model_only: bool) -> None:
        """Raise SaveFailed where the disk has no room. A folder that was removed meanwhile is made anew, and told.

        The state in memory may be the only one that is left then, so it is saved rather than lost.
        """

        def make_anew() -> bool:
            if self.folder.is_dir():
                return False
            note(f"WARNING: {self.folder} is GONE, and what it held: it is made anew, and saved to from now on")
            self._held.enter_context(only_run(self.folder))
            return True

        try:
            if on_first(self._group, make_anew):
                self.last_good_step = None
            self.require_room(model, model_only=model_only)
        except CheckpointError as error:
            raise SaveFailed(error.message, hint=error.hint, tries=error.tries) from error

    def require_room(self, model: TrainModel, *, model_only: bool = False) -> None:
        """Raise CheckpointError where the disk has no room for a checkpoint."""
        num_bytes = self.bytes_of_step(model, model_only=model_only)
        on_first(self._group, lambda: require_space(self.folder, num_bytes))

    def bytes_of_step(self, model: TrainModel, *, model_only: bool = False) -> int:
        """What a checkpoint takes, but for what is small: the weights, and two moments of each."""
        width = next(iter(model.named_parameters().values())).itemsize
        num_parameters = get_family(self._info.family).num_parameters(self._info.args)
        return num_parameters * (itemsize(self._settings.export_dtype) if model_only else 3 * width)

    def _is_committed(self, step: int) -> None:
        self._damaged.discard(step)
        self._failed.forget()
        self.last_good_step = step
        note(f"saved {step_folder(self.folder, step)}")

    def _cast(self, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The weights in `export_dtype`. Raises CheckpointError where a number becomes infinite, on every rank."""
        dtype = getattr(torch, self._settings.export_dtype)
        narrow = {fqn: tensor.to(dtype) for fqn, tensor in weights.items()}
        overflown = [fqn for fqn, tensor in narrow.items() if _has_more_infinities(tensor, weights[fqn])]
        if told := sorted({fqn for part in on_each(self._group, lambda: overflown) for fqn in part}):
            raise CheckpointError(
                f"numbers too large for checkpoint.export_dtype = {self._settings.export_dtype!r}:"
                + list_offenders(told),
                tries=["--checkpoint.export_dtype bfloat16"],
            )
        return narrow


def _has_more_infinities(cast: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool((local_part(cast).isinf() & ~local_part(tensor).isinf()).any())
