"""Linear layers for decoding: fused projections, weights packed for oneDNN, and 16-bit weights multiplied in fp32."""

import platform
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEAST_PACKED_BYTES = 1 << 20  # smaller weights stay in a core's cache, where the layout makes no difference
_MEASURED_ON = ("x86_64", "AMD64")  # on ARM torch's own products use oneDNN and its kernels already
BLOCK_ELEMENTS = 1 << 20  # cast at a time: they fit a CPU's cache
_GATHERED_ELEMENTS = 1 << 25  # of chosen weights copied at once
_FEW_ROWS = 4  # up to which torch's loop is as fast: it reads 16 bits where a cast writes and reads 32 more


class FusedLinear(nn.Module):
    """The first of several linear layers with the same input, which computes all of them in one product.

    It keeps the outputs of the others until they ask for them. With another input they get a correct result as well,
    only slower. `weight` [sum of sizes, K] and `bias` hold the rows of all layers.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, sizes: Sequence[int]):
        """`sizes`: rows of each layer."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.sizes = list(sizes)
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self._input, self._outputs = x, self._products(x)
        return self._outputs[0]

    def output(self, number: int, x: Tensor) -> Tensor:
        """The output of layer `number` for `x`. The last layer frees the kept outputs."""
        if x is not self._input:
            return self._products(x)[number]
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(F.linear(x, self.weight, self.bias), self.sizes, dim=-1)


class FusedPart(nn.Module):
    """A later layer of a fused group."""

    def __init__(self, fused: FusedLinear, number: int):
        super().__init__()
        self._fused = (fused,)  # in a tuple it is not a submodule: its weight belongs to the first layer
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self._fused[0].output(self.number, x)


def can_fuse(layers: Sequence[nn.Module]) -> bool:
    """Whether layers are plain linear ones, all with a bias or all without."""
    return all(type(layer) is nn.Linear for layer in layers) and len({layer.bias is None for layer in layers}) == 1


def fuse(parent: nn.Module, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Fuse the layers `names` of `parent`, which have `sizes` rows here. Their parameters are not filled yet."""
    first: Any = parent.get_submodule(names[0])
    num_rows = sum(sizes)
    weight = nn.Parameter(first.weight.new_empty(num_rows, first.in_features), requires_grad=False)
    bias = None if first.bias is None else nn.Parameter(first.bias.new_empty(num_rows), requires_grad=False)
    fused = FusedLinear(weight, bias, sizes)
    setattr(parent, names[0], fused)
    for number, name in enumerate(names[1:], start=1):
        setattr(parent, name, FusedPart(fused, number))


def gathered_products(x_RI: Tensor, ids_R: Tensor, values: Callable[[Tensor], Tensor], *, num_values: int) -> Tensor:
    """The product of each row with the matrix of its id, [R, O], a few rows at a time: for where there is no compiler.

    `values` returns the matrices of some ids, each of `num_values` elements.
    """
    step = max(1, _GATHERED_ELEMENTS // max(num_values, 1))
    parts = []
    for start in range(0, len(x_RI), step):
        rows = slice(start, start + step)
        chosen_ROI = values(ids_R[rows]).to(x_RI.dtype)
        parts.append(torch.bmm(x_RI[rows, None], chosen_ROI.transpose(1, 2))[:, 0])
    return torch.cat(parts)


class LinearWeight:
    """Base of objects that replace a weight [N, K]: torch calls `product` for `F.linear(x, weight, bias)`."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear:
            return NotImplemented  # torch raises TypeError
        return cls._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: Tensor, weight: "LinearWeight", bias: Tensor | None = None) -> Tensor:
        return weight.product(input, bias)

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of it."""


class PackedWeight(LinearWeight):
    """A weight in the layout of oneDNN's kernels, so that a product reads it at the memory's full speed.

    torch's own product of one row in fp32 uses MKL on one core, and in bfloat16 oneDNN with the weight in its plain
    layout; packed while loading, both take half to two thirds of the time. torch's compiler does the same, with the
    same two operators, when it freezes a model on a CPU.
    """

    def __init__(self, weight_NK: Tensor):
        self.shape, self.dtype = weight_NK.shape, weight_NK.dtype
        self.num_bytes = weight_NK.numel() * weight_NK.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            bias = bias.contiguous()  # the operator ignores strides
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out


def can_pack(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing a weight of these sizes is possible here and faster."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and prod(sizes) * dtype.itemsize >= _LEAST_PACKED_BYTES
        and platform.machine() in _MEASURED_ON
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and _packing_works(dtype)
    )


@cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Try it: the operators are private to torch (2.0 to 2.13), and CPUs without AVX-512 reject bfloat16.

    With small integers every sum is exact, in any order.
    """
    weight_NK = (torch.arange(48 * 32).view(48, 32) % 7 - 3).to(dtype)
    x_3K = (torch.arange(3 * 32).view(3, 32) % 5 % 3 - 1).to(dtype)
    cases = [(x, bias) for x in (x_3K[:1], x_3K) for bias in (None, weight_NK[:, 1])]
    try:
        packed: Any = PackedWeight(weight_NK)
        return all(torch.equal(F.linear(x, packed, bias), F.linear(x, weight_NK, bias)) for x, bias in cases)
    except (AttributeError, RuntimeError, TypeError):  # operator missing, unsupported CPU, other arguments
        return False


class WidenedWeight(LinearWeight):
    """A 16-bit weight on a CPU without 16-bit matrix products: cast to fp32 for a product, a block at a time.

    These are CPUs without AVX-512 for bfloat16, and without AVX-512 FP16 and AMX for float16. torch multiplies in a
    slow loop there: 512 rows of activations by a weight of 8192 × 2048 take one core 1.66 s in bfloat16 and 1.36 s in
    float16, this way 0.25 s, as in fp32. Sums are in fp32 and rounded once.
    """

    def __init__(self, weight_NK: Tensor):
        self.shape, self.dtype, self.num_bytes = weight_NK.shape, weight_NK.dtype, weight_NK.nbytes
        self._weight_NK = weight_NK

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight_NK = self._weight_NK
        if x.numel() <= _FEW_ROWS * x.shape[-1]:
            return F.linear(x, weight_NK, bias)
        num_rows, num_features = weight_NK.shape
        wide, out = x.float(), x.new_empty(*x.shape[:-1], num_rows)
        step = max(1, BLOCK_ELEMENTS // num_features)
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            out[..., rows] = F.linear(wide, weight_NK[rows].float(), None if bias is None else bias[rows].float())
        return out
