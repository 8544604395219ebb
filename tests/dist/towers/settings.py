"""The section [images] of the config."""

from dataclasses import dataclass
from typing import Annotated

from trainer.api import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    size: Annotated[int, Number(low=2)] = 8
    """Rows and columns of an image, an even number."""
    noise_power: float = 1.0
    """Exponent of the time at which images are between noise and themselves."""
