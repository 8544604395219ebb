"""The distributions that first weights are drawn from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal around 0; values beyond `cut` standard deviations are drawn again."""

    std: float
    cut: float | None = None


Spread = Constant | Normal
