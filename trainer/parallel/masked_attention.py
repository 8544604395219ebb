"""The inner attention of each layer, and the masks of a forward pass: of documents, windows, chunks and sinks.

Masks are made once per forward pass, one for each window and chunk that layers have, from the documents of the batch or
microbatch at hand, and go to every layer as an argument: so recomputation and interleaved microbatches of a pipeline
always have their own.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.attention import kind_of
from trainer.models.units import ModelPart, blocks_of
from trainer.parallel.context import ContextParallelAttention, MaskedAttention
from trainer.parallel.document_attention import PerDocumentAttention, chunks_of_documents
from trainer.parallel.gpu_attention import FlexAttention, VarlenAttention

_Reach = tuple[int | None, int | None]  # window and chunk


def choose_masked_attention(kernel: str, device: torch.device) -> Callable[[int | None], MaskedAttention]:
    """The module class for `flex` or `varlen` on this device; a module takes the layer's window."""
    if device.type != "cuda":
        return PerDocumentAttention
    return VarlenAttention if kernel == "varlen" else FlexAttention


def masked_layers(
    model: ModelPart, masked: Callable[[int | None], MaskedAttention], *, has_documents: bool
) -> dict[str, MaskedAttention]:
    """The attentions of layers that need masks, by name: all with documents, else those of windows, chunks, sinks."""
    kinds = {name: kind_of(layer) for name, layer, *_ in blocks_of(model)}
    return {name: masked(kind.window) for name, kind in kinds.items() if has_documents or kind.needs_mask}


class OneOfMasks(nn.Module):
    """An inner attention with its own of the masks of all layers, if it has one."""

    def __init__(self, attend: nn.Module, number: int):
        super().__init__()
        self.attend, self.number = attend, number

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        scale: float | None = None,
        *,
        mask: tuple[Any, ...],
        **others: Any,
    ) -> Tensor:
        if (layer_mask := mask[self.number]) is not None:
            others["mask"] = layer_mask
        if scale is not None:
            others["scale"] = scale
        out_BLNH: Tensor = self.attend(q_BLNH, k_BLKH, v_BLKH, **others)
        return out_BLNH


def apply_masks(
    model: ModelPart,
    masked: Mapping[str, MaskedAttention],
    device: torch.device,
    *,
    positions_restart: bool = True,
) -> None:
    """Make the model compute with `masked`, and make the masks. After context parallelism.

    `positions_restart`: those of tokens do in each document, and chunks with them.
    """
    makers: dict[_Reach | None, tuple[int, Callable[[Tensor], Any] | None]] = {}
    cp = 1
    for name, layer, *_ in blocks_of(model):
        attention: Any = layer.attention
        reach: _Reach | None = None
        maker: Callable[[Tensor], Any] | None = None
        inner = attention.inner_attention
        if name in masked:
            reach = (kind_of(layer).window, kind_of(layer).chunk)
            if isinstance(inner, ContextParallelAttention):
                cp, maker = inner.cp, inner.make_masks
            else:
                inner, maker = masked[name], _of_whole_sequences(masked[name])
        index, _ = makers.setdefault(reach, (len(makers), maker))
        attention.inner_attention = OneOfMasks(inner, index)
    static: dict[int, tuple[Any, ...]] = {}

    def make(documents_BS: Tensor) -> tuple[Any, ...]:
        def of_reach(reach: _Reach | None, maker: Callable[[Tensor], Any] | None) -> Any:
            if reach is None or maker is None:
                return None
            _, chunk = reach
            if chunk is None:
                return maker(documents_BS)
            return maker(chunks_of_documents(documents_BS, chunk, positions_restart=positions_restart))

        return tuple(of_reach(reach, maker) for reach, (_, maker) in makers.items())

    def make_mask(documents_BS: Tensor | None, num_tokens: int = 0) -> tuple[Any, ...]:
        if documents_BS is not None:
            return make(documents_BS)
        if num_tokens not in static:
            static[num_tokens] = make(torch.zeros(1, num_tokens * cp, dtype=torch.int32, device=device))
        return static[num_tokens]

    setattr(model, "make_mask", make_mask)  # noqa: B010


def _of_whole_sequences(attend: MaskedAttention) -> Callable[[Tensor], Any]:
    return lambda documents_BS: attend.make_mask(documents_BS, num_queries=documents_BS.shape[1])


def masked_operations() -> list[Any]:
    """Operations of the modules made so far whose results are worth keeping when a layer is recomputed."""
    kept: list[Any] = [torch.ops.titan.attend_within_documents.default]
    if "torch.nn.attention.varlen" in sys.modules:  # importing what no layer uses takes seconds
        kept.append(torch.ops.torch_attn._varlen_attn.default)
    if "torch.nn.attention.flex_attention" in sys.modules:
        kept.append(sys.modules["torch._higher_order_ops.flex_attention"].flex_attention)
    return kept
