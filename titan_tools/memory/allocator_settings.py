"""The settings of torch's allocator: those that `titan train` chooses, and those that the estimate does not model."""

import os

from titan_tools.memory.replay.allocator import AllocatorName

ALLOCATOR = "PYTORCH_ALLOC_CONF"
_VARIABLES = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the first that is set counts
_IN_TRAINING = "expandable_segments:True"


def choose_allocator() -> None:
    """Have this process and its ranks use expandable segments, as torchtitan's run_train.sh, unless one is chosen.

    Torch reads the variable when it first allocates.
    """
    if not any(name in os.environ for name in _VARIABLES):
        os.environ[ALLOCATOR] = _IN_TRAINING


def allocator_of_environment() -> AllocatorName:
    """The one that `titan train` would use here: see choose_allocator. Where settings leave it open, classic."""
    return "expandable" if _settings().get("expandable_segments", "").lower() == "true" else "classic"


def unmodelled_settings() -> list[str]:
    """Settings of the environment that the replay does not follow, such as `max_split_size_mb:512`."""
    return [f"{key}:{value}" for key, value in _settings().items() if key != "expandable_segments"]


def _settings() -> dict[str, str]:
    said = next((os.environ[name] for name in _VARIABLES if name in os.environ), _IN_TRAINING)
    pairs = (pair.split(":", 1) for pair in said.split(",") if ":" in pair)
    return {key.strip(): value.strip() for key, value in pairs}
