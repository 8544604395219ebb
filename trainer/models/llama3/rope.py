"""Rotary position embedding, interleaved pairs, with Llama 3.1's frequency scaling.

Frequencies and angles are fp32 on purpose, also where fp64 would be finer: the released weights were trained with
angles rounded exactly so, and at position 16k that rounding moves logits more than all other arithmetic does.

P = H/2 is the number of rotation pairs of a head.
"""

import math

import torch
from torch import Tensor, nn

from converters.families.base import ModelArgs, RopeScaling


def rope_frequencies(args: ModelArgs) -> Tensor:
    """Radians per token of each rotation pair, fp32 [P], on the CPU also inside `with torch.device("meta")`."""
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.int64, device="cpu").float() / args.head_dim
    frequencies_P = 1.0 / (args.rope_theta**exponents)
    return frequencies_P if args.rope_scaling is None else scale_frequencies(frequencies_P, args.rope_scaling)


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
        self.frequencies_P = rope_frequencies(args)

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
        return torch.stack((angles.cos(), angles.sin()), dim=self.stacked_on)


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
