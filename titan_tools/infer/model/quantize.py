"""Weight-only quantization to 8 bits by torchao, with one scale per output feature.

- int8: w ≈ scale · q with q in -128 … 127 and scale = (largest of the row) / 127.5, in the compute dtype. On a CPU in
  bfloat16, few rows of activations use torch's int8 kernel (sums in fp32). It reads half the bytes, but is bound by its
  arithmetic: two cores decode as fast as with packed bfloat16 weights, in half the memory. All other products cast the
  weight to the compute dtype, a block of rows at a time (to fp32 on CPUs without 16-bit matrix products), and multiply
  by the scale.
- float8: e4m3, scale = (largest of the row) / 448 in fp32; the same product of cast blocks. CPUs have no kernel for it:
  there it saves memory and costs time.
- On a GPU, one row of activations uses a compiled kernel that casts the 8-bit weights in registers.

Embeddings, norms and biases keep their dtype; a tied output has a quantized copy of the embedding. Each row is rounded
by itself, so slices of rows are the same at any tensor-parallel degree. Where input features are sliced (wo and w2),
each rank has its own, slightly finer scales: logits then differ between degrees by about the rounding error.

Shape letters: B rows of activations, K input features, N output features.
"""

from collections.abc import Callable
from functools import cache
from logging import ERROR, getLogger

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.quantized.stored_blocks import MXFP4
from titan_tools.infer.model.compiling import compile_all_shapes
from titan_tools.infer.model.fp8_blocks import has_block_products
from titan_tools.infer.model.fp8_blocks import has_products as has_fp8_products
from titan_tools.infer.model.linear import BLOCK_ELEMENTS, LinearWeight
from titan_tools.infer.model.mxfp4_blocks import has_products as has_mxfp4_products
from trainer.parallel.compile import why_inductor_cannot
from trainer.parallel.cpu_products import multiplies

STORED = "stored"  # --quantize: as the checkpoint has it (stored_weight.py)
_GPU_BLOCK_ELEMENTS = 1 << 25  # few kernels, bounded memory
_KERNEL_ROWS = 16  # up to which torch's int8 kernel is faster than a cast and a matrix product
_KERNEL_MULTIPLE = 16  # the kernel reads so many input features at a time, beyond the end of other numbers
_SMALLEST = 1e-12  # lower bound of a row's largest value, against a division by zero


class QuantizedWeight(LinearWeight, nn.Module):
    """8-bit rows with a scale each.

    A module of two plain tensors, not a tensor subclass, which would cost time in each eager call.
    """

    data_NK: Tensor
    scale_N: Tensor

    def __init__(self, data_NK: Tensor, scale_N: Tensor):
        super().__init__()
        self.register_buffer("data_NK", data_NK)
        self.register_buffer("scale_N", scale_N)

    @property
    def shape(self) -> torch.Size:
        return self.data_NK.shape

    @property
    def num_bytes(self) -> int:
        return self.data_NK.nbytes + self.scale_N.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out_BN = _product(x.flatten(0, -2), self.data_NK, self.scale_N)
        out = out_BN.view(*x.shape[:-1], out_BN.shape[-1])
        return out if bias is None else out + bias

    def dequantize(self) -> Tensor:
        """The weight in fp32."""
        return self.data_NK.float() * self.scale_N.float()[:, None]


def quantize_weight(weight_NK: Tensor, how: str) -> QuantizedWeight:
    """Round a weight to "int8" or "float8"; in addition to the result it needs one block of rows in fp32."""
    for name in ("torchao", "torch.utils._pytree"):  # warnings about C++ extensions that are not used here
        getLogger(name).setLevel(ERROR)
    round_rows, data_dtype = _HOW[how]
    num_rows, num_features = weight_NK.shape
    data_NK = torch.empty(weight_NK.shape, dtype=data_dtype, device=weight_NK.device)
    scales = []
    for rows in _row_blocks(weight_NK):
        block_NK = weight_NK[rows].detach()
        if num_features == 1:  # torchao takes such rows for a single one; a zero beside them changes no scale
            block_NK = F.pad(block_NK, (0, 1))
        rounded_NK, scale_N = round_rows(block_NK)
        data_NK[rows] = rounded_NK[:, :num_features]
        scales.append(scale_N)
    scale_N = torch.cat(scales) if scales else weight_NK.new_ones(num_rows if not num_features else 0)
    return QuantizedWeight(data_NK, scale_N)


def why_slow(how: str, *, dtype: torch.dtype, device: torch.device, rows: int, stored: str | None = None) -> str | None:
    """A note for the user where quantized weights save memory but cost time; None elsewhere.

    `stored`: the format of those that STORED keeps (converters/quantized/stored_blocks.py).
    `rows`: sequences that decode together.
    """
    if how == STORED:
        if stored == MXFP4:
            has_kernel = has_mxfp4_products(device)
        elif rows == 1:
            has_kernel = has_fp8_products(device)
        else:
            has_kernel = dtype == torch.bfloat16 and has_block_products(device)
        if has_kernel:
            return None
        return "--quantize stored saves memory, but there is no kernel for it here: each product makes its values first"
    if device.type == "cuda":
        if rows > 1:
            return f"--quantize {how} saves memory, but with {rows} sequences every step casts each weight first"
        if reason := why_inductor_cannot(device):
            return f"--quantize {how} saves memory, but its kernel cannot be compiled here: {reason}"
        return None
    if how == "float8":
        return "--quantize float8 saves memory, but CPUs have no kernel for it: each product casts its weight first"
    if dtype != torch.bfloat16:
        return "--quantize int8 saves memory, but in float32 a CPU casts each weight first; --dtype bfloat16 does not"
    return None


def _to_int8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.quantization import MappingType, choose_qparams_affine, quantize_affine

    limits, row = (-128, 127), (1, weight_NK.shape[1])
    exact_NK = weight_NK.float()
    scale_N, zero_N = choose_qparams_affine(
        exact_NK, MappingType.SYMMETRIC, row, torch.int8, *limits, eps=_SMALLEST, zero_point_dtype=torch.int8
    )
    scale_N = scale_N.to(weight_NK.dtype)  # before quantizing, which then compensates for its rounding
    return quantize_affine(exact_NK, row, scale_N.float(), zero_N, torch.int8, *limits), scale_N


def _to_float8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.quantization import Float8Tensor, PerRow

    # With a lower bound torchao rounds by torch's operations on every GPU, not by an optional kernel
    rounded = Float8Tensor.from_hp(weight_NK.float(), torch.float8_e4m3fn, PerRow(), hp_value_lb=_SMALLEST)
    return rounded.qdata, rounded.scale.flatten()


_HOW = {"int8": (_to_int8, torch.int8), "float8": (_to_float8, torch.float8_e4m3fn)}


def _row_blocks(weight_NK: Tensor) -> list[slice]:
    num_rows, num_features = weight_NK.shape
    if not num_rows or not num_features:
        return []
    step = max(1, (BLOCK_ELEMENTS if weight_NK.device.type == "cpu" else _GPU_BLOCK_ELEMENTS) // num_features)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _product(x_BK: Tensor, data_NK: Tensor, scale_N: Tensor) -> Tensor:
    """x @ (scale · data)ᵀ in the dtype of `x`."""
    num_rows, num_features = x_BK.shape
    has_kernel = not x_BK.is_cuda and x_BK.dtype == scale_N.dtype == torch.bfloat16 and data_NK.dtype == torch.int8
    if has_kernel and num_rows <= _KERNEL_ROWS and num_features % _KERNEL_MULTIPLE == 0:
        out_BN: Tensor = torch.ops.aten._weight_int8pack_mm(x_BK, data_NK, scale_N)
        return out_BN
    if torch.compiler.is_compiling():
        return _cast_product(x_BK, data_NK, scale_N)
    if x_BK.is_cuda and num_rows == 1:
        return _compiled_product()(x_BK, data_NK, scale_N)
    blocks, dtype = _row_blocks(data_NK), x_BK.dtype
    if not multiplies(dtype, x_BK.device):
        x_BK = x_BK.float()
    if len(blocks) < 2:
        return _cast_product(x_BK, data_NK, scale_N).to(dtype)
    return torch.cat([_cast_product(x_BK, data_NK[rows], scale_N[rows]).to(dtype) for rows in blocks], dim=-1)


def _cast_product(x_BK: Tensor, data_NK: Tensor, scale_N: Tensor) -> Tensor:
    return (F.linear(x_BK, data_NK.to(x_BK.dtype)) * scale_N).to(x_BK.dtype)


@cache
def _compiled_product() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One kernel for each shape of a weight, which casts in registers."""
    if why_inductor_cannot(torch.device("cuda")):
        return _cast_product
    return compile_all_shapes(_cast_product)
