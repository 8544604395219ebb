"""Features of token positions: rotary embedding (plain, linear, dynamic NTK, Llama 3.1's scaling, YaRN), temperature.

Frequencies and angles are fp32 on purpose: the released weights were trained with angles rounded this way, and at
position 16k the rounding changes logits more than all other arithmetic.

P is the number of rotation pairs of a head: H/2, or fewer if only the last features of a head are rotated.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from converters.families.blocks import GroupedQuery, Latent, Rope, Temperature
from converters.families.rope import DynamicRope, LinearRope, RopeScaling, Scaling, YarnRope, yarn_magnitude

PositionFeatures = Sequence[Tensor]  # what layers need to know of positions, fp32: a tensor for each Rope, Temperature


def rope_frequencies(rope: Rope) -> Tensor:
    """Radians per token of each rotation pair, fp32 [P], on the CPU also inside `with torch.device("meta")`.

    The order of operations is that of transformers (modeling_rope_utils.py), for bit-equal results.
    """
    scaling = rope.scaling
    if isinstance(scaling, YarnRope):
        return _yarn_frequencies(rope, scaling)
    frequencies_P = 1.0 / (_theta(rope) ** _exponents(rope.width))
    if isinstance(scaling, LinearRope):
        return frequencies_P / scaling.factor
    return scale_frequencies(frequencies_P, scaling) if isinstance(scaling, RopeScaling) else frequencies_P


def _exponents(width: int) -> Tensor:
    return torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width


def _theta(rope: Rope) -> float:
    """theta, for dynamic NTK computed by its formula within the trained length, which rounds differently."""
    scaling, length = rope.scaling, rope.trained_length
    if not isinstance(scaling, DynamicRope):
        return rope.theta
    stretch = (scaling.factor * length / length) - (scaling.factor - 1)
    return float(rope.theta * stretch ** (rope.width / (rope.width - 2)))


def _yarn_frequencies(rope: Rope, scaling: YarnRope) -> Tensor:
    """YaRN: high frequencies are kept, low ones divided by `factor`, with a linear ramp between."""
    width = rope.width

    def pair_with(num_turns: float) -> float:
        ratio = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return (width * math.log(ratio)) / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    pairs_P = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    kept_P = 1 - torch.clamp((pairs_P - low) / (high - low), 0, 1)
    powers_P = rope.theta ** _exponents(width)
    return 1.0 / (scaling.factor * powers_P) * (1 - kept_P) + 1.0 / powers_P * kept_P


def rotation_scale(scaling: Scaling | None) -> float:
    """The factor of cosine and sine: YaRN's attention factor; 1 for all others."""
    if not isinstance(scaling, YarnRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor, mscale, mscale_all_dim = scaling.factor, scaling.mscale, scaling.mscale_all_dim
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor, 1)


def scale_frequencies(frequencies_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, linearly blended between."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies_P
    blend = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies_P / scaling.factor + blend * frequencies_P
    scaled = torch.where(wavelengths > context / scaling.low_freq_factor, frequencies_P / scaling.factor, blended)
    return torch.where(wavelengths < context / scaling.high_freq_factor, frequencies_P, scaled)


class RotaryAngles(nn.Module):
    """Cosines and sines of token positions. Has no buffers: nothing is saved, and `.to(bfloat16)` rounds nothing."""

    def __init__(self, rope: Rope):
        super().__init__()
        self.rope, self.stacked_on = rope, -1 if rope.pairs else 0  # the dim of cosine and sine
        self.frequencies_P, self.scale = rope_frequencies(rope), rotation_scale(rope.scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryAngles":
        # Called by `.to()`, `.cuda()` and `.to_empty()`. Use the new device, never the dtype, and compute the values
        # again: `.to_empty()` leaves them uninitialized.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies_P = rope_frequencies(self.rope).to(fn(self.frequencies_P).device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [L] or [B, L], any integers → rotations (cos, sin), fp32 [..., L, 1, P, 2] or [2, ..., L, 1, P].

        Real, because compilers generate no code for complex numbers. FSDP's mixed precision must not cast them.
        """
        angles = (positions.to(torch.float32).unsqueeze(-1) * self.frequencies_P).unsqueeze(-2)
        rotations = torch.stack((angles.cos(), angles.sin()), dim=self.stacked_on)
        return rotations if self.scale == 1.0 else rotations * self.scale


def rotate(x_BLNH: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of each head, in fp32, and return x's dtype. `rotations` are stacked on -1.

    Eager mode uses one complex product: real products over strided pairs are seven times slower on a CPU. Compiled
    code fuses the real ones, and does not support complex numbers.
    """
    pairs: Tensor = x_BLNH.float().unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    if torch.compiler.is_compiling():
        (first, second), (cos, sin) = pairs.unbind(-1), rotations.unbind(-1)
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotations))
    return rotated.flatten(-2).type_as(x_BLNH)


def rotate_halves(x_BLNH: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the pairs (0, P), (1, P+1), … of each head, in fp32, and return x's dtype. `rotations` are stacked on 0.

    Only the order of the pairs differs from `rotate`.
    """
    first, second = x_BLNH.float().chunk(2, dim=-1)
    cos, sin = rotations.unbind(0)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BLNH)


def rotate_first(x_BLNH: Tensor, rotations: Tensor, rope: Rope) -> Tensor:
    """Rotate the first `rope.width` features of each head."""
    turn = rotate if rope.pairs else rotate_halves
    if rope.width == x_BLNH.shape[-1]:
        return turn(x_BLNH, rotations)
    rotated, rest = x_BLNH.split([rope.width, x_BLNH.shape[-1] - rope.width], dim=-1)  # type: ignore[no-untyped-call]
    return torch.cat((turn(rotated, rotations), rest), dim=-1)


class TemperatureFactors(nn.Module):
    """Positions [L] or [B, L] → factors of q, fp32 [..., L, 1, 1]; `Temperature` has the formula.

    The order of operations is that of transformers (modeling_llama4.py), for bit-equal results.
    """

    def __init__(self, temperature: Temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, positions: Tensor) -> Tensor:
        t = self.temperature
        factors = torch.log1p(torch.floor((positions.float() + float(t.first)) / t.length)) * t.beta + 1.0
        return factors[..., None, None]


def position_features(attentions: Iterable[GroupedQuery | Latent]) -> tuple[Rope | Temperature, ...]:
    """The rotary embeddings and temperatures of layers, each once: what `Positions` computes."""
    features = (f for a in attentions for f in (a.rope, getattr(a, "temperature", None)))
    return tuple(dict.fromkeys(feature for feature in features if feature is not None))


class Positions(nn.Module):
    """Positions [L] or [B, L] → the value of each feature; see `position_features`."""

    def __init__(self, features: Iterable[Rope | Temperature]):
        super().__init__()
        self.features = nn.ModuleList(
            RotaryAngles(f) if isinstance(f, Rope) else TemperatureFactors(f) for f in features
        )

    def forward(self, positions: Tensor) -> PositionFeatures:
        return tuple(feature(positions) for feature in self.features)
