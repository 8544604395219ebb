"""Settings of torch's allocator: what `titan train` sets, and what the estimate does not model."""

import os

from titan_tools.memory.replay.allocator import AllocatorName

ALLOCATOR = "PYTORCH_ALLOC_CONF"
_VARIABLES = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the first one that is set applies
_IN_TRAINING = "expandable_segments:True"


def choose_allocator() -> None:
    """Use expandable segments in this process and its ranks, as torchtitan's run_train.sh, unless the user set one.

    Torch reads the variable when it first allocates.
    """
    if not any(name in os.environ for name in _VARIABLES):
        os.environ[ALLOCATOR] = _IN_TRAINING


def allocator_of_environment() -> AllocatorName:
    """The allocator that `titan train` would use here: see choose_allocator. Classic if the variable does not say."""
    return "expandable" if _settings().get("expandable_segments", "").lower() == "true" else "classic"


def unmodelled_settings() -> list[str]:
    """Settings in the environment that the replay does not model, such as `max_split_size_mb:512`."""
    return [f"{key}:{value}" for key, value in _settings().items() if key != "expandable_segments"]


def _settings() -> dict[str, str]:
    value = next((os.environ[name] for name in _VARIABLES if name in os.environ), _IN_TRAINING)
    pairs = (pair.split(":", 1) for pair in value.split(",") if ":" in pair)
    return {key.strip(): setting.strip() for key, setting in pairs}
