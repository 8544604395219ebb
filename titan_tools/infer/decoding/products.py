"""Attention of one new token as two matrix products, for latents: all query heads of a row share one wide key.

Of SDPA's kernels on a GPU, flash attention takes at most 256 features, and memory-efficient attention takes a latent's
576, but gives all keys of 32 query heads to one thread block: 4 of a GPU's 132 processors for V3's 128 heads. The
products are spread over all of them. Scores and their softmax are in fp32, as in those kernels.

Shape letters: B rows, N query heads, T tokens that are attended to, H features of a key.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_SCORES = 1 << 26  # of a step, twice in fp32 and once in its dtype: 640 MiB


def fits(q_B1NH: Tensor, length: int) -> bool:
    """Whether the scores of a step are few enough to be held at once."""
    return q_B1NH.shape[0] * q_B1NH.shape[2] * length <= _MOST_SCORES


def attend_by_products(
    q_BNH: Tensor, keys_BTH: Tensor, values_BTH: Tensor, bias_B1T: Tensor, scale: float | None
) -> Tensor:
    """Attention [B, N, H]; `bias_B1T` is added to the scores. `scale`: None for H ** -0.5."""
    scores_BNT = _in_fp32(q_BNH, keys_BTH.transpose(1, 2))
    scores_BNT.mul_(q_BNH.shape[-1] ** -0.5 if scale is None else scale).add_(bias_B1T)
    return torch.bmm(scores_BNT.softmax(dim=-1).to(values_BTH.dtype), values_BTH)


def _in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """A product whose sums are not rounded to 16 bits."""
    return torch.bmm(left, right) if left.dtype == torch.float32 else torch.bmm(left, right, out_dtype=torch.float32)


@cache
def can_attend_by_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend_by_products` is for this device and works: products of 16 bits with fp32 results are tried."""
    return device.type == "cuda" and _is_right(device, dtype)


def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Compare two rows of 64 wide heads, one with 3 keys and one with 500."""
    generator = torch.Generator(device).manual_seed(0)
    q_BNH, keys_BTH = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in ((2, 64, 576), (2, 512, 576))
    )
    is_seen = torch.arange(512, device=device) <= torch.tensor([[[2]], [[499]]], device=device)
    bias_B1T = torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, -torch.inf)
    try:
        found = attend_by_products(q_BNH, keys_BTH, keys_BTH, bias_B1T, None).float()
    except (RuntimeError, TypeError):  # no such product here
        return False
    keys = keys_BTH.float()
    exact = F.scaled_dot_product_attention(q_BNH.float(), keys, keys, attn_mask=is_seen)
    return bool((found - exact).abs().max() < 0.03)  # values are around 1, and have 8 bits
