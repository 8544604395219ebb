"""A weight that stays in memory as its checkpoint stores it, in either format of blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from converters.common.box import Box
from converters.quantized.stored_blocks import MXFP4, BlocksSource
from titan_tools.infer.model.fp8_blocks import Fp8Slice, Reads, fp8_reads, fp8_slice
from titan_tools.infer.model.linear import LinearWeight
from titan_tools.infer.model.mxfp4_blocks import Mxfp4Slice, mxfp4_reads, mxfp4_slice

StoredSlice = Fp8Slice | Mxfp4Slice


class StoredWeight(LinearWeight, nn.Module):
    """A weight [N, K] of slices that follow each other along N."""

    def __init__(self, slices: Sequence[StoredSlice]):
        super().__init__()
        self.slices = nn.ModuleList(slices)

    @property
    def shape(self) -> torch.Size:
        shapes = [each.shape for each in self._slices()]
        return torch.Size((sum(rows for rows, _ in shapes), shapes[0][1]))

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._slices())

    def _slices(self) -> list[StoredSlice]:
        return list(self.slices)  # type: ignore[arg-type]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = [part for each in self._slices() for part in each.products(x.flatten(0, -2))]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias


def slice_of(fqn: str, box: Box, source: BlocksSource) -> StoredSlice:
    """An empty slice for `box`."""
    stored = source.blocks[fqn]
    return mxfp4_slice(box) if stored.format == MXFP4 else fp8_slice(box, stored.block)


def reads_of(weight: StoredSlice, fqn: str, box: Box, source: BlocksSource) -> Reads:
    """What to read for the slice `box` of a weight, of three dims for stacked experts, and what to call with it."""
    if isinstance(weight, Mxfp4Slice):
        return mxfp4_reads(weight, fqn, box)
    return fp8_reads(weight, fqn, box)
