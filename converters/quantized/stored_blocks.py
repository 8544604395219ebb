"""Quantized weights under native names, with their codes and scales as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from converters.common.box import Box, TensorInfo
from converters.common.errors import CheckpointError
from converters.quantized.quantization import CODES
from converters.views.expressions import Expression, Fp8Blocks, Mxfp4Blocks, Stack
from converters.views.fp8 import num_blocks
from converters.views.mxfp4 import BLOCK, CODE_BYTES, NOT_A_NUMBER
from converters.views.view import View, require_finite

FP8, MXFP4 = "float8", "mxfp4"  # StoredBlocks.format
CODES_OF, SCALES_OF = "codes of ", "scales of "  # before a weight's name: what `BlocksSource` lists for it


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A weight's codes, and the scales of its blocks: of [..., rows, columns] one per `block` of the last two dims.

    In mxfp4 the codes of a block are bytes of a dim of their own, [..., rows, blocks, 16].
    """

    codes: Expression
    scales: Expression
    block: tuple[int, int]
    format: str = FP8


class BlocksSource:
    """A view that also lists `codes of X` and `scales of X` of each weight X whose blocks are stored whole.

    Raises CheckpointError as the view does, and for codes and scales that are NaN. Scales are float32, those of mxfp4
    bytes.
    """

    def __init__(self, view: View):
        self._view = view
        blocks_of = {fqn: _stored_blocks(expression) for fqn, expression in view.expressions.items()}
        self.blocks: Mapping[str, StoredBlocks] = {fqn: blocks for fqn, blocks in blocks_of.items() if blocks}
        tensors = dict(view.tensors)
        for fqn, stored in self.blocks.items():
            *lead, rows, columns = view.tensors[fqn].shape
            in_blocks = (*lead, num_blocks(rows, stored.block[0]), num_blocks(columns, stored.block[1]))
            if stored.format == MXFP4:
                tensors[CODES_OF + fqn] = TensorInfo("uint8", (*in_blocks, CODE_BYTES))
                tensors[SCALES_OF + fqn] = TensorInfo("uint8", in_blocks)
                continue
            tensors[CODES_OF + fqn] = TensorInfo(CODES, view.tensors[fqn].shape)
            tensors[SCALES_OF + fqn] = TensorInfo("float32", in_blocks)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, fqn: str, box: Box) -> np.ndarray:
        """Codes as the element type that they are stored in, all else as the view reads it."""
        if fqn.startswith(CODES_OF):
            codes = self.blocks[fqn.removeprefix(CODES_OF)].codes.read(self._view.source, box)
            require_finite(fqn, codes)
            return codes
        if fqn.startswith(SCALES_OF):
            stored = self.blocks[fqn.removeprefix(SCALES_OF)]
            scales = stored.scales.read(self._view.source, box)
            require_finite(fqn, scales)
            if stored.format == FP8:
                return scales.astype(np.float32)
            if (scales == NOT_A_NUMBER).any():
                raise CheckpointError(f"{fqn} has a scale of {NOT_A_NUMBER}, which stands for NaN")
            return scales
        return self._view.read(fqn, box)

    @property
    def format(self) -> str | None:
        """The format of the blocks: that of the first weight that has some."""
        return next((stored.format for stored in self.blocks.values()), None)


def _stored_blocks(expression: Expression) -> StoredBlocks | None:
    """None for weights that are not quantized, and if a block's rows are not next to each other."""
    match expression:
        case Fp8Blocks(codes, scales, block):
            return StoredBlocks(codes, scales, block)
        case Mxfp4Blocks(codes, scales):
            return StoredBlocks(codes, scales, (1, BLOCK), MXFP4)
        case Stack(parts):
            stored_parts = [stored for part in parts if (stored := _stored_blocks(part))]
            if (
                stored_parts
                and len(stored_parts) == len(parts)
                and len({(each.format, each.block) for each in stored_parts}) == 1
            ):
                of_codes, of_scales = (
                    tuple(each.codes for each in stored_parts),
                    tuple(each.scales for each in stored_parts),
                )
                return StoredBlocks(Stack(of_codes), Stack(of_scales), stored_parts[0].block, stored_parts[0].format)
    return None
