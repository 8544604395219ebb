"""How rotary embeddings are scaled for longer sequences, as transformers names it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import log

from converters.families.limits import FACTOR, FLAG, LENGTH, Limits, limited


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's frequency scaling (`rope_type: llama3`); lengths in tokens."""

    factor: float = field(default=8.0, metadata=limited(FACTOR))
    low_freq_factor: float = field(default=1.0, metadata=limited(FACTOR))
    high_freq_factor: float = field(default=4.0, metadata=limited(FACTOR))
    original_max_position_embeddings: int = field(default=8192, metadata=limited(LENGTH))


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Every frequency divided by `factor`."""

    rope_type: str = field(default="linear", init=False)
    factor: float = field(metadata=limited(FACTOR))


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """Dynamic NTK: plain RoPE within `max_seq_len`, another theta for longer sequences, which are not covered."""

    rope_type: str = field(default="dynamic", init=False)
    factor: float = field(metadata=limited(FACTOR))


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv 2309.00071) with the names and defaults of transformers; the length in tokens.

    attention_factor None: computed from factor, mscale and mscale_all_dim.
    """

    rope_type: str = field(default="yarn", init=False)
    factor: float = field(metadata=limited(FACTOR))
    original_max_position_embeddings: int = field(metadata=limited(LENGTH))
    beta_fast: float = field(default=32.0, metadata=limited(Limits(float, 0, 1e9)))
    beta_slow: float = field(default=1.0, metadata=limited(Limits(float, 0, 1e9)))
    truncate: bool = field(default=True, metadata=limited(FLAG))
    attention_factor: float | None = field(default=None, metadata=limited(Limits(float, 0, 1e9)))
    mscale: float | None = field(default=None, metadata=limited(Limits(float, -1e9, 1e9)))
    mscale_all_dim: float | None = field(default=None, metadata=limited(Limits(float, -1e9, 1e9)))


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Equation 22 of YaRN, with the weight that DeepSeek has added."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


Scaling = RopeScaling | LinearRope | DynamicRope | YarnRope
SCALINGS: Mapping[str, type[Scaling]] = {
    "llama3": RopeScaling,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
}


def rope_type(scaling: Scaling | None) -> str:
    """Name of a scaling in transformers."""
    if scaling is None:
        return "default"
    return next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))


def describe_rope(scaling: Scaling) -> str:
    """The scaling in a message: `RoPE of type llama3 (factor 8, low_freq_factor 1, …)`, without what is not set."""
    numbers = [f"{key} {value:.10g}" for key, value in asdict(scaling).items() if isinstance(value, int | float)]
    return f"RoPE of type {rope_type(scaling)} ({', '.join(numbers)})"
