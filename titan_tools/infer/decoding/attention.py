"""Attention of new tokens to cached ones, with and without sinks: which kernel of torch computes it.

A sink is the score of one more key, whose value is 0. A softmax over the other keys is multiplied by its own share,
sigmoid(lse - sink), where lse is the logarithm of the sum of their exponentials.

Shape letters as in cache.py; X heads and Y queries of any grouping.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_SCORES = 1 << 26  # computed at a time where no kernel has sinks
_LEAST_CAPABILITY = (8, 0)  # of flash attention
_MOST_HEAD_DIM, _HEAD_DIM_MULTIPLE = 256, 8
NOT_HERE = (AttributeError, RuntimeError, TypeError)  # operator missing, unsupported device, other arguments


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Restrict attention on a GPU to other kernels than cuDNN's.

    That one makes a plan for every new length, and on Blackwell it may be wrong for fewer than 8 KV heads
    (pytorch#193893).
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def copies_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a prefill copies a key/value head for each query head that shares it.

    Of a GPU's kernels only flash attention takes shared heads, and it takes no fp32. The others would hold the scores
    of all heads at once: 8 GiB for 32 heads, 2048 queries and 32k keys.
    """
    return device_type == "cuda" and dtype == torch.float32


def bias_of(last: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """0 up to the `last` column that a query sees, else -inf, in attention's dtype.

    Each layer would convert a boolean mask to this.
    """
    hidden = columns > last.view(-1, 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attend_one(
    q_B1NH: Tensor,
    keys_BKTH: Tensor,
    values_BKTH: Tensor,
    *,
    bias_B11T: Tensor | None,
    scale: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """One new token of each row: out_B1NH."""
    # The G query heads of a KV head are passed as query positions: no key is copied G times
    q_BKGH = q_B1NH.reshape(*keys_BKTH.shape[:2], -1, q_B1NH.shape[-1])
    if sinks_N is not None:
        sinks_1KG = sinks_N.view(1, *q_BKGH.shape[1:3])
        out_BKGH = with_sinks(q_BKGH, keys_BKTH, values_BKTH, sinks_1KG, bias=bias_B11T, scale=scale)
    else:
        out_BKGH = F.scaled_dot_product_attention(q_BKGH, keys_BKTH, values_BKTH, attn_mask=bias_B11T, scale=scale)
    return out_BKGH.reshape(q_B1NH.shape)


def with_sinks(
    q_BXYH: Tensor,
    keys_BXTH: Tensor,
    values_BXTH: Tensor,
    sinks_BXY: Tensor,
    *,
    bias: Tensor | None,
    is_causal: bool = False,
    scale: float | None,
) -> Tensor:
    """Attention with sinks, which are broadcast to every query; keys of fewer heads are shared by equally many."""
    # torch's compiler would trace the trial itself
    if q_BXYH.device.type == "cpu" and (torch.compiler.is_compiling() or has_sums_on_cpu(q_BXYH.dtype)):
        out_BXYH, lse_BXY = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BXYH, keys_BXTH, values_BXTH, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return with_share(out_BXYH, lse_BXY, sinks_BXY)
    return _exact_with_sinks(q_BXYH, keys_BXTH, values_BXTH, sinks_BXY, bias=bias, is_causal=is_causal, scale=scale)


def with_share(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output multiplied by the share of the softmax that the sink leaves; `lse` and `sinks` lack its last dim."""
    return (out.float() * torch.sigmoid(lse - sinks.float()).unsqueeze(-1)).to(out.dtype)


def _exact_with_sinks(
    q_BXYH: Tensor,
    keys_BXTH: Tensor,
    values_BXTH: Tensor,
    sinks_BXY: Tensor,
    *,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Without a kernel that returns sums: scores in fp32, of some queries at a time."""
    num_queries, num_keys = q_BXYH.shape[2], keys_BXTH.shape[2]
    grouping = q_BXYH.shape[1] // keys_BXTH.shape[1]
    keys, values = (x.repeat_interleave(grouping, dim=1).float() for x in (keys_BXTH, values_BXTH))
    if is_causal:
        places = torch.arange(num_keys, device=keys.device)
        bias = bias_of(places[:num_queries], places, torch.float32)
    factor = scale if scale is not None else q_BXYH.shape[-1] ** -0.5
    step = max(1, _SCORES // (q_BXYH.shape[0] * q_BXYH.shape[1] * num_keys))
    parts = []
    for start in range(0, num_queries, step):
        of_queries = slice(start, start + step)
        scores = q_BXYH[:, :, of_queries].float() @ keys.mT * factor
        if bias is not None:
            scores = scores + (bias[..., of_queries, :] if bias.shape[-2] > 1 else bias)
        sinks = sinks_BXY[..., of_queries] if sinks_BXY.shape[-1] > 1 else sinks_BXY
        sinks = sinks.float().expand(scores.shape[:-1]).unsqueeze(-1)
        shares = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        parts.append((shares @ values).to(q_BXYH.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@cache
def has_sums_on_cpu(dtype: torch.dtype) -> bool:
    """Whether the CPU's flash attention returns the sums of its softmax: tried, as the operator is private to torch."""
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(2, heads, num, 8, generator=generator) for heads, num in ((4, 3), (2, 5), (2, 5)))
    sinks = torch.randn(1, 4, 1, generator=generator)
    bias = bias_of(torch.tensor([2, 3, 4]), torch.arange(5), torch.float32)
    exact = _exact_with_sinks(q, keys, values, sinks, bias=bias, is_causal=False, scale=0.4)
    try:
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.to(dtype) for x in (q, keys, values)), 0.0, False, attn_mask=bias.to(dtype), scale=0.4
        )
        found = with_share(found, lse, sinks)
    except NOT_HERE:
        return False
    return bool((found.float() - exact).abs().max() < 0.03)


def flash_with_sinks(
    q_1LNH: Tensor,
    keys_1KTH: Tensor,
    values_1KTH: Tensor,
    *,
    window: int | None,
    scale: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Causal attention on a GPU of the last L of T tokens, within a window: out_1LNH."""
    keys, values = keys_1KTH.transpose(1, 2), values_1KTH.transpose(1, 2)
    out_1LNH, lse_1NL = torch.ops.aten._flash_attention_forward(
        q_1LNH, keys, values, None, None, q_1LNH.shape[1], keys.shape[1], 0.0, True, False,
        scale=scale, window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[:2]  # fmt: skip
    return out_1LNH if sinks_N is None else with_share(out_1LNH, lse_1NL.transpose(1, 2), sinks_N)


@cache
def can_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `flash_with_sinks` works here: tried on a few keys, because its operator is private to torch."""
    if not may_flash(device, dtype, head_dim):
        return False
    try:
        return all(_flash_is_right(device, dtype, head_dim, queries) for queries in (1, 70))
    except NOT_HERE:
        return False


def may_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention is known to have a kernel for such a GPU, dtype and head."""
    if device.type != "cuda" or torch.version.hip or dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_dim > _MOST_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def _flash_is_right(device: torch.device, dtype: torch.dtype, head_dim: int, num_queries: int) -> bool:
    """Compare the last of 300 tokens, with and without a window, of two KV heads."""
    q_1LNH, keys_1KTH, values_1KTH, sinks_N = random_case(
        device, dtype, ((1, num_queries, 8, head_dim), (1, 2, 300, head_dim), (1, 2, 300, head_dim), (8,))
    )
    sinks_N = 2 * sinks_N + 4  # about as large as the logarithms of the sums
    columns = torch.arange(300, device=device)
    last = columns[-num_queries:]
    right = True
    for window in (None, 40):
        bias = bias_of(last, columns, torch.float32)
        if window is not None:
            bias = bias.masked_fill(columns <= last.view(-1, 1) - window, -torch.inf)
        exact = _exact_with_sinks(
            q_1LNH.transpose(1, 2), keys_1KTH, values_1KTH, sinks_N.view(1, -1, 1), bias=bias, is_causal=False,
            scale=None,
        )  # fmt: skip
        found = flash_with_sinks(q_1LNH, keys_1KTH, values_1KTH, window=window, scale=None, sinks_N=sinks_N)
        right &= bool((found.transpose(1, 2).float() - exact.float()).abs().max() < 0.03)
    return right


def random_case(device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Normal values, to try a kernel on."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
