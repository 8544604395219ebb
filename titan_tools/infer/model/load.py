"""Build a rank's model on the meta device and read the slice of each parameter from a checkpoint of any format.

A weight is fused, packed for the CPU or quantized as soon as it is read, so that memory is the shard, the largest
weight, and the blocks that are being read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from converters.catalog import Box, TensorSource
from converters.families.base import Parameter
from converters.families.registry import get_family
from converters.model_info import ModelInfo
from titan_tools.infer.model.linear import (
    FusedLinear,
    PackedWeight,
    WidenedWeight,
    can_fuse,
    can_pack,
    fuse,
)
from titan_tools.infer.model.quantize import QuantizedWeight, quantize_weight
from titan_tools.infer.model.reading import Joined, joined_shape, read_in_order
from titan_tools.infer.model.tensor_parallel import (
    GatheredOutput,
    SlicedEmbedding,
    SummedLinear,
    same_input,
    slice_for_rank,
    summed_inputs,
)
from trainer.models.registry import check_parameters, get_trainer_family
from trainer.parallel.cpu_products import multiplies

_FEW = 4 << 20  # elements of a fused weight that are always allowed, however small the other weights are


@dataclass(slots=True)
class SlicedModel:
    """This rank's part of the model, as plain local tensors.

    `body` maps tokens [B, L] to hidden states [B, L, D]; `head` maps the hidden states of one position [B, D] to logits
    [B, V], so that a prefill computes logits for its last token only.
    """

    body: nn.Module
    head: nn.Module
    device: torch.device
    dtype: torch.dtype
    num_kv_heads: int  # of this rank
    head_dim: int
    bytes_per_token: int  # weights that a decode step of one sequence reads on this rank
    quantized: str | None = None

    @property
    def bytes_per_cached_token(self) -> int:
        """Keys and values of a token, in all layers on this rank."""
        num_layers = len(self.body.get_submodule("layers"))  # type: ignore[arg-type]  # a ModuleDict
        return 2 * num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


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
    """Build and fill the model of `rank`, without communication; running it needs a process group of `tp` ranks.

    `quantize`: "int8" or "float8", of all linear layers. `fused`: layers with the same input are one product. `packed`:
    on a CPU weights are stored in the layout of its kernels, or multiplied in fp32 where it has none for the dtype;
    such a model cannot be compiled. Packed or quantized, a tied output has a weight of its own.
    """
    args, parameters = info.args, get_family(info.family).parameters(info.args)
    with torch.device("meta"), _NoInitialValues():
        model: Any = get_trainer_family(info.family).build_model(args)
    check_parameters(model, parameters, family=info.family)
    slices = {p.fqn: slice_for_rank(p, args, tp=tp, rank=rank) for p in parameters}
    if tp > 1:
        _make_parallel(model, parameters, tp=tp, rank=rank)
    # On a CPU packing needs memory for the whole fused weight: it may not exceed the largest slice
    most = max(_FEW, *(box.num_elements for box in slices.values())) if device.type == "cpu" else None
    groups = _fuse(model, parameters, slices, most=most) if fused else [(fqn,) for fqn in slices]

    def form_of(shape: tuple[int, ...]) -> Callable[[Tensor], Any] | None:
        """The function that packs or quantizes a linear layer's weight; None: it stays as it is."""
        if quantize:
            return partial(quantize_weight, how=quantize)
        if packed and can_pack(shape, dtype, device):
            return PackedWeight
        return WidenedWeight if packed and not multiplies(dtype, device) else None

    def form_of_group(fqns: tuple[str, ...]) -> Callable[[Tensor], Any] | None:
        module, name = _owner(model, fqns[0])
        is_weight = name == "weight" and isinstance(module, nn.Linear | SummedLinear | GatheredOutput | FusedLinear)
        return form_of(joined_shape([slices[fqn] for fqn in fqns])) if is_weight else None

    forms = {fqns: form_of_group(fqns) for fqns in groups}
    wanted = [Joined(fqns, is_temporary=form not in (None, WidenedWeight)) for fqns, form in forms.items()]
    for joined, values in read_in_order(wanted, slices, source, dtype=dtype, device=device):
        module, name = _owner(model, joined.fqns[0])
        setattr(module, name, nn.Parameter(values, requires_grad=False))
        if form := forms[joined.fqns]:
            _convert(module, form)
        del values  # before the next weight is allocated
    model.tie()
    if args.tied and (form := form_of(model.output.weight.shape)):
        _convert(model.output, form)
    model.to(device)  # its buffers, such as rotary frequencies
    head, model.output = model.output, None
    return SlicedModel(
        model.eval(),
        head,
        device,
        dtype,
        num_kv_heads=slices["layers.0.attention.wk.weight"].sizes[0] // args.head_dim,
        head_dim=args.head_dim,
        bytes_per_token=_bytes_per_token(model, head),
        quantized=quantize,
    )


class _NoInitialValues(TorchFunctionMode):
    """Skips torch.nn.init: on meta there is nothing to fill, and its normal_ would import torch's compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def _make_parallel(model: Any, parameters: list[Parameter], *, tp: int, rank: int) -> None:
    for name in summed_inputs(parameters):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SummedLinear(model.get_submodule(name), tp=tp))
    model.tok_embeddings = SlicedEmbedding(model.tok_embeddings, tp=tp, rank=rank)
    model.output = GatheredOutput(model.output, tp=tp)


def _fuse(
    model: nn.Module, parameters: list[Parameter], slices: dict[str, Box], *, most: int | None
) -> list[tuple[str, ...]]:
    """Fuse the linear layers that have the same input; returns the FQNs of all parameters, grouped by tensor.

    `most`: elements that a fused weight may have.
    """
    group_of: dict[str, tuple[str, ...]] = {}
    for paths in same_input(parameters):
        num = sum(slices[f"{path}.weight"].num_elements for path in paths)
        if (most is None or num <= most) and can_fuse([model.get_submodule(path) for path in paths]):
            parent, names = paths[0].rpartition(".")[0], [path.rpartition(".")[2] for path in paths]
            fuse(model.get_submodule(parent), names, [slices[f"{path}.weight"].sizes[0] for path in paths])
            for name in ("weight", "bias"):
                group = tuple(f"{path}.{name}" for path in paths)
                group_of |= dict.fromkeys(group, group)
    return list(dict.fromkeys(group_of.get(p.fqn, (p.fqn,)) for p in parameters))


def _owner(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the parameter's name in it."""
    path, _, name = fqn.rpartition(".")
    return model.get_submodule(path), name


def _convert(linear: Any, form: Callable[[Tensor], Any]) -> None:
    """Replace a linear layer's weight by its packed or quantized form."""
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = form(weight)


def _bytes_per_token(body: nn.Module, head: nn.Module) -> int:
    """Weights that a decode step reads, without the embedding, of which it reads one row."""
    layers = [module for module in (*body.modules(), *head.modules()) if module is not body.tok_embeddings]
    plain = {id(p): p.nbytes for layer in layers for p in layer.parameters(recurse=False)}
    weights = [getattr(layer, "weight", None) for layer in layers]
    converted = (PackedWeight, QuantizedWeight, WidenedWeight)
    return sum(plain.values()) + sum(weight.num_bytes for weight in weights if isinstance(weight, converted))
