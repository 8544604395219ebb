"""The GPU that a user names: a type of the table, or so many GiB."""

from converters.errors import ConfigError
from titan_tools.memory.constants import GPUS, Gpu

DEFAULT = GPUS["h100-80"]  # whose kernels are counted where none is named


def find_gpu(text: str) -> Gpu:
    """The GPU type of that name, or one of that many usable GiB (kernels as on the default one). Raises ConfigError."""
    name = text.strip().lower().removesuffix("gb")
    alike = [gpu for gpu in GPUS if name in (gpu, gpu.split("-")[0])]
    if len(alike) == 1:
        return GPUS[alike[0]]
    if alike:
        raise ConfigError(
            f"--gpu {text!r} is the name of several types",
            hint=f"types: {', '.join(alike)}",
            tries=[f"--gpu {gpu}" for gpu in alike],
        )
    name = text.strip().lower()
    try:
        usable = float(name.removesuffix("gib"))
    except ValueError:
        usable = 0.0
    if not 0 < usable < 10_000:
        raise ConfigError(
            f"--gpu {text!r} is neither a GPU type nor a number of GiB",
            hint=f"types: {', '.join(GPUS)}",
            tries=[f"--gpu {_closest(name)}", "--gpu 47.5"],
        )
    return Gpu(f"{usable:g} GiB", usable, DEFAULT.sm, DEFAULT.cublas_mib)


def kernels_of(gpu: Gpu) -> str:
    """The type whose kernels are counted: its own, the default one's where only its GiB were named."""
    return gpu.name if gpu.name in GPUS else DEFAULT.name


def _closest(name: str) -> str:
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, GPUS, 1, cutoff=0.3)), DEFAULT.name)
