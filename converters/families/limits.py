"""The limits of a model's numbers, as metadata of the fields that hold them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """What a number of a model may be: of a `kind`, from `low` to `high`; a tuple is a list of layers."""

    kind: type
    low: float = 0
    high: float = 0


SIZE = Limits(int, 1, 2**31 - 1)
LENGTH = Limits(int, 1, 2**53)  # in tokens
FLAG = Limits(bool)
LAYERS = Limits(tuple)
FACTOR = Limits(float, 1e-6, 1e9)
NUM_EXPERTS = Limits(int, 1, 65_536)


def limited(limits: Limits, *names: str) -> dict[str, Any]:
    """Metadata of a field: the limits of a number, and its names in config.json, params.json and the like."""
    return {"limits": limits, "names": names}
