"""The product of rows, grouped by expert, with each expert's matrix, forward and backward.

Custom operations, because torch's own can be traced in bfloat16 only, and its backward takes contiguous gradients only.
On a GPU, torch's kernels are tried once before they are used: Blackwell's do not write all of their results.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from trainer.observability.log import note
from trainer.parallel.cpu_products import multiplies

_ALIGNED_BYTES = 16  # strides that torch's kernels take are multiples of it
_BLACKWELL = 10  # major compute capability
_MOST_ELEMENTS = 1 << 31  # beyond it the CUDA kernel accesses memory that is not its own (torchtitan#1932)


def grouped_product(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`x_RI[start:end] @ weight_EOI[e].T` for each expert e, whose rows end at `ends_E[e]` (int32). Returns [R, O].

    Every row belongs to an expert, so `ends_E[-1]` is R. An expert without rows gets a gradient of zeros. Shapes that
    torch's kernel does not take are multiplied expert by expert, with equal results.
    """
    product: Tensor = _rows(x_RI, weight_EOI, ends_E, False)
    return product


def grouped_outer(left_RO: Tensor, right_RI: Tensor, ends_E: Tensor) -> Tensor:
    """`left[start:end].T @ right[start:end]` of each expert's rows, without a gradient. Returns [E, O, I]."""
    product: Tensor = _weights(left_RO, right_RI, ends_E)
    return product


@torch.library.custom_op("titan::grouped_rows", mutates_args=())
def _rows(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, is_backward: bool) -> Tensor:
    """Each row times its expert's matrix: `x @ w.T`; with `is_backward` [R, O] → [R, I], `x @ w`."""
    x_RI, weight_EOI = x_RI.contiguous(), weight_EOI.contiguous()
    weight = weight_EOI if is_backward else weight_EOI.transpose(1, 2)
    if _has_kernel(x_RI, len(x_RI), weight_EOI.shape):
        return _grouped_mm(x_RI, weight, ends_E)
    return _loop_over_rows(x_RI, weight, ends_E)


@_rows.register_fake
def _(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor, is_backward: bool) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[2 if is_backward else 1])


@torch.library.custom_op("titan::grouped_weights", mutates_args=())
def _weights(grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of every expert's matrix: `grad[start:end].T @ x[start:end]`, [E, O, I]."""
    grad_RO, x_RI = grad_RO.contiguous(), x_RI.contiguous()
    shape = torch.Size((len(ends_E), grad_RO.shape[1], x_RI.shape[1]))
    if _has_kernel(x_RI, len(x_RI), shape):
        return _outer_mm(grad_RO, x_RI, ends_E)
    return _loop_over_outer(grad_RO, x_RI, ends_E)


@_weights.register_fake
def _(grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(len(ends_E), grad_RO.shape[1], x_RI.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RI, weight_EOI, ends_E, is_backward = inputs
    assert not is_backward, "a backward pass has no gradient"
    ctx.save_for_backward(x_RI, weight_EOI, ends_E)


def _gradients(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x_RI, weight_EOI, ends_E = ctx.saved_tensors
    grad_x = _rows(grad_RO, weight_EOI, ends_E, True) if ctx.needs_input_grad[0] else None
    grad_weight = _weights(grad_RO, x_RI, ends_E) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None, None


_rows.register_autograd(_gradients, setup_context=_save_inputs)


def _grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    public = getattr(torch.nn.functional, "grouped_mm", None)  # since torch 2.10
    product: Tensor = (public or torch._grouped_mm)(a, b, offs=ends_E)
    return product


def _outer_mm(left_RO: Tensor, right_RI: Tensor, ends_E: Tensor) -> Tensor:
    """torch's kernel for `_weights`. Blackwell's does not write matrices of experts without rows (pytorch#172439)."""
    out_EOI = _grouped_mm(left_RO.T, right_RI, ends_E)
    if out_EOI.is_cuda and torch.cuda.get_device_capability(out_EOI.device)[0] >= _BLACKWELL:
        has_none_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        out_EOI.masked_fill_(has_none_E[:, None, None], 0)
    return out_EOI


@cache
def kernels_work(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernels are right on this device. The first call on a GPU waits for it."""
    if device.type != "cuda" or kernels_are_right(device, dtype):
        return True
    note(
        f"WARNING: torch {torch.__version__}'s grouped product in {dtype} is wrong on this GPU:"
        " each expert is multiplied by itself, which is slower"
    )
    return False


def kernels_are_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Try all three products, with experts without rows, in memory that is NaN. Small integers have exact sums."""
    ends_E = torch.tensor([0, 3, 3, 16, 16], device=device, dtype=torch.int32)
    generator = torch.Generator(device).manual_seed(0)
    x_RI, weight_EOI, grad_RO = (
        torch.randint(-2, 3, shape, generator=generator, device=device).to(dtype)
        for shape in ((16, 32), (5, 48, 32), (16, 48))
    )
    forward, backward = (x_RI, weight_EOI.transpose(1, 2), ends_E), (grad_RO, weight_EOI, ends_E)
    of_weights = (grad_RO, x_RI, ends_E)
    trials = [(partial(_grouped_mm, *each), _loop_over_rows(*each)) for each in (forward, backward)]
    trials.append((partial(_outer_mm, *of_weights), _loop_over_outer(*of_weights)))
    for multiply, expected in trials:
        for _ in [torch.full_like(expected, torch.nan) for _ in range(4)]:  # freed, and used again
            pass
        if not multiply().equal(expected):
            return False
    return True


def _has_kernel(like: Tensor, num_rows: int, matrices: torch.Size) -> bool:
    """Whether torch's kernel takes these shapes, is right and not slower than a loop."""
    num_experts, *sizes = matrices
    is_aligned = all(size * like.itemsize % _ALIGNED_BYTES == 0 for size in sizes)
    largest = max(num_rows * max(sizes), num_experts * sizes[0] * sizes[1])
    if not (num_rows > 0 and is_aligned and largest < _MOST_ELEMENTS and multiplies(like.dtype, like.device)):
        return False
    return kernels_work(like.device, like.dtype)


def _loop_over_rows(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2])
    for expert, rows in _rows_of_experts(ends_E):
        torch.mm(x_RI[rows], weight_EIO[expert], out=out_RO[rows])
    return out_RO


def _loop_over_outer(left_RO: Tensor, right_RI: Tensor, ends_E: Tensor) -> Tensor:
    out_EOI = right_RI.new_zeros(len(ends_E), left_RO.shape[1], right_RI.shape[1])
    for expert, rows in _rows_of_experts(ends_E):
        torch.mm(left_RO[rows].T, right_RI[rows], out=out_EOI[expert])
    return out_EOI


def _rows_of_experts(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that has any. On a GPU the host waits for the numbers."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
