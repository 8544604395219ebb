"""Mixture-of-experts layers of inference: a rank holds a slice of every expert, and a step reads only the chosen ones.

Prompts, and on a CPU all passes, sort the tokens by expert and multiply each expert's rows in one product. A decode
step that is recorded as a CUDA graph or compiled may not depend on how many rows an expert has: there each row is
multiplied by the weights that its expert id selects. In both, the sum over a token's experts is in fp32, best first.

Shape letters: B sequences, L tokens of each, T = B * L, D model dim, E experts, K experts per token, R = T * K rows,
I input and O output features of a product; S features inside of an expert on this rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.common.box import Box
from converters.families.blocks import Experts
from titan_tools.infer.model.compiling import compile_all_shapes
from titan_tools.infer.model.linear import gathered_products
from titan_tools.infer.model.quantize import QuantizedWeight
from titan_tools.infer.model.reading import Joined
from titan_tools.infer.model.stored_weight import StoredSlice, StoredWeight
from titan_tools.infer.model.tensor_parallel import AllReduce
from trainer.models.biased_experts import clamped_swiglu
from trainer.models.grouped_product import grouped_product, kernels_work
from trainer.models.moe import MoE
from trainer.parallel.compile import why_inductor_cannot

_GROUPED_MULTIPLE_BYTES = 16  # of the strides of what grouped_mm multiplies
_GROUPED_WITHOUT_SYNC = (9, 10)  # major compute capabilities with a kernel for it; others loop, with counts on the host


class SortedRows:
    """The order of T * K rows by expert, in token order within an expert; those of expert e end at `ends_E[e]`."""

    def __init__(self, ids_TK: Tensor, num_experts: int):
        self.ids_R, self.order_R = ids_TK.flatten().sort(stable=True)
        self.top_k = ids_TK.shape[1]
        experts_E = torch.arange(num_experts, device=ids_TK.device)
        self.ends_E = torch.searchsorted(self.ids_R, experts_E, right=True, out_int32=True)

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(expert, start, end) of the experts that have rows. On a GPU this waits for the router."""
        ends = self.ends_E.tolist()
        starts = [0, *ends[:-1]]
        return [(e, start, end) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < end]

    def of_experts(self, x_TD: Tensor) -> Tensor:
        """Each token's hidden state in the rows of its experts."""
        return x_TD.index_select(0, self.order_R // self.top_k)

    def sorted(self, weights_TK: Tensor) -> Tensor:
        """The numbers of tokens' experts in the order of the rows, [R]."""
        return weights_TK.flatten().index_select(0, self.order_R)

    def of_tokens(self, out_RD: Tensor) -> Tensor:
        """The rows in the order of tokens again."""
        return torch.empty_like(out_RD).index_copy(0, self.order_R, out_RD)


class RowsOfOneToken:
    """The rows of a single token on a CPU, best expert first: nothing is sorted."""

    def __init__(self, ids_1K: Tensor):
        self.ids_R = ids_1K[0]
        self.spans = [(e, row, row + 1) for row, e in enumerate(ids_1K[0].tolist())]

    def of_experts(self, x_1D: Tensor) -> Tensor:
        return x_1D.expand(len(self.spans), -1)

    def sorted(self, weights_1K: Tensor) -> Tensor:
        return weights_1K[0]

    def of_tokens(self, out_KD: Tensor) -> Tensor:
        return out_KD


class SeparateWeights(nn.Module):
    """One matrix [O, I] of every expert, each packed, widened, quantized or plain by itself: for a CPU."""

    def __init__(self, num: int):
        super().__init__()
        self.weights: list[Any] = [None] * num  # what F.linear takes; filled while loading

    @property
    def num_bytes(self) -> int:
        """Number of bytes of one expert."""
        weight = self.weights[0]
        return int(weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes)

    @property
    def groups_without_sync(self) -> bool:
        """Whether `multiply` runs without waiting for a GPU, so that it can be part of a CUDA graph."""
        return False

    def multiply(self, x_RI: Tensor, rows: SortedRows | RowsOfOneToken) -> Tensor:
        """Each expert's product with its own rows, [R, O]."""
        return torch.cat([F.linear(x_RI[start:end], self.weights[e]) for e, start, end in rows.spans])


class StackedWeights(SeparateWeights):
    """One matrix of every expert in one tensor, plain or quantized: for a GPU and for compiled steps."""

    data_EOI: Tensor
    scale_EO: Tensor | None

    def __init__(self, data_EOI: Tensor, scale_EO: Tensor | None = None):
        """`data_EOI` of 8 bits with the scale of each output row, or without scales in the dtype of activations."""
        super().__init__(len(data_EOI))
        self.register_buffer("data_EOI", data_EOI)
        self.register_buffer("scale_EO", scale_EO)
        if scale_EO is None:
            self.weights = list(data_EOI)
        else:
            self.weights = [QuantizedWeight(*one) for one in zip(data_EOI, scale_EO, strict=True)]
        row_bytes = [size * data_EOI.itemsize for size in data_EOI.shape[1:]]
        self._groups = scale_EO is None and all(size and size % _GROUPED_MULTIPLE_BYTES == 0 for size in row_bytes)
        self._has_kernel = (
            data_EOI.is_cuda
            and data_EOI.dtype == torch.bfloat16
            and torch.version.hip is None
            and torch.cuda.get_device_capability(data_EOI.device)[0] in _GROUPED_WITHOUT_SYNC
            and kernels_work(data_EOI.device, data_EOI.dtype)
        )

    @classmethod
    def empty(cls, num: int, like: QuantizedWeight) -> "StackedWeights":
        """Room for `num` matrices as `like`."""
        return cls(*(one.new_empty(num, *one.shape) for one in (like.data_NK, like.scale_N)))

    def put(self, number: int, weight: QuantizedWeight) -> None:
        self.weights[number].data_NK.copy_(weight.data_NK)
        self.weights[number].scale_N.copy_(weight.scale_N)

    @property
    def groups_without_sync(self) -> bool:
        return self._groups and self._has_kernel

    def multiply(self, x_RI: Tensor, rows: SortedRows | RowsOfOneToken) -> Tensor:
        if self._groups and isinstance(rows, SortedRows):
            return grouped_product(x_RI, self.data_EOI, rows.ends_E)
        return super().multiply(x_RI, rows)

    def multiply_chosen(self, x_RI: Tensor, ids_R: Tensor) -> Tensor:
        """The product of each row with the expert of its id, [R, O]: the same operations whatever the ids are."""
        if torch.compiler.is_compiling():
            return _chosen_products(x_RI, self.data_EOI, self.scale_EO, ids_R)
        if x_RI.is_cuda:
            return _compiled_chosen_products()(x_RI, self.data_EOI, self.scale_EO, ids_R)
        return _gathered_products(x_RI, self.data_EOI, self.scale_EO, ids_R)


class StoredExperts(SeparateWeights):
    """One matrix of every expert as codes with scales of blocks: slices that follow each other along O."""

    def __init__(self, slices: Sequence[StoredSlice]):
        super().__init__(0)
        self.slices = nn.ModuleList(slices)

    def _slices(self) -> list[StoredSlice]:
        return list(self.slices)  # type: ignore[arg-type]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes // len(each.codes) for each in self._slices())

    def multiply(self, x_RI: Tensor, rows: SortedRows | RowsOfOneToken) -> Tensor:
        self.weights = self.weights or [self._of_expert(e) for e in range(len(self._slices()[0].codes))]
        return super().multiply(x_RI, rows)

    def _of_expert(self, number: int) -> StoredWeight:
        return StoredWeight([each.expert(number) for each in self._slices()])

    def multiply_chosen(self, x_RI: Tensor, ids_R: Tensor) -> Tensor:
        """The products of rows with the experts of their ids: `StackedWeights.multiply_chosen` of several slices."""
        return torch.cat([each.chosen_products(x_RI, ids_R) for each in self._slices()], dim=-1)


class SlicedExperts(nn.Module):
    """A rank's features of every expert; the weights are set while loading."""

    gate_up: SeparateWeights  # [2 S, D]: gates, then what they multiply; in turn where the activation is clamped
    down: SeparateWeights  # [D, S]
    gate_up_bias: Tensor | None  # [E, 2 S]
    down_bias: Tensor | None  # [E, D], of one rank: its output is added to the others'

    def __init__(self, clamp: float | None = None):
        """`clamp`: see Experts."""
        super().__init__()
        self.clamp = clamp
        self.register_buffer("gate_up_bias", None)
        self.register_buffer("down_bias", None)

    def multiply(self, x_RD: Tensor, rows: SortedRows | RowsOfOneToken) -> Tensor:
        """The experts' outputs for their rows."""
        hidden_RS = self._activate(self.gate_up.multiply(x_RD, rows), rows.ids_R)
        return _biased(self.down.multiply(hidden_RS, rows), self.down_bias, rows.ids_R)

    def _activate(self, gate_up_R2S: Tensor, ids_R: Tensor) -> Tensor:
        gate_up_R2S = _biased(gate_up_R2S, self.gate_up_bias, ids_R)
        return _swiglu(gate_up_R2S) if self.clamp is None else clamped_swiglu(gate_up_R2S, self.clamp)

    def multiply_chosen(self, x_RD: Tensor, ids_R: Tensor) -> Tensor:
        """The output of the expert `ids_R[r]` for each row."""
        assert isinstance(self.gate_up, StackedWeights | StoredExperts)
        assert isinstance(self.down, StackedWeights | StoredExperts)
        hidden_RS = self._activate(self.gate_up.multiply_chosen(x_RD, ids_R), ids_R)
        return _biased(self.down.multiply_chosen(hidden_RS, ids_R), self.down_bias, ids_R)

    @property
    def groups_without_sync(self) -> bool:
        return self.gate_up.groups_without_sync and self.down.groups_without_sync

    @property
    def num_bytes(self) -> int:
        """Number of bytes of one expert."""
        return self.gate_up.num_bytes + self.down.num_bytes

    def reads(
        self, name: str, whole: Joined, form: Callable[[Tensor], Any] | None, *, is_temporary: bool, stacked: bool
    ) -> Iterator[tuple[Joined, Callable[[Tensor], None]]]:
        """What to read of the matrices `name`, which are `whole` [E, O, I], and what to call with each.

        `form` packs or quantizes one expert's matrix.
        """
        if stacked and form is None:
            yield whole, lambda values_EOI: setattr(self, name, StackedWeights(values_EOI))
            return
        if not stacked:
            setattr(self, name, SeparateWeights(whole.shape[0]))

        def put(number: int, values_1OI: Tensor) -> None:
            weight: Any = values_1OI[0] if form is None else form(values_1OI[0])
            if not stacked:
                getattr(self, name).weights[number] = weight
                return
            if number == 0:
                setattr(self, name, StackedWeights.empty(whole.shape[0], weight))
            getattr(self, name).put(number, weight)

        for number in range(whole.shape[0]):
            boxes = tuple((fqn, _one_expert(box, number)) for fqn, box in whole.boxes)
            yield replace(whole, boxes=boxes, is_temporary=is_temporary), partial(put, number)


def _one_expert(box: Box, number: int) -> Box:
    return Box((box.offsets[0] + number, *box.offsets[1:]), (1, *box.sizes[1:]))


class RoutedExperts(nn.Module):
    """Replaces a `MoE` of `numbers`, whose router and bias it takes over.

    Every rank routes all tokens and computes its features of each chosen expert; the all-reduced sum is the output.
    """

    expert_bias: Tensor

    def __init__(self, moe: MoE, numbers: Experts, *, tp: int):
        super().__init__()
        self.numbers = numbers
        self.router, self.experts = moe.router, SlicedExperts(numbers.clamp)
        self.shared_experts = moe.shared_experts  # its output is a partial sum, too
        self.register_buffer("expert_bias", moe.expert_bias)
        self.sum_of_ranks: nn.Module = AllReduce() if tp > 1 else nn.Identity()

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        ids_TK, weights_TK = self.router(x_TD, self.expert_bias)
        is_step = x_BLD.shape[1] == 1  # of decoding, or a prompt of one token
        if is_step and self._needs_fixed_shapes(x_TD):
            x_RD = x_TD[:, None].expand(*ids_TK.shape, -1).flatten(0, 1)
            x_RD = self._scaled(x_RD, weights_TK.flatten())
            out_RD = self.experts.multiply_chosen(x_RD, ids_TK.flatten())
        else:
            is_one = len(x_TD) == 1 and not x_TD.is_cuda
            rows = RowsOfOneToken(ids_TK) if is_one else SortedRows(ids_TK, self.numbers.num)
            x_RD = self._scaled(rows.of_experts(x_TD), rows.sorted(weights_TK))
            out_RD = rows.of_tokens(self.experts.multiply(x_RD, rows))
        out_TKD = out_RD.view(*ids_TK.shape, -1).float()
        if not self.numbers.scales_input:
            out_TKD = out_TKD * weights_TK[..., None]
        out_TD = out_TKD.sum(dim=1).type_as(x_TD)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD)
        out_BLD: Tensor = self.sum_of_ranks(out_TD).view_as(x_BLD)
        return out_BLD

    def _scaled(self, x_RD: Tensor, weights_R: Tensor) -> Tensor:
        """What the experts read."""
        return (x_RD * weights_R[:, None]).type_as(x_RD) if self.numbers.scales_input else x_RD

    def _needs_fixed_shapes(self, x_TD: Tensor) -> bool:
        if not (x_TD.is_cuda or torch.compiler.is_compiling()):
            return False
        # For more rows than experts, products by expert read fewer weights
        return len(x_TD) * self.numbers.top_k <= self.numbers.num or not self.experts.groups_without_sync

    def bytes_chosen(self, num: int) -> int:
        """Weights of the experts that `num` tokens choose on average if all are equally likely."""
        share = 1 - (1 - self.numbers.top_k / self.numbers.num) ** num
        return round(share * self.numbers.num * self.experts.num_bytes)


def _swiglu(gate_up_R2S: Tensor) -> Tensor:
    gate_RS, up_RS = gate_up_R2S.chunk(2, dim=-1)
    return F.silu(gate_RS) * up_RS


def _biased(out_RO: Tensor, bias_EO: Tensor | None, ids_R: Tensor) -> Tensor:
    return out_RO if bias_EO is None else out_RO + bias_EO.index_select(0, ids_R)


def _chosen_products(x_RI: Tensor, data_EOI: Tensor, scale_EO: Tensor | None, ids_R: Tensor) -> Tensor:
    """Written for torch's compiler, which makes one kernel of it: weights are selected and cast in registers."""
    out_RO = (data_EOI[ids_R].float() * x_RI.float()[:, None]).sum(dim=-1)
    if scale_EO is not None:
        out_RO = out_RO * scale_EO[ids_R].float()
    return out_RO.to(x_RI.dtype)


@cache
def _compiled_chosen_products() -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]:
    if why_inductor_cannot(torch.device("cuda")):
        return _gathered_products
    return compile_all_shapes(_chosen_products)


def _gathered_products(x_RI: Tensor, data_EOI: Tensor, scale_EO: Tensor | None, ids_R: Tensor) -> Tensor:
    out_RO = gathered_products(x_RI, ids_R, data_EOI.__getitem__, num_values=data_EOI[0].numel())
    return out_RO if scale_EO is None else (out_RO * scale_EO[ids_R]).to(x_RI.dtype)
