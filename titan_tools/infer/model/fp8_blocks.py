"""Weights that stay in memory as a checkpoint stores them: float8 codes, with one scale for each block.

A value is float32(code) · scale of its block, rounded to bfloat16, as where the checkpoint is dequantized while it is
read; so the logits are the same but for the order of sums. A product makes the values of some rows at a time. On a GPU
the product of one row, or of rows with an expert each, is a compiled kernel that makes values in registers. Products of
more rows on GPUs that multiply such blocks (NVIDIA's Hopper) are of the codes themselves: there activations are rounded
to float8 too, with one scale for each 128 features of a token, as in DeepSeek's own code.

Shape letters: B rows of activations, K input features, N output features, E experts, R rows with their expert's id;
n and k: blocks of output and input features that hold a slice's; X zero or more dims.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.common.box import Box
from converters.quantized.stored_blocks import CODES_OF, SCALES_OF
from converters.views.fp8 import LARGEST, decode
from titan_tools.infer.model.compiling import compile_all_shapes
from titan_tools.infer.model.linear import BLOCK_ELEMENTS, gathered_products
from titan_tools.infer.model.reading import Joined
from trainer.checkpoints.arrays import as_tensor
from trainer.parallel.compile import why_inductor_cannot
from trainer.parallel.cpu_products import multiplies

_VALUES = torch.bfloat16  # what published values were quantized from
_GPU_BLOCK_ELEMENTS = 1 << 25
_LEAST_CAPABILITY = (9, 0)
_SMALLEST = 1e-12  # lower bound of the largest of 128 features, against a division by zero
# What cuBLAS takes: a multiple of these rows of activations, and of these blocks along K, which need not be filled
_ROWS_MULTIPLE = _BLOCKS_MULTIPLE = 4
_Block = tuple[int, int]
_Products = Callable[[Tensor, Tensor, Tensor, Tensor | None, _Block, _Block], Tensor]
Reads = Iterator[tuple[Joined, Callable[[Tensor], None]]]


class Fp8Slice(nn.Module):
    """A slice [..., N, K] of a weight as codes; `start`: its first row and column within the blocks of `scales`."""

    codes: Tensor
    scales: Tensor  # [..., n, k]
    multiplies_codes = False  # else products are of the values

    def __init__(self, block: _Block, start: _Block):
        super().__init__()
        self.block, self.start = block, start
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix, or of each expert's matrix."""
        return self.codes.shape[-2], self.codes.shape[-1]

    def expert(self, number: int) -> "Fp8Slice":
        """One expert's matrix, which shares the memory."""
        one = Fp8Slice(self.block, self.start)
        one.codes, one.scales = self.codes[number], self.scales[number]
        one.multiplies_codes = self.multiplies_codes
        return one

    def products(self, x_BK: Tensor) -> Iterator[Tensor]:
        """The products with the rows of a matrix, some after others."""
        return _products(x_BK, self)

    def chosen_products(self, x_RK: Tensor, ids_R: Tensor) -> Tensor:
        """The product of each row with the expert of its id, [R, N]."""
        return chosen_products(x_RK, self, ids_R)

    def values(self, rows: slice) -> Tensor:
        """The values of some rows of a matrix."""
        if self.codes.is_cuda or torch.compiler.is_compiling():
            return block_values(self.codes[rows], self.scales, self.block, (self.start[0] + rows.start, self.start[1]))
        first = (self.start[0] + rows.start) // self.block[0]
        start = (self.start[0] + rows.start - first * self.block[0], self.start[1])
        codes, scales = self.codes[rows].view(torch.uint8).numpy(), self.scales[first:].numpy()
        return as_tensor(decode(codes, scales, self.block, start=start, dtype="bfloat16"), "bfloat16")


def block_values(codes: Tensor, scales: Tensor, block: _Block, start: _Block) -> Tensor:
    """The values of codes [..., N, K] whose blocks' scales are [..., n, k], in bfloat16."""
    for dim, size, first in zip((-2, -1), block, start, strict=True):
        at = (torch.arange(codes.shape[dim], device=codes.device) + first) // size
        scales = scales.index_select(dim, at)
    return (codes.float() * scales).to(_VALUES)


def _products(x_BK: Tensor, weight: Fp8Slice) -> Iterator[Tensor]:
    """The products with the rows of a slice, one after another."""
    num_rows, num_features = weight.codes.shape
    if torch.compiler.is_compiling():  # it makes values in registers
        yield F.linear(x_BK, weight.values(slice(0, num_rows)).to(x_BK.dtype))
        return
    if len(x_BK) == 1 and has_products(x_BK.device):
        yield _compiled_products()(x_BK, weight.codes, weight.scales, None, weight.block, weight.start)
        return
    if weight.multiplies_codes:
        yield block_product(x_BK, weight.codes, weight.scales)
        return
    dtype = x_BK.dtype
    if not multiplies(dtype, x_BK.device):
        x_BK = x_BK.float()
    most = BLOCK_ELEMENTS if x_BK.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    step = max(1, most // max(1, num_features) // weight.block[0]) * weight.block[0]
    first = step - weight.start[0] if num_rows > step else num_rows  # so that the others begin at a block
    for start, end in zip((0, *range(first, num_rows, step)), (*range(first, num_rows, step), num_rows), strict=True):
        yield F.linear(x_BK, weight.values(slice(start, end)).to(x_BK.dtype)).to(dtype)


def chosen_products(x_RK: Tensor, weight: Fp8Slice, ids_R: Tensor) -> Tensor:
    """The product of each row with the expert of its id, [R, N]: the same operations whatever the ids are."""
    numbers = weight.codes, weight.scales, ids_R, weight.block, weight.start
    if torch.compiler.is_compiling():
        return values_products(x_RK, *numbers)
    products = _compiled_products() if x_RK.is_cuda else _gathered_products
    return products(x_RK, *numbers)


def values_products(
    x_RK: Tensor, codes: Tensor, scales: Tensor, ids_R: Tensor | None, block: _Block, start: _Block
) -> Tensor:
    """Written for torch's compiler, which makes one kernel of it: values are made in registers, sums are in float32.

    Of rows with the experts of their ids; without ids of one row with a matrix.
    """
    if ids_R is not None:
        codes, scales = codes[ids_R], scales[ids_R]
    values = block_values(codes, scales, block, start)
    return (values.float() * x_RK.float().unsqueeze(-2)).sum(dim=-1).to(x_RK.dtype)


def _gathered_products(
    x_RK: Tensor, codes: Tensor, scales: Tensor, ids_R: Tensor | None, block: _Block, start: _Block
) -> Tensor:
    assert ids_R is not None, "one matrix is multiplied in blocks of rows"

    def values(ids: Tensor) -> Tensor:
        return block_values(codes[ids], scales[ids], block, start)

    return gathered_products(x_RK, ids_R, values, num_values=codes[0].numel())


@cache
def _compiled_products() -> _Products:
    if why_inductor_cannot(torch.device("cuda")):
        return _gathered_products
    compiled = compile_all_shapes(values_products)
    return compiled if products_are_right(compiled, torch.device("cuda")) else _gathered_products


def has_products(device: torch.device) -> bool:
    """Whether products of one row, and of rows with an expert each, multiply codes as they read them."""
    return device.type == "cuda" and _compiled_products() is not _gathered_products


def products_are_right(products: _Products, device: torch.device) -> bool:
    """Try it on all numbers that codes stand for, in a slice that begins within a block."""
    finite = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8, device=device)
    codes = finite[torch.arange(3 * 130 * 140, device=device).mul(37) % len(finite)]
    codes = codes.view(torch.float8_e4m3fn).view(3, 130, 140)
    generator = torch.Generator(device).manual_seed(0)
    scales = 0.5 + torch.rand(3, 2, 2, generator=generator, device=device)
    x_2K = torch.randn(2, 140, generator=generator, device=device).bfloat16()
    ids_2, block, start = torch.tensor([2, 0], device=device), (128, 128), (7, 100)
    values_2NK = block_values(codes, scales, block, start)[ids_2].double()
    exact_2N = torch.einsum("rk,rnk->rn", x_2K.double(), values_2NK)
    try:
        found_2N = products(x_2K, codes, scales, ids_2, block, start).double()
    except RuntimeError:  # Triton has no float8 on this GPU
        return False
    return bool((found_2N - exact_2N).abs().max() < 0.01 * exact_2N.abs().max())  # the result has 8 bits


def choose_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the slices of a loaded model multiply their codes where their GPU has a kernel for them."""
    for module in model.modules():
        if isinstance(module, Fp8Slice) and dtype == torch.bfloat16 and _fits_kernel(module):
            module.multiplies_codes = has_block_products(module.codes.device)


def _fits_kernel(weight: Fp8Slice) -> bool:
    """Whether it consists of whole blocks of the kernel's size."""
    sizes = weight.codes.shape[-2:]
    return weight.block == (128, 128) and weight.start == (0, 0) and not any(size % 128 for size in sizes)


def block_product(x_BK: Tensor, codes_NK: Tensor, scales_nk: Tensor) -> Tensor:
    """The product of codes, with the activations rounded to float8 in groups of 128 features."""
    return _multiply(*_to_float8(x_BK), codes_NK, scales_nk)[: len(x_BK)]


def _to_float8(x_XBK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [X, B', K] of activations, with rows of zeros at the end, and scales [X, B', k].

    The kernel reads the scales of one group of features after another.
    """
    if missing := -x_XBK.shape[-2] % _ROWS_MULTIPLE:
        x_XBK = F.pad(x_XBK, (0, 0, 0, missing))
    groups = x_XBK.float().unflatten(-1, (-1, 128))  # type: ignore[no-untyped-call]
    scales_XBk = groups.abs().amax(dim=-1).clamp(min=_SMALLEST) / LARGEST
    codes_XBK = (groups / scales_XBk.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    return codes_XBK, scales_XBk.transpose(-1, -2).contiguous().transpose(-1, -2)


def _multiply(codes_BK: Tensor, scales_Bk: Tensor, codes_NK: Tensor, scales_nk: Tensor) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    if missing := -scales_nk.shape[1] % _BLOCKS_MULTIPLE:
        scales_nk = F.pad(scales_nk, (0, missing))
    out_BN: Tensor = scaled_mm(
        codes_BK,
        codes_NK.t(),
        scales_Bk,
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
    """Try it on a few values: one row, some and many, of numbers of blocks that are padded and that are not."""
    return all(_is_right(device, rows=rows, features=features) for rows, features in ((1, 512), (3, 256), (130, 640)))


def _is_right(device: torch.device, *, rows: int, features: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    x_BK, weight_NK = (torch.randn(num, features, generator=generator, device=device) for num in (rows, 384))
    codes_NK = weight_NK.to(torch.float8_e4m3fn)
    scales_nk = 0.5 + torch.rand(3, features // 128, generator=generator, device=device)
    exact_BN = x_BK @ block_values(codes_NK, scales_nk, (128, 128), (0, 0)).float().t()
    try:
        found_BN = block_product(x_BK.bfloat16(), codes_NK, scales_nk).float()
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):  # not in this torch, or not for this GPU
        return False
    return bool((found_BN - exact_BN).norm() < 0.06 * exact_BN.norm())  # activations have 3 bits of mantissa


def fp8_reads(weight: Fp8Slice, fqn: str, box: Box) -> Reads:
    """What to read for the slice `box` of a weight, of three dims for stacked experts, and what to call with it."""
    *lead, rows, columns = zip(box.offsets, box.sizes, strict=True)
    of_blocks = [
        (o // n, -(-(o + size) // n) - o // n) for (o, size), n in zip((rows, columns), weight.block, strict=True)
    ]
    offsets, sizes = zip(*lead, *of_blocks, strict=True)
    yield Joined(((CODES_OF + fqn, box),), torch.float8_e4m3fn), partial(setattr, weight, "codes")
    yield Joined(((SCALES_OF + fqn, Box(offsets, sizes)),), torch.float32), partial(setattr, weight, "scales")


def fp8_slice(box: Box, block: _Block) -> Fp8Slice:
    """An empty slice for `box`."""
    return Fp8Slice(block, (box.offsets[-2] % block[0], box.offsets[-1] % block[1]))
