"""The folder that a run writes to: created and tested before training."""

import json
import uuid
from contextlib import suppress
from pathlib import Path

from converters.common.errors import ConfigError
from converters.common.names import TEMPORARY_PREFIX
from converters.store.replace_file import replacing
from trainer.config.sections import Config
from trainer.config.show import as_json


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


def try_dump_folder(folder: Path) -> None:
    """Raise as `make_dump_folder` does; folders that it makes are removed again."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        make_dump_folder(folder)
    finally:
        for place in missing:  # the innermost first
            with suppress(OSError):
                place.rmdir()


def check_config_file(config: Config) -> None:
    """Raise ConfigError if job.save_config_file is no place for a file."""
    name, folder = config.job.save_config_file, Path(config.job.dump_folder)
    if name and not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"job.save_config_file = {name!r} leads out of job.dump_folder = {str(folder)!r}")
    if name and (folder / name).is_dir():
        raise ConfigError(f"job.save_config_file = {name!r} cannot be written: it is a folder")


def save_config(config: Config) -> None:
    """Write the merged config and its origins as JSON, if job.save_config_file asks for it, replacing the last one.

    Raises ConfigError if that cannot be written.
    """
    name, folder = config.job.save_config_file, Path(config.job.dump_folder)
    if not name:
        return
    check_config_file(config)
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(as_json(config), indent=2, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"job.save_config_file = {name!r} cannot be written: {error.strerror}") from error
