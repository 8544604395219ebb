"""From a weight source of any format to this rank's model: built on meta, each parameter read as the slice it needs.

As soon as a weight is read it becomes what is kept of it: joined with others, packed for the CPU, or quantised. So
memory is the shard, the largest weight, and what is being read meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from converters.catalog import Box, TensorSource
from converters.families.base import Parameter
from converters.families.registry import get_family
from converters.model_info import ModelInfo
from titan_tools.infer.model.fused import fuse
from titan_tools.infer.model.packed import PackedWeight, can_pack
from titan_tools.infer.model.quantize import quantize_linears, stored_bytes
from titan_tools.infer.model.reading import Joined, joined_shape, read_in_order
from titan_tools.infer.model.slices import slice_for_rank, summed_inputs, together
from titan_tools.infer.model.tensor_parallel import GatheredOutput, SlicedEmbedding, SummedLinear
from trainer.models.registry import get_trainer_family


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

    def is_converted(module: nn.Module, shape: tuple[int, ...]) -> bool:
        is_linear = len(shape) == 2 and module is not model.tok_embeddings
        return is_linear and (quantize is not None or (packed and can_pack(shape, dtype, device)))

    shapes = {fqns: joined_shape([slices[fqn] for fqn in fqns]) for fqns in groups}
    wanted = [Joined(fqns, is_passing=is_converted(_owner(model, fqns[0]), shapes[fqns])) for fqns in groups]
    for joined, weight in read_in_order(wanted, slices, source, dtype=dtype, device=device):
        module = _owner(model, joined.fqns[0])
        module.weight = nn.Parameter(weight, requires_grad=False)
        if joined.is_passing:
            _convert(module, quantize)
    model.tie()
    if args.tied and is_converted(model.output, model.output.weight.shape):
        _convert(model.output, quantize)
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
        setattr(model.get_submodule(parent), child, SummedLinear(model.get_submodule(name), tp=tp))
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


def _owner(model: nn.Module, fqn: str) -> nn.Module:
    return model.get_submodule(fqn.rpartition(".")[0])


def _convert(linear: nn.Module, quantize: str | None) -> None:
    """Give a linear layer a weight of its own in the form it is to be multiplied in."""
    if quantize:
        quantize_linears(linear, quantize)
        return
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = PackedWeight(weight)


def _bytes_per_token(body: nn.Module, head: nn.Module) -> int:
    """Of an embedding one row is read, which does not count."""
    layers = [module for module in (*body.modules(), *head.modules()) if module is not body.tok_embeddings]
    weights = {id(layer.weight): layer.weight for layer in layers if getattr(layer, "weight", None) is not None}
    return sum(w.num_bytes if isinstance(w, PackedWeight) else stored_bytes(w) for w in weights.values())
