"""A save that came to nothing: told loudly and let pass, or the end of the run; alike on all ranks. Torch-free."""

import shutil
from collections.abc import Callable
from pathlib import Path

from converters.errors import CheckpointError
from converters.sizes import format_bytes


class SaveFailed(CheckpointError):
    """A step was not written, as all ranks know; nothing of it is left, and the next one may do better."""


class FailedSaves:
    """How many saves in a row have come to nothing, and how many may."""

    def __init__(self, folder: Path, *, at_most: int, say: Callable[[str], None]):
        self._folder, self._at_most, self._say = folder, at_most, say
        self._in_a_row = 0

    def is_fatal(self, error: BaseException) -> bool:
        """Whether the run cannot go on after this one: it is one too many, or those who write are broken."""
        return not isinstance(error, SaveFailed) or self._in_a_row >= self._at_most

    def settle(self, error: BaseException, *, num_bytes: int, last_good_step: int | None, is_final: bool) -> None:
        """Raise the error, or tell it and go on. `is_final`: the run ends here, so what was not saved is lost."""
        good = f"step {last_good_step} is whole" if last_good_step is not None else "there is no checkpoint yet"
        told = f"a checkpoint needs {format_bytes(num_bytes)}, {self._told_free()}; {good}"
        if is_final or self.is_fatal(error):
            if isinstance(error, SaveFailed):
                why = "the run's end is not saved" if is_final else f"failed saves in a row: {self._in_a_row + 1}"
                error.hint = "; ".join(filter(None, (why, told, error.hint)))
            raise error
        self._in_a_row += 1
        self._say(
            f"WARNING: a checkpoint was NOT saved: {error}\n"
            f"WARNING: {told}; failed saves in a row: {self._in_a_row}; "
            f"the training goes on, as checkpoint.max_failed_saves = {self._at_most} allows"
        )

    def forget(self) -> None:
        """A save has come to something."""
        self._in_a_row = 0

    def _told_free(self) -> str:
        place = next(p for p in (self._folder, *self._folder.absolute().parents) if p.exists())
        return f"{format_bytes(shutil.disk_usage(place).free)} are free on that disk"
