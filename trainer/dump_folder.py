"""The folder that a run writes to: made, and tried, before anything is computed."""

import uuid
from pathlib import Path

from converters.errors import ConfigError
from converters.names import TEMPORARY_PREFIX


def make_dump_folder(folder: Path) -> None:
    """Make the folder and write to it. Raises ConfigError at once, and not at the first checkpoint."""
    trial = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"job.dump_folder = {str(folder)!r} cannot be written to: {error.strerror}",
            tries=["--job.dump_folder FOLDER"],
        ) from error
