"""Failed saves: a warning while few fail in a row, then an error; the same on all ranks. Torch-free."""

from collections.abc import Callable

from converters.common.errors import CheckpointError
from converters.common.sizes import format_bytes
from converters.store.location import Place, locate
from converters.store.outputs import outputs_at


class SaveFailed(CheckpointError):
    """A step was not written, on all ranks; nothing of it is left, and a later save may succeed."""


class FailedSaves:
    """Counts failed saves in a row; more than `at_most` are fatal."""

    def __init__(self, folder: Place, *, at_most: int, say: Callable[[str], None]):
        self._folder, self._at_most, self._say = locate(folder), at_most, say
        self._in_a_row = 0

    def is_fatal(self, error: BaseException) -> bool:
        """Whether the run must end after this error: too many failures in a row, or a broken writer."""
        return not isinstance(error, SaveFailed) or self._in_a_row >= self._at_most

    def settle(self, error: BaseException, *, num_bytes: int, last_good_step: int | None, is_final: bool) -> None:
        """Raise the error, or print a warning. `is_final`: the run ends here, so what was not saved would be lost."""
        good = f"step {last_good_step} is complete" if last_good_step is not None else "there is no checkpoint yet"
        state = f"a checkpoint needs {format_bytes(num_bytes)}, {self._free_space()}; {good}"
        if is_final or self.is_fatal(error):
            if isinstance(error, SaveFailed):
                why = "the end of the run was not saved" if is_final else f"failed saves in a row: {self._in_a_row + 1}"
                error.hint = "; ".join(filter(None, (why, state, error.hint)))
            raise error
        self._in_a_row += 1
        self._say(
            f"WARNING: a checkpoint was NOT saved: {error}\n"
            f"WARNING: {state}; failed saves in a row: {self._in_a_row}; "
            f"training continues, as checkpoint.max_failed_saves = {self._at_most} allows"
        )

    def forget(self) -> None:
        """A save succeeded."""
        self._in_a_row = 0

    def _free_space(self) -> str:
        try:
            return f"{format_bytes(outputs_at(self._folder).free_bytes(self._folder))} are free on that disk"
        except CheckpointError as error:
            return error.message
