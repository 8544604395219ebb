"""Weights that stay in memory as mxfp4: codes of 4 bits, with a power of two as the scale of each 32 of a row.

A value is exact in bfloat16, so the logits are those of the dequantized weights but for the order of sums. A product
makes the values of some rows at a time, by the table that conversions use. A decode step that is compiled, and one on a
GPU, makes them in registers, in float32.

Shape letters: B rows of activations, K input features, N output features, E experts, R rows with their expert's id, k
blocks of K.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.common.box import Box
from converters.quantized.stored_blocks import CODES_OF, SCALES_OF
from converters.views.mxfp4 import BLOCK, CODE_BYTES, value_pairs
from titan_tools.infer.model.compiling import compile_all_shapes
from titan_tools.infer.model.linear import BLOCK_ELEMENTS, gathered_products
from titan_tools.infer.model.reading import Joined
from trainer.parallel.compile import why_inductor_cannot
from trainer.parallel.cpu_products import multiplies

_GPU_BLOCK_ELEMENTS = 1 << 25
_BIAS = 127  # of a scale's exponent
Reads = Iterator[tuple[Joined, Callable[[Tensor], None]]]


class Mxfp4Slice(nn.Module):
    """A slice [..., N, K] of a weight; `start`: its first column within the blocks, of which there are `columns`."""

    codes: Tensor  # uint8 [..., N, k, 16]: the first value of two is in a byte's low half
    scales: Tensor  # uint8 [..., N, k]

    def __init__(self, start: int, columns: int):
        super().__init__()
        self.start, self.columns = start, columns
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix, or of each expert's matrix."""
        return self.codes.shape[-3], self.columns

    def expert(self, number: int) -> "Mxfp4Slice":
        """One expert's matrix, which shares the memory."""
        one = Mxfp4Slice(self.start, self.columns)
        one.codes, one.scales = self.codes[number], self.scales[number]
        return one

    def products(self, x_BK: Tensor) -> Iterator[Tensor]:
        """The products with the rows of a matrix, some after others."""
        dtype, wide = x_BK.dtype, multiplies(x_BK.dtype, x_BK.device)
        x_BK = self._in_blocks(x_BK if wide else x_BK.float())
        most = BLOCK_ELEMENTS if x_BK.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
        step = max(1, most // max(1, x_BK.shape[-1]))
        for start in range(0, max(1, self.codes.shape[-3]), step):
            values_NK = block_values(self.codes[start : start + step], self.scales[start : start + step])
            yield F.linear(x_BK, values_NK.to(x_BK.dtype)).to(dtype)

    def chosen_products(self, x_RK: Tensor, ids_R: Tensor) -> Tensor:
        """The product of each row with the expert of its id, [R, N]: the same operations whatever the ids are."""
        x_RK = self._in_blocks(x_RK)
        if torch.compiler.is_compiling() or not x_RK.is_cuda:
            return chosen_values_products(x_RK, self.codes, self.scales, ids_R)
        return _compiled_products()(x_RK, self.codes, self.scales, ids_R)

    def _in_blocks(self, x_BK: Tensor) -> Tensor:
        """Zeros before and behind the features, so that they are those of whole blocks."""
        behind = self.codes.shape[-2] * BLOCK - self.start - self.columns
        return F.pad(x_BK, (self.start, behind)) if self.start or behind else x_BK


def block_values(codes_Nk: Tensor, scales_Nk: Tensor) -> Tensor:
    """The values [..., N, 32 · k] of codes [..., N, k, 16] and scales [..., N, k], in bfloat16."""
    numbers = codes_Nk.int() | scales_Nk.int().unsqueeze(-1) << 8
    pairs = _value_pairs(codes_Nk.device).index_select(0, numbers.flatten())
    return pairs.view(torch.bfloat16).view(*scales_Nk.shape[:-1], scales_Nk.shape[-1] * BLOCK)


@cache
def _value_pairs(device: torch.device) -> Tensor:
    """See `value_pairs`; two values in bfloat16 are one number of 32 bits."""
    return torch.from_numpy(value_pairs("bfloat16").view(np.int32)).to(device)


def code_values(codes: Tensor) -> Tensor:
    """The values of codes 0 to 15 in float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a minus.

    As the largest of three lines, which a compiler computes in registers.
    """
    magnitudes = (codes & 7).float()
    values = torch.maximum(torch.maximum(magnitudes * 0.5, magnitudes - 2), magnitudes * 2 - 8)
    return torch.where(codes > 7, -values, values)


def scale_values(scales: Tensor) -> Tensor:
    """2^(s - 127) in float32."""
    return torch.exp2(scales.float() - _BIAS)


def chosen_values_products(x_RK: Tensor, codes: Tensor, scales: Tensor, ids_R: Tensor) -> Tensor:
    """Written for torch's compiler: values are made while they are multiplied; sums are in float32."""
    pairs_RNkj = codes[ids_R].int()
    x_R1kj2 = x_RK.float().view(len(x_RK), 1, -1, CODE_BYTES, 2)
    first, second = code_values(pairs_RNkj & 15) * x_R1kj2[..., 0], code_values(pairs_RNkj >> 4) * x_R1kj2[..., 1]
    factors_RNk = scale_values(scales[ids_R])
    if x_RK.is_cuda:  # one kernel, without the sums of blocks in memory
        out_RN = ((first + second) * factors_RNk.unsqueeze(-1)).sum(dim=(-1, -2))
    else:
        out_RN = ((first + second).sum(dim=-1) * factors_RNk).sum(dim=-1)
    return out_RN.to(x_RK.dtype)


@cache
def _compiled_products() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if why_inductor_cannot(torch.device("cuda")):
        return _gathered_products
    compiled = compile_all_shapes(chosen_values_products)
    return compiled if products_are_right(compiled, torch.device("cuda")) else _gathered_products


def has_products(device: torch.device) -> bool:
    """Whether a decode step on `device` multiplies codes as it reads them."""
    return device.type == "cuda" and _compiled_products() is not _gathered_products


def products_are_right(products: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], device: torch.device) -> bool:
    """Try it on all codes and some scales."""
    generator = torch.Generator(device).manual_seed(0)
    codes = torch.arange(3 * 64 * 8 * CODE_BYTES, device=device).mul(37).to(torch.uint8).view(3, 64, 8, CODE_BYTES)
    scales = torch.randint(118, 130, (3, 64, 8), dtype=torch.uint8, generator=generator, device=device)
    x_2K = torch.randn(2, 8 * BLOCK, generator=generator, device=device).bfloat16()
    ids_2 = torch.tensor([2, 0], device=device)
    exact_2N = torch.einsum("rk,rnk->rn", x_2K.double(), block_values(codes, scales)[ids_2].double())
    found_2N = products(x_2K, codes, scales, ids_2).double()
    return bool((found_2N - exact_2N).abs().max() < 0.01 * exact_2N.abs().max())  # the result has 8 bits


def _gathered_products(x_RK: Tensor, codes: Tensor, scales: Tensor, ids_R: Tensor) -> Tensor:
    def values(ids: Tensor) -> Tensor:
        return block_values(codes[ids], scales[ids])

    return gathered_products(x_RK, ids_R, values, num_values=2 * codes[0].numel())


def mxfp4_slice(box: Box) -> Mxfp4Slice:
    """An empty slice for `box`."""
    return Mxfp4Slice(box.offsets[-1] % BLOCK, box.sizes[-1])


def mxfp4_reads(weight: Mxfp4Slice, fqn: str, box: Box) -> Reads:
    """What to read for the slice `box` of a weight, of three dims for stacked experts, and what to call with it."""
    (*lead, column), (*counts, columns) = box.offsets, box.sizes
    first = column // BLOCK
    scales = Box((*lead, first), (*counts, -(-(column + columns) // BLOCK) - first))
    codes = Box((*scales.offsets, 0), (*scales.sizes, CODE_BYTES))
    yield Joined(((CODES_OF + fqn, codes),), torch.uint8), partial(setattr, weight, "codes")
    yield Joined(((SCALES_OF + fqn, scales),), torch.uint8), partial(setattr, weight, "scales")
