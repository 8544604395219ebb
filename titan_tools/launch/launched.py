"""Whether titan started this process, as a rank. It imports nothing of `trainer`: __main__.py checks that first."""

import os

PARENT_PID = "TITAN_LAUNCH"  # set for ranks of `run_ranks`, whose parent reports their errors: its process id

STEP_DONE = "TITAN_STEP_DONE"  # names a file in which rank 0 says, from the first step on, what ending now loses


def started_by_titan() -> bool:
    """True on a rank of `run_ranks`: the parent has done all checks that are needed only once."""
    return bool(os.environ.get(PARENT_PID))


def has_all_ranks() -> bool:
    """True on a rank of `run_ranks` if the parent started all ranks of the job, and so has described the run."""
    return started_by_titan() and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
