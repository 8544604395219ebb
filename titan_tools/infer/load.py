"""From a weight source of any format to this rank's model: built on meta, each parameter read as the slice it needs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from converters.catalog import Box, TensorSource
from converters.dtypes import itemsize
from converters.families.base import Parameter
from converters.families.registry import get_family
from converters.layout import MIB, row_blocks
from converters.model_info import ModelInfo
from titan_tools.infer.slices import slice_for_rank, summed_inputs
from titan_tools.infer.tensor_parallel import GatheredOutput, SlicedEmbedding, SummedLinear
from trainer.checkpoints.arrays import as_tensor
from trainer.models.registry import get_trainer_family

BLOCK_BYTES = 32 * MIB  # what a reading thread holds beside the shard itself
NUM_READERS = 2


@dataclass(slots=True)
class SlicedModel:
    """This rank's part of the model, as plain local tensors.

    `body` maps tokens [B, L] to hidden states [B, L, D]; `head` maps the hidden states of one position [B, D] to logits
    [B, V], so that a prefill computes them for its last token only.
    """

    body: nn.Module
    head: nn.Module
    device: torch.device
    dtype: torch.dtype
    num_kv_heads: int  # that this rank holds
    bytes_per_token: int  # of weights that one decode step of one sequence reads on this rank


def load_model(
    source: TensorSource,
    info: ModelInfo,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp: int = 1,
    rank: int = 0,
    quantize: str | None = None,
) -> SlicedModel:
    """Build and fill the model of `rank`. No other rank is spoken to yet; running it needs a group of `tp` ranks."""
    args, parameters = info.args, get_family(info.family).parameters(info.args)
    with torch.device("meta"):
        model = get_trainer_family(info.family).build_model(args)
    slices = {p.fqn: slice_for_rank(p, args, tp=tp, rank=rank) for p in parameters}
    tensors = {fqn: torch.empty(box.sizes, dtype=dtype, device=device) for fqn, box in slices.items()}
    fill(tensors, slices, source)
    for fqn, tensor in tensors.items():
        module_name, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(module_name), name, nn.Parameter(tensor, requires_grad=False))
    model.tie()
    model.to(device)  # what it computes by itself, such as rotary frequencies
    if tp > 1:
        _make_parallel(model, parameters, tp=tp, rank=rank)
    head, model.output = model.output, None
    weights = {w.data_ptr(): w for w in (*model.parameters(), *head.parameters())}
    if not args.tied:
        weights.pop(model.tok_embeddings.weight.data_ptr())
    num_bytes = sum(w.numel() * w.element_size() for w in weights.values())
    num_kv_heads = slices["layers.0.attention.wk.weight"].sizes[0] // args.head_dim
    return SlicedModel(model.eval(), head, device, dtype, num_kv_heads, num_bytes)


def fill(tensors: dict[str, torch.Tensor], slices: dict[str, Box], source: TensorSource) -> None:
    """Read each slice block by block into its tensor, cast on the way; memory beside the tensors is a few blocks."""

    def read(block: tuple[str, Box]) -> None:
        fqn, box = block
        target = tensors[fqn][box.slices_within(slices[fqn])]
        target.copy_(as_tensor(source.read(fqn, box), source.tensors[fqn].dtype))

    with ThreadPoolExecutor(NUM_READERS) as pool:
        for _ in pool.map(read, _blocks(slices, source)):
            pass  # the first error rises here


def _blocks(slices: dict[str, Box], source: TensorSource) -> Iterator[tuple[str, Box]]:
    for fqn, box in slices.items():
        if box.num_elements:
            for block in row_blocks(box, itemsize(source.tensors[fqn].dtype), BLOCK_BYTES):
                yield fqn, block


def _make_parallel(model: nn.Module, parameters: list[Parameter], *, tp: int, rank: int) -> None:
    for name in summed_inputs(parameters):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SummedLinear(model.get_submodule(name)))
    model.tok_embeddings = SlicedEmbedding(model.tok_embeddings, tp=tp, rank=rank)
    model.output = GatheredOutput(model.output, tp=tp)
