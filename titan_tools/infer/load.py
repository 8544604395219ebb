"""From a weight source of any format to this rank's model: built on meta, each parameter read as the slice it needs.

Weights are read in model order by two threads, a bounded number of bytes ahead of the one that makes of them what is
kept: joined, packed for the CPU, or quantised. So memory is the shard, the largest weight, and what lies ahead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from converters.catalog import Box, TensorSource
from converters.dtypes import itemsize
from converters.families.base import Parameter
from converters.families.registry import get_family
from converters.layout import MIB, row_blocks
from converters.model_info import ModelInfo
from titan_tools.infer.fused import fuse
from titan_tools.infer.packed import PackedWeight, can_pack
from titan_tools.infer.quantize import quantize_linears, stored_bytes
from titan_tools.infer.slices import slice_for_rank, summed_inputs, together
from titan_tools.infer.tensor_parallel import GatheredOutput, SlicedEmbedding, SummedLinear
from trainer.checkpoints.arrays import as_tensor
from trainer.models.registry import get_trainer_family

_BLOCK_BYTES = 2 * MIB  # read at once: it is cast and copied while it lies in a core's cache
_AHEAD_BYTES = 64 * MIB  # being read while the weight before is packed or quantised
_NUM_READERS = 2


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
    quantized: str | None = None


def load_model(
    source: TensorSource,
    info: ModelInfo,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tp: int = 1,
    rank: int = 0,
    quantize: str | None = None,
    fused: bool = True,
    packed: bool = True,
) -> SlicedModel:
    """Build and fill the model of `rank`. No other rank is spoken to yet; running it needs a group of `tp` ranks.

    `quantize`: "int8" or "float8", every linear layer as soon as it is read. `fused`: layers over one input are one
    product. `packed`: on a CPU weights lie as its kernels read them; such a model cannot be compiled. Packed or
    quantised, a tied output has a weight of its own beside the embedding.
    """
    args, parameters = info.args, get_family(info.family).parameters(info.args)
    with torch.device("meta"), _NoInitialValues():
        model = get_trainer_family(info.family).build_model(args)
    slices = {p.fqn: slice_for_rank(p, args, tp=tp, rank=rank) for p in parameters}
    if tp > 1:
        _make_parallel(model, parameters, tp=tp, rank=rank)
    groups = _fuse(model, parameters, slices) if fused else [(fqn,) for fqn in slices]

    def keep(name: str, weight: Tensor) -> None:
        module = model.get_submodule(name.rpartition(".")[0])
        module.weight = nn.Parameter(weight, requires_grad=False)
        if module is not model.tok_embeddings:
            _convert(module, quantize=quantize, packed=packed)

    _read_in_order(groups, slices, source, dtype, device, keep)
    model.tie()
    if args.tied:
        _convert(model.output, quantize=quantize, packed=packed)
    model.to(device)  # what it computes by itself, such as rotary frequencies
    head, model.output = model.output, None
    return SlicedModel(
        model.eval(),
        head,
        device,
        dtype,
        num_kv_heads=slices["layers.0.attention.wk.weight"].sizes[0] // args.head_dim,
        bytes_per_token=_bytes_per_token(model, head),
        quantized=quantize,
    )


class _NoInitialValues(TorchFunctionMode):
    """Passes over torch.nn.init: on meta there is nothing to fill, and its normal_ would import torch's compiler."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _make_parallel(model: nn.Module, parameters: list[Parameter], *, tp: int, rank: int) -> None:
    for name in summed_inputs(parameters):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SummedLinear(model.get_submodule(name)))
    model.tok_embeddings = SlicedEmbedding(model.tok_embeddings, tp=tp, rank=rank)
    model.output = GatheredOutput(model.output, tp=tp)


def _fuse(model: nn.Module, parameters: list[Parameter], slices: dict[str, Box]) -> list[tuple[str, ...]]:
    """Make one of the linear layers that have the same input; the FQNs of all parameters, grouped as they lie now."""
    groups: list[tuple[str, ...]] = []
    for group in together(parameters):
        paths = [fqn.removesuffix(".weight") for fqn in group]
        if len(group) > 1 and all(_is_plain(model.get_submodule(path)) for path in paths):
            parent = model.get_submodule(paths[0].rpartition(".")[0])
            fuse(parent, [path.rpartition(".")[2] for path in paths], [slices[fqn].sizes[0] for fqn in group])
            groups.append(group)
        else:
            groups += [(fqn,) for fqn in group]
    return groups


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None


def _convert(module: nn.Module, *, quantize: str | None, packed: bool) -> None:
    """Give a linear layer its weight in the form it is to be multiplied in."""
    weight = module.weight.detach()
    if weight.ndim != 2:
        return
    if quantize:
        quantize_linears(module, quantize)
    elif packed and can_pack(weight):
        del module.weight
        module.weight = PackedWeight(weight)


def _read_in_order(
    groups: Sequence[tuple[str, ...]],
    slices: dict[str, Box],
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    keep: Callable[[str, Tensor], None],
) -> None:
    """Call `keep(first name, weight)` for each group, whose slices are joined along dim 0, in the order of groups."""

    def read(target: Tensor, fqn: str, box: Box) -> None:
        target[box.slices_within(slices[fqn])].copy_(as_tensor(source.read(fqn, box), source.tensors[fqn].dtype))

    waiting: deque[tuple[str, Tensor, list[Future[None]]]] = deque()

    def keep_first() -> None:
        name, weight, reads = waiting.popleft()
        for done in reads:
            done.result()  # an error of a reader rises here
        keep(name, weight)

    pool = ThreadPoolExecutor(_NUM_READERS)
    try:
        for group in groups:
            sizes = [slices[fqn].sizes for fqn in group]
            weight = torch.empty((sum(s[0] for s in sizes), *sizes[0][1:]), dtype=dtype, device=device)
            parts = weight.split([s[0] for s in sizes])
            reads = [
                pool.submit(read, part, fqn, block)
                for fqn, part in zip(group, parts, strict=True)
                for block in _blocks(slices[fqn], source.tensors[fqn].dtype)
            ]
            waiting.append((group[0], weight, reads))
            del weight, parts, reads  # what `keep` replaces must go at once
            while len(waiting) > 1 and sum(w.nbytes for _, w, _ in waiting) - waiting[0][1].nbytes >= _AHEAD_BYTES:
                keep_first()
        while waiting:
            keep_first()
    finally:
        pool.shutdown(cancel_futures=True)


def _blocks(box: Box, dtype: str) -> Iterator[Box]:
    if box.num_elements:
        yield from row_blocks(box, itemsize(dtype), _BLOCK_BYTES)


def _bytes_per_token(body: nn.Module, head: nn.Module) -> int:
    """Of an embedding one row is read, which does not count."""
    layers = [module for module in (*body.modules(), *head.modules()) if module is not body.tok_embeddings]
    weights = {id(layer.weight): layer.weight for layer in layers if getattr(layer, "weight", None) is not None}
    return sum(w.num_bytes if isinstance(w, PackedWeight) else stored_bytes(w) for w in weights.values())
