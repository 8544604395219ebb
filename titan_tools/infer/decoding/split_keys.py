"""Flash-decoding (split-KV) on an NVIDIA GPU: in recorded steps a row's keys are dealt to many blocks of threads.

What `scaled_dot_product_attention` has for a masked step gives all keys of a KV head to one block: of one row with 8 KV
heads, 8 of a GPU's 132 processors would read the cache. Flash attention can split them, and of sequences packed behind
each other it takes the number of keys from a tensor, as a CUDA graph needs it; then nothing is masked either.

torch 2.13's public way to it, torch.nn.attention.varlen.varlen_attn, calls the same operator and fills a tensor of its
own in every layer, a launch that decoding has no use for; 2.11's cannot be told the number of keys.

Shape letters as in cache.py.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_CAPABILITY = (8, 0)  # of flash attention
_MOST_HEAD_DIM, _HEAD_DIM_MULTIPLE = 256, 8


class SplitKeys:
    """What a step of `num` rows looks at, each of them `room` tokens of the cache, of which at most `length` count."""

    def __init__(self, *, num: int, length: int, room: int, device: torch.device):
        self.num, self.length = num, length
        self.first_query = torch.arange(num + 1, dtype=torch.int32, device=device)
        self.first_key = self.first_query * room
        self.num_keys_B: Tensor | None = None

    def begin(self, positions_B1: Tensor) -> None:
        self.num_keys_B = positions_B1[:, 0].int() + 1

    def attend(self, q_B1NH: Tensor, keys_RKTH: Tensor, values_RKTH: Tensor) -> Tensor:
        """`keys_RKTH` and `values_RKTH` lie token by token, as `attach_cache` makes them on a GPU; all of them."""
        keys, values = (kept[: self.num].transpose(1, 2).flatten(0, 1) for kept in (keys_RKTH, values_RKTH))
        out_BNH = torch.ops.aten._flash_attention_forward(
            q_B1NH[:, 0], keys, values, self.first_query, self.first_key, 1, self.length, 0.0, False, False,
            seqused_k=self.num_keys_B,
        )[0]  # fmt: skip
        return out_BNH[:, None]


@cache
def can_split(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether it is right here: tried on a few keys, because the operator is private to torch (as in 2.11 and 2.13)."""
    if device.type != "cuda" or torch.version.hip or dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_dim > _MOST_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return False
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    try:
        return all(_is_right(device, dtype, head_dim, num_heads=num_heads) for num_heads in (2, 8))
    except (AttributeError, RuntimeError, TypeError):  # no such operator, not on this GPU, other arguments
        return False


def _is_right(device: torch.device, dtype: torch.dtype, head_dim: int, *, num_heads: int) -> bool:
    """Two rows of two KV heads: one of 3 keys, one of as many as are split."""
    generator = torch.Generator(device).manual_seed(0)
    q_B1NH, keys_RTKH, values_RTKH = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape in ((2, 1, num_heads, head_dim), (2, 640, 2, head_dim), (2, 640, 2, head_dim))
    )
    keys, values = keys_RTKH.transpose(1, 2), values_RTKH.transpose(1, 2)
    positions_B1 = torch.tensor([[2], [500]], device=device)
    key_range = SplitKeys(num=2, length=512, room=640, device=device)
    key_range.begin(positions_B1)
    found = key_range.attend(q_B1NH, keys, values).float()
    mask_B11T = (torch.arange(640, device=device) <= positions_B1)[:, None, None]
    exact = F.scaled_dot_product_attention(
        q_B1NH.float().transpose(1, 2), keys.float(), values.float(), attn_mask=mask_B11T, enable_gqa=True
    )
    return bool((found - exact.transpose(1, 2)).abs().max() < 0.03)  # values are around 1, and have 8 bits
