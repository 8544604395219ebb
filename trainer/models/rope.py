"""Rotary position embedding, interleaved pairs: plain, linear, dynamic NTK, Llama 3.1's scaling, and YaRN.

Frequencies and angles are fp32 on purpose: the released weights were trained with angles rounded this way, and at
position 16k the rounding changes logits more than all other arithmetic.

P is the number of rotation pairs of a head: H/2, or fewer if only the last features of a head are rotated.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from converters.families.base import DynamicRope, LinearRope, ModelArgs, RopeScaling, Scaling, YarnRope


def rope_frequencies(args: ModelArgs, width: int) -> Tensor:
    """Radians per token of each rotation pair, fp32 [P], on the CPU also inside `with torch.device("meta")`.

    `width`: rotated features of a head, 2P.
    The order of operations is that of transformers (modeling_rope_utils.py), for bit-equal results.
    """
    scaling = args.rope_scaling
    if isinstance(scaling, YarnRope):
        return _yarn_frequencies(args, scaling, width)
    frequencies_P = 1.0 / (_theta(args, width) ** _exponents(width))
    if isinstance(scaling, LinearRope):
        return frequencies_P / scaling.factor
    return scale_frequencies(frequencies_P, scaling) if isinstance(scaling, RopeScaling) else frequencies_P


def _exponents(width: int) -> Tensor:
    return torch.arange(0, width, 2, dtype=torch.int64, device="cpu").float() / width


def _theta(args: ModelArgs, width: int) -> float:
    """theta, for dynamic NTK computed by its formula within the trained length, which rounds differently."""
    scaling, length = args.rope_scaling, args.max_seq_len
    if not isinstance(scaling, DynamicRope):
        return args.rope_theta
    stretch = (scaling.factor * length / length) - (scaling.factor - 1)
    return float(args.rope_theta * stretch ** (width / (width - 2)))


def _yarn_frequencies(args: ModelArgs, scaling: YarnRope, width: int) -> Tensor:
    """YaRN: high frequencies are kept, low ones divided by `factor`, with a linear ramp between."""

    def pair_with(num_turns: float) -> float:
        ratio = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return (width * math.log(ratio)) / (2 * math.log(args.rope_theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    pairs_P = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    kept_P = 1 - torch.clamp((pairs_P - low) / (high - low), 0, 1)
    powers_P = args.rope_theta ** _exponents(width)
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


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Equation 22 of YaRN, with the weight that DeepSeek has added."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


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

    def __init__(self, args: ModelArgs, *, stacked_on: int = -1, width: int | None = None):
        """`stacked_on` is the dim of cosine and sine: -1 for interleaved pairs, 0 for halves of a head.

        `width`: rotated features of a head, by default all of them.
        """
        super().__init__()
        self.args, self.stacked_on, self.width = args, stacked_on, width or args.head_dim
        self.frequencies_P, self.scale = rope_frequencies(args, self.width), rotation_scale(args.rope_scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryAngles":
        # Called by `.to()`, `.cuda()` and `.to_empty()`. Use the new device, never the dtype, and compute the values
        # again: `.to_empty()` leaves them uninitialized.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies_P = rope_frequencies(self.args, self.width).to(fn(self.frequencies_P).device)
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
