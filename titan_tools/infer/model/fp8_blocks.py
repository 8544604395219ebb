"""Weights that stay in memory as a checkpoint stores them: float8 codes, with one scale for each block.

A value is float32(code) · scale of its block, rounded to bfloat16, as where the checkpoint is dequantized while it is
read; so the logits are the same but for the order of sums. A product makes the values of some rows at a time. GPUs that
multiply float8 (NVIDIA's from compute capability 9.0 on) multiply the codes themselves: there activations are rounded
to float8 too, with one scale for each 128 features of a token, as in DeepSeek's own code.

Shape letters: B rows of activations, K input features, N output features, E experts, R rows with their expert's id;
n and k: blocks of output and input features that hold a slice's.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.catalog import Box
from converters.fp8 import LARGEST, decode
from converters.stored_blocks import CODES_OF, SCALES_OF, BlocksSource
from titan_tools.infer.model.linear import BLOCK_ELEMENTS, LinearWeight
from titan_tools.infer.model.reading import Joined
from trainer.checkpoints.arrays import as_tensor
from trainer.parallel.cpu_products import multiplies

_VALUES = torch.bfloat16  # what published values were quantized from
_GPU_BLOCK_ELEMENTS = 1 << 25
_LEAST_CAPABILITY = (9, 0)
_SMALLEST = 1e-12  # lower bound of the largest of 128 features, against a division by zero
Reads = Iterator[tuple[Joined, Callable[[Tensor], None]]]


class Fp8Slice(nn.Module):
    """A slice [..., N, K] of a weight as codes; `start`: its first row and column within the blocks of `scales`."""

    codes: Tensor
    scales: Tensor  # [..., n, k]

    def __init__(self, block: tuple[int, int], start: tuple[int, int]):
        super().__init__()
        self.block, self.start = block, start
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def values(self, rows: slice) -> Tensor:
        """The values of some rows of a matrix."""
        if self.codes.is_cuda or torch.compiler.is_compiling():
            return block_values(self.codes[rows], self.scales, self.block, (self.start[0] + rows.start, self.start[1]))
        first = (self.start[0] + rows.start) // self.block[0]
        start = (self.start[0] + rows.start - first * self.block[0], self.start[1])
        codes, scales = self.codes[rows].view(torch.uint8).numpy(), self.scales[first:].numpy()
        return as_tensor(decode(codes, scales, self.block, start=start, dtype="bfloat16"), "bfloat16")


def block_values(codes: Tensor, scales: Tensor, block: tuple[int, int], start: tuple[int, int]) -> Tensor:
    """The values of codes [..., N, K] whose blocks' scales are [..., n, k], in bfloat16."""
    for dim, size, first in zip((-2, -1), block, start, strict=True):
        at = (torch.arange(codes.shape[dim], device=codes.device) + first) // size
        scales = scales.index_select(dim, at)
    return (codes.float() * scales).to(_VALUES)


class Fp8Weight(LinearWeight, nn.Module):
    """A weight [N, K] of slices that follow each other along N."""

    def __init__(self, slices: Sequence[Fp8Slice]):
        super().__init__()
        self.slices = nn.ModuleList(slices)

    @property
    def shape(self) -> torch.Size:
        shapes = [each.codes.shape for each in self._slices()]
        return torch.Size((sum(rows for rows, _ in shapes), shapes[0][1]))

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._slices())

    def _slices(self) -> list[Fp8Slice]:
        return list(self.slices)  # type: ignore[arg-type]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = [part for each in self._slices() for part in _products(x.flatten(0, -2), each)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias


def _products(x_BK: Tensor, weight: Fp8Slice) -> Iterator[Tensor]:
    """The products with the rows of a slice, one after another."""
    if _fits_kernel(x_BK, weight) and has_block_products(x_BK.device):
        yield block_product(x_BK, weight.codes, weight.scales)
        return
    dtype = x_BK.dtype
    if not multiplies(dtype, x_BK.device):
        x_BK = x_BK.float()
    num_rows, num_features = weight.codes.shape
    most = BLOCK_ELEMENTS if x_BK.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    step = max(1, most // max(1, num_features) // weight.block[0]) * weight.block[0]
    first = step - weight.start[0] if num_rows > step else num_rows  # so that the others begin at a block
    for start, end in zip((0, *range(first, num_rows, step)), (*range(first, num_rows, step), num_rows), strict=True):
        yield F.linear(x_BK, weight.values(slice(start, end)).to(x_BK.dtype)).to(dtype)


def _fits_kernel(x_BK: Tensor, weight: Fp8Slice) -> bool:
    whole = weight.start == (0, 0) and not any(size % 128 for size in weight.codes.shape)
    return x_BK.is_cuda and x_BK.dtype == torch.bfloat16 and whole and weight.block == (128, 128)


def block_product(x_BK: Tensor, codes_NK: Tensor, scales_nk: Tensor) -> Tensor:
    """The product of codes, with the activations rounded to float8 in groups of 128 features."""
    from torch.nn.functional import ScalingType, scaled_mm

    groups = x_BK.float().unflatten(-1, (-1, 128))  # type: ignore[no-untyped-call]
    scales_Bk = groups.abs().amax(dim=-1).clamp(min=_SMALLEST) / LARGEST
    codes_BK = (groups / scales_Bk.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    out_BN: Tensor = scaled_mm(
        codes_BK,
        codes_NK.t(),
        scales_Bk.t().contiguous().t(),  # the kernel reads the scales of one group after another
        ScalingType.BlockWise1x128,
        scales_nk.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return out_BN


@cache
def has_block_products(device: torch.device) -> bool:
    """Whether `block_product` works here: torch has it for some GPUs and versions of CUDA only."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    return block_products_are_right(device)


def block_products_are_right(device: torch.device) -> bool:
    """Try it on a few values."""
    generator = torch.Generator(device).manual_seed(0)
    x_BK, weight_NK = (torch.randn(rows, 256, generator=generator, device=device) for rows in (3, 384))
    codes_NK = weight_NK.to(torch.float8_e4m3fn)
    scales_nk = 0.5 + torch.rand(3, 2, generator=generator, device=device)
    exact_BN = x_BK @ block_values(codes_NK, scales_nk, (128, 128), (0, 0)).float().t()
    try:
        found_BN = block_product(x_BK.bfloat16(), codes_NK, scales_nk).float()
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):  # not in this torch, or not for this GPU
        return False
    return bool((found_BN - exact_BN).norm() < 0.06 * exact_BN.norm())  # activations have 3 bits of mantissa


def reads_of(weight: Fp8Slice, fqn: str, box: Box, source: BlocksSource) -> Reads:
    """What to read for the slice `box` of a weight, of three dims for stacked experts, and what to call with it."""
    stored, device_dtype = source.blocks[fqn], torch.float8_e4m3fn
    *lead, rows, columns = zip(box.offsets, box.sizes, strict=True)
    of_blocks = [
        (o // n, -(-(o + size) // n) - o // n) for (o, size), n in zip((rows, columns), stored.block, strict=True)
    ]
    offsets, sizes = zip(*lead, *of_blocks, strict=True)
    yield Joined(((CODES_OF + fqn, box),), device_dtype), partial(setattr, weight, "codes")
    yield Joined(((SCALES_OF + fqn, Box(offsets, sizes)),), torch.float32), partial(setattr, weight, "scales")


def slice_of(fqn: str, box: Box, source: BlocksSource) -> Fp8Slice:
    """An empty slice for `box`."""
    block = source.blocks[fqn].block
    return Fp8Slice(block, (box.offsets[-2] % block[0], box.offsets[-1] % block[1]))
