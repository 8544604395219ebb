"""Quantized weights under native names, with their codes and scales as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from converters.catalog import Box, TensorInfo
from converters.expressions import Expression, Fp8Blocks, Stack
from converters.fp8 import num_blocks
from converters.quantization import CODES
from converters.view import View

CODES_OF, SCALES_OF = "codes of ", "scales of "  # before a weight's name: what `BlocksSource` lists for it


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A weight's codes, and the scales of its blocks: of [..., rows, columns] one per `block` of the last two dims."""

    codes: Expression
    scales: Expression
    block: tuple[int, int]


class BlocksSource:
    """A view that also lists `codes of X` and `scales of X` of each weight X whose blocks are stored whole.

    Raises CheckpointError as the view does. Scales are float32.
    """

    def __init__(self, view: View):
        self._view = view
        found = {fqn: _stored_blocks(expression) for fqn, expression in view.expressions.items()}
        self.blocks: Mapping[str, StoredBlocks] = {fqn: blocks for fqn, blocks in found.items() if blocks}
        tensors = dict(view.tensors)
        for fqn, stored in self.blocks.items():
            *rest, rows, columns = view.tensors[fqn].shape
            in_blocks = (*rest, num_blocks(rows, stored.block[0]), num_blocks(columns, stored.block[1]))
            tensors[CODES_OF + fqn] = TensorInfo(CODES, view.tensors[fqn].shape)
            tensors[SCALES_OF + fqn] = TensorInfo("float32", in_blocks)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, fqn: str, box: Box) -> np.ndarray:
        """Codes as the element type that they are stored in, all else as the view reads it."""
        if fqn.startswith(CODES_OF):
            return self.blocks[fqn.removeprefix(CODES_OF)].codes.read(self._view.source, box)
        if fqn.startswith(SCALES_OF):
            scales = self.blocks[fqn.removeprefix(SCALES_OF)].scales.read(self._view.source, box)
            return scales.astype(np.float32)
        return self._view.read(fqn, box)


def _stored_blocks(expression: Expression) -> StoredBlocks | None:
    """None for weights that are not quantized, and where a block's rows are not next to each other."""
    match expression:
        case Fp8Blocks(codes, scales, block):
            return StoredBlocks(codes, scales, block)
        case Stack(parts):
            found = [stored for part in parts if (stored := _stored_blocks(part))]
            if found and len(found) == len(parts):
                of_codes, of_scales = tuple(each.codes for each in found), tuple(each.scales for each in found)
                return StoredBlocks(Stack(of_codes), Stack(of_scales), found[0].block)
    return None
