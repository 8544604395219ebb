"""Rotary position embedding, interleaved pairs: plain, linear, dynamic NTK, Llama 3.1's scaling, and YaRN.

Frequencies and angles are fp32 on purpose, also where fp64 would be finer: the released weights were trained with
angles rounded exactly so, and at position 16k that rounding moves logits more than all other arithmetic does.

P = H/2 is the number of rotation pairs of a head.
"""

import math

import torch
from torch import Tensor, nn

from converters.families.base import DynamicRope, LinearRope, ModelArgs, RopeScaling, Scaling, YarnRope


def rope_frequencies(args: ModelArgs) -> Tensor:
    """Radians per token of each rotation pair, fp32 [P], on the CPU also inside `with torch.device("meta")`.

    In the order of operations of transformers (modeling_rope_utils.py), so that every bit is the same.
    """
    scaling = args.rope_scaling
    if isinstance(scaling, YarnRope):
        return _yarn_frequencies(args, scaling)
    frequencies_P = 1.0 / (_theta(args) ** _exponents(args))
    if isinstance(scaling, LinearRope):
        return frequencies_P / scaling.factor
    return scale_frequencies(frequencies_P, scaling) if isinstance(scaling, RopeScaling) else frequencies_P


def _exponents(args: ModelArgs) -> Tensor:
    return torch.arange(0, args.head_dim, 2, dtype=torch.int64, device="cpu").float() / args.head_dim


def _theta(args: ModelArgs) -> float:
    """Dynamic NTK's within the trained length: rounding aside, it is theta itself."""
    scaling, length = args.rope_scaling, args.max_seq_len
    if not isinstance(scaling, DynamicRope):
        return args.rope_theta
    stretch = (scaling.factor * length / length) - (scaling.factor - 1)
    return args.rope_theta * stretch ** (args.head_dim / (args.head_dim - 2))


def _yarn_frequencies(args: ModelArgs, scaling: YarnRope) -> Tensor:
    """Pairs that turn often within the original length stay, rare ones are slowed by `factor`; a ramp between them."""

    def pair_with(num_turns: float) -> float:
        turned = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return (args.head_dim * math.log(turned)) / (2 * math.log(args.rope_theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, args.head_dim - 1)
    if low == high:
        high += 0.001
    pairs_P = torch.arange(args.head_dim // 2, dtype=torch.float32, device="cpu")
    kept_P = 1 - torch.clamp((pairs_P - low) / (high - low), 0, 1)
    powers_P = args.rope_theta ** _exponents(args)
    return 1.0 / (scaling.factor * powers_P) * (1 - kept_P) + 1.0 / powers_P * kept_P


def rotation_scale(scaling: Scaling | None) -> float:
    """What cosine and sine are multiplied by: YaRN's attention factor; 1 for all others."""
    if not isinstance(scaling, YarnRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor, mscale, mscale_all_dim = scaling.factor, scaling.mscale, scaling.mscale_all_dim
    if mscale and mscale_all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, 1)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def scale_frequencies(frequencies_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones stay, between them a linear blend (fp32)."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies_P
    blend = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies_P / scaling.factor + blend * frequencies_P
    scaled = torch.where(wavelengths > context / scaling.low_freq_factor, frequencies_P / scaling.factor, blended)
    return torch.where(wavelengths < context / scaling.high_freq_factor, frequencies_P, scaled)


class RotaryAngles(nn.Module):
    """Positions → rotations. Holds no buffer: nothing to save, and `.to(bfloat16)` has nothing to round."""

    def __init__(self, args: ModelArgs, *, stacked_on: int = -1):
        """`stacked_on`: the dim of cosine and sine, -1 to turn pairs of neighbours, 0 to turn halves of a head."""
        super().__init__()
        self.args, self.stacked_on = args, stacked_on
        self.frequencies_P, self.scale = rope_frequencies(args), rotation_scale(args.rope_scaling)

    def _apply(self, fn, recurse=True):
        # `.to()`, `.cuda()`, `.to_empty()` all come through here. Take over the device, never the dtype, and compute
        # the values anew, because `.to_empty()` leaves garbage and the meta device forgets them.
        super()._apply(fn, recurse)
        self.frequencies_P = rope_frequencies(self.args).to(fn(self.frequencies_P).device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [L] or [B, L], any integers → turns, fp32 [..., L, 1, P, 2] or [2, ..., L, 1, P]: cos, sin.

        Real, because compilers generate no code for complex numbers. FSDP's mixed precision must leave them alone.
        """
        angles = (positions.to(torch.float32).unsqueeze(-1) * self.frequencies_P).unsqueeze(-2)
        turns = torch.stack((angles.cos(), angles.sin()), dim=self.stacked_on)
        return turns if self.scale == 1.0 else turns * self.scale


def rotate(x_BLNH: Tensor, turns: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of each head, in fp32, and return x's dtype. `turns` are stacked on -1.

    One complex product where operations run one by one: over strided pairs, real ones take seven times as long on a
    CPU. A compiler fuses those, and has nothing for complex ones.
    """
    pairs = x_BLNH.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        (first, second), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
    return turned.flatten(-2).type_as(x_BLNH)
