"""From the path a user gives to what holds weights: a run's folder stands for its newest whole step."""

from pathlib import Path

from converters.errors import CheckpointError, list_offenders
from converters.names import DCP_METADATA
from titan_tools.console import note
from trainer.checkpoints.step_folders import list_steps, size_problem, step_folder
from trainer.config.sections import Checkpoint


def find_checkpoint(path: Path) -> Path:
    """`path` itself, or the newest whole step of a run's folder. Raises CheckpointError where no step is whole."""
    if (path / DCP_METADATA).is_file():
        return path
    run = next((folder for folder in (path, path / Checkpoint().folder) if list_steps(folder)), None)
    if run is None:
        return path
    problems = []
    for step in list_steps(run):
        folder = step_folder(run, step)
        problem = size_problem(folder)
        if not problem:
            for skipped in problems:
                note(f"skipped {skipped}")
            return folder
        problems.append(f"{folder.name}: {problem}")
    raise CheckpointError(f"no step in {run} is whole:" + list_offenders(problems))
