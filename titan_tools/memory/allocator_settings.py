"""Which allocator torch would use in this environment, and which of its settings the estimate does not model."""

import os

from titan_tools.memory.replay.allocator import AllocatorName

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts


def allocator_of_environment() -> AllocatorName:
    """Expandable segments where the environment asks for them, else torch's default, classic ones."""
    return "expandable" if _settings().get("expandable_segments", "").lower() == "true" else "classic"


def unmodelled_settings() -> list[str]:
    """Settings of the environment that the replay does not follow, such as `max_split_size_mb:512`."""
    return [f"{key}:{value}" for key, value in _settings().items() if key != "expandable_segments"]


def _settings() -> dict[str, str]:
    said = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
    pairs = (pair.split(":", 1) for pair in said.split(",") if ":" in pair)
    return {key.strip(): value.strip() for key, value in pairs}
