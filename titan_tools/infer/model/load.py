"""Build a rank's model on the meta device and read the slice of each parameter from a checkpoint of any format.

A weight is fused, packed for the CPU or quantized as soon as it is read, and so is each expert's, so that memory is the
shard, the largest weight, and the blocks that are being read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from converters.common.box import Box, TensorSource
from converters.common.errors import UnsupportedError
from converters.families.args import DecoderArgs
from converters.families.blocks import Block, Experts, GroupedQuery, Latent
from converters.families.parameters import Parameter, Role
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.quantized.stored_blocks import BlocksSource
from titan_tools.infer.model.experts import RoutedExperts, SlicedExperts, StoredExperts
from titan_tools.infer.model.fp8_blocks import choose_products
from titan_tools.infer.model.latent_attention import LatentAttention
from titan_tools.infer.model.linear import FusedLinear, PackedWeight, WidenedWeight, can_fuse, can_pack, fuse
from titan_tools.infer.model.quantize import STORED, QuantizedWeight, quantize_weight
from titan_tools.infer.model.reach import MOST_MARKS, Reach, reach_of
from titan_tools.infer.model.reading import Joined, read_in_order
from titan_tools.infer.model.stored_weight import StoredWeight, reads_of, slice_of
from titan_tools.infer.model.tensor_parallel import (
    GatheredOutput,
    SlicedEmbedding,
    SummedLinear,
    same_input,
    slice_for_rank,
    summed_inputs,
)
from trainer.models.moe import MoE
from trainer.models.registry import check_parameters, get_trainer_family
from trainer.parallel.cpu_products import multiplies

_FEW = 4 << 20  # elements of a fused weight that are always allowed, however small the other weights are
_IN_FP32 = (Role.ROUTER, Role.ROUTER_BIAS)  # whatever the dtype of the computation


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
    num_kv_heads: int  # in this rank's cache
    head_dim: int
    bytes_per_token: int  # weights that a decode step of one sequence reads on this rank, without experts
    experts: tuple[RoutedExperts, ...] = ()  # the layers that have some
    latent: Latent | None = None  # the attention, where one key is cached for all heads, and values are a part of it
    attentions: tuple[Latent | GroupedQuery, ...] = ()  # of every layer
    quantized: str | None = None

    @property
    def has_sinks(self) -> bool:
        return any(isinstance(attention, GroupedQuery) and attention.has_sinks for attention in self.attentions)

    def reaches(self, room: int) -> list[Reach]:
        """The reach of every layer, in rows of `room` tokens."""
        return [reach_of(attention, room) for attention in self.attentions]

    def cache_bytes(self, room: int) -> int:
        """Keys and values of a row of `room` tokens in all layers on this rank, with the copies of its windows."""
        copies = 1 + MOST_MARKS
        return self._bytes_of(sum(reach.size * (copies if reach.is_window else 1) for reach in self.reaches(room)))

    def cache_bytes_seen(self, num: int) -> int:
        """Keys and values that the last of `num` tokens sees, in all layers on this rank."""
        return self._bytes_of(sum(reach.num_seen(num - 1) for reach in self.reaches(num)))

    def _bytes_of(self, num_tokens: int) -> int:
        per_head = self.head_dim if self.latent else 2 * self.head_dim
        return num_tokens * self.num_kv_heads * per_head * self.dtype.itemsize

    def expert_bytes(self, num: int) -> int:
        """Weights of the experts that a decode step of `num` sequences chooses on average if all are equally likely."""
        return sum(layer.bytes_chosen(num) for layer in self.experts)


def numbers_of(info: ModelInfo) -> DecoderArgs:
    """The numbers of a model that predicts the next token. Raises UnsupportedError for another one."""
    objective = get_trainer_family(info.family).objective
    if objective is not None:
        raise UnsupportedError(f"models of family {info.family!r} learn {objective.unit}, not the next token")
    return info.decoder


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

    `quantize`: "int8" or "float8", of all linear layers and experts; or "stored", of a `BlocksSource`: its blocks of
    codes are kept, all other weights stay as they are. `fused`: layers with the same input are one
    product. `packed`: on a CPU weights are stored in the layout of its kernels, or multiplied in fp32 where it has none
    for the dtype; such a model cannot be compiled. Packed or quantized, a tied output has a weight of its own.
    """
    args, family = numbers_of(info), get_family(info.family)
    parameters, blocks = family.parameters(args), family.blocks(args)
    model: Any = _empty_model(info, parameters)
    slices = {p.fqn: slice_for_rank(p, args, tp=tp, rank=rank) for p in parameters}
    _replace_experts(model, blocks, tp=tp)
    _replace_latent_attention(model, blocks)
    if tp > 1:
        _make_parallel(model, parameters, tp=tp, rank=rank)
    latent = blocks[0].latent
    num_kv_heads = _num_kv_heads(slices, info, latent)
    single = [p for p in parameters if p.expert_dim is None]
    stored_blocks = source if isinstance(source, BlocksSource) and quantize == STORED else None
    group_of = _expert_groups(parameters)
    if fused and not stored_blocks:  # layers' blocks need not end where layers do
        # On a CPU packing needs memory for the whole fused weight: it may not exceed the largest slice
        most = max(_FEW, *(slices[p.fqn].num_elements for p in single)) if device.type == "cpu" else None
        group_of |= _fuse(model, single, slices, most=most)

    # Packed fp32 weights are faster for several rows of activations, and an expert has one or few in a decode step
    stays_plain = len(single) < len(parameters) and dtype == torch.float32
    forms = _Forms(dtype, device, None if quantize == STORED else quantize, packed, may_pack=packed and not stays_plain)
    reads = _Reads(model, forms, stored_blocks, is_first=rank == 0)
    parameter_of = {p.fqn: p for p in parameters}
    # Decode steps take a head's rows of these
    read_by_head = {f"layers.{n}.attention.wkv_b.weight" for n, block in enumerate(blocks) if block.latent}
    for fqns in dict.fromkeys(group_of.get(p.fqn, (p.fqn,)) for p in parameters):
        boxes = tuple((fqn, slices[fqn]) for fqn in fqns)
        reads.add(parameter_of[fqns[0]], boxes, is_plain=fqns[0] in read_by_head)
    for joined, values in read_in_order([*reads.places], source, device=device):
        reads.places[joined](values)
        del values  # before the next weight is allocated
    model.tie()
    if args.tied and (form := forms.of_linear(model.output.weight.shape)):
        _convert(model.output, form)
    model.to(device)  # its buffers, such as rotary frequencies
    choose_products(model, dtype)
    head, model.output = model.output, None
    return SlicedModel(
        model.eval(),
        head,
        device,
        dtype,
        num_kv_heads=num_kv_heads,
        head_dim=latent.kv_rank + latent.rotary_dim if latent else args.head_dim,
        bytes_per_token=_bytes_per_token(model, head),
        experts=tuple(module for module in model.modules() if isinstance(module, RoutedExperts)),
        latent=latent,
        attentions=tuple(block.attention for block in blocks),
        quantized=quantize,
    )


def _empty_model(info: ModelInfo, parameters: Sequence[Parameter]) -> nn.Module:
    """The trainer's model on the meta device."""
    with torch.device("meta"), _NoInitialValues():
        model = get_trainer_family(info.family).build_model(info.args)
    check_parameters(model, parameters, family=info.family)
    return model


@dataclass(frozen=True, slots=True)
class _Forms:
    """What becomes of the weights that were read."""

    dtype: torch.dtype
    device: torch.device
    quantize: str | None  # "int8" or "float8"
    packed: bool  # see load_model
    may_pack: bool

    def of_linear(self, shape: tuple[int, ...]) -> Callable[[Tensor], Any] | None:
        """The function that packs or quantizes a linear layer's weight; None: it stays as it is."""
        if self.quantize:
            return partial(quantize_weight, how=self.quantize)
        if self.may_pack and can_pack(shape, self.dtype, self.device):
            return PackedWeight
        return WidenedWeight if self.packed and not multiplies(self.dtype, self.device) else None


@dataclass(frozen=True, slots=True)
class _Reads:
    """What is read for a model's weights: `places` has the function that is called with its values."""

    model: nn.Module
    forms: _Forms
    kept: BlocksSource | None  # the source, if its blocks of codes are kept
    is_first: bool  # this rank
    places: dict[Joined, Callable[[Tensor], None]] = field(default_factory=dict)

    def add(self, parameter: Parameter, boxes: tuple[tuple[str, Box], ...], *, is_plain: bool) -> None:
        """Boxes of parameters that are one weight, and the first of these; `is_plain`: it stays as it is."""
        module, name = _owner(self.model, parameter.fqn)
        is_plain = is_plain or parameter.role in _IN_FP32
        if isinstance(module, SlicedExperts):
            name = "down" if parameter.role is Role.EXPERT_ROW else "gate_up"
            if parameter.is_bias:
                if name == "gate_up" or self.is_first:  # the ranks' outputs are added
                    self.places[Joined(boxes, self.forms.dtype)] = partial(setattr, module, f"{name}_bias")
                return
        if self.kept and not is_plain and all(fqn in self.kept.blocks for fqn, _ in boxes):
            self._keep_blocks(module, name, boxes, self.kept)
        elif isinstance(module, SlicedExperts):
            self._add_experts(module, name, boxes)
        else:
            is_linear = name == "weight" and isinstance(module, nn.Linear | SummedLinear | GatheredOutput | FusedLinear)
            dtype = torch.float32 if parameter.role in _IN_FP32 else self.forms.dtype
            joined = Joined(boxes, dtype)
            form = self.forms.of_linear(joined.shape) if is_linear and not is_plain else None
            self.places[replace(joined, is_temporary=_is_converted(form))] = partial(_set, module, name, form)

    def _add_experts(self, module: SlicedExperts, name: str, boxes: tuple[tuple[str, Box], ...]) -> None:
        whole = Joined(boxes, self.forms.dtype, dim=1)
        form = self.forms.of_linear(whole.shape[1:])
        stacked = self.forms.device.type != "cpu" or not self.forms.packed
        self.places.update(module.reads(name, whole, form, is_temporary=_is_converted(form), stacked=stacked))

    def _keep_blocks(self, module: Any, name: str, boxes: tuple[tuple[str, Box], ...], source: BlocksSource) -> None:
        """Give a linear layer, or experts, a weight of blocks, which are read later."""
        slices = [slice_of(fqn, box, source) for fqn, box in boxes]
        if isinstance(module, SlicedExperts):
            setattr(module, name, StoredExperts(slices))
        else:
            delattr(module, name)
            setattr(module, name, StoredWeight(slices))
        for blocks, (fqn, box) in zip(slices, boxes, strict=True):
            self.places.update(reads_of(blocks, fqn, box, source))


def _num_kv_heads(slices: Mapping[str, Box], info: ModelInfo, latent: Latent | None) -> int:
    """Heads of the cache on this rank. Raises UnsupportedError for a family whose keys and values it cannot store."""
    if latent:
        return 1
    k, v = (slices.get(f"layers.0.attention.{name}.weight") for name in ("wk", "wv"))
    if k is None or v is None or k.sizes[0] != v.sizes[0] or k.sizes[0] % info.decoder.head_dim:
        raise UnsupportedError(
            f"family {info.family!r}: the cache of `titan infer` stores heads of layers.N.attention.wk and wv, both"
            f" {info.decoder.head_dim} wide, and this family has others"
        )
    return k.sizes[0] // info.decoder.head_dim


class _NoInitialValues(TorchFunctionMode):
    """Skips torch.nn.init: on meta there is nothing to fill, and its normal_ would import torch's compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def _replace_experts(model: Any, blocks: Sequence[Block], *, tp: int) -> None:
    for number, layer in model.layers.items():
        numbers = blocks[int(number)].feed_forward
        for name, module in list(layer.named_children()):
            if isinstance(module, MoE) and isinstance(numbers, Experts):
                setattr(layer, name, RoutedExperts(module, numbers, tp=tp))


def _replace_latent_attention(model: Any, blocks: Sequence[Block]) -> None:
    for number, layer in model.layers.items():
        if latent := blocks[int(number)].latent:
            layer.attention = LatentAttention(layer.attention, latent)


def _expert_groups(parameters: list[Parameter]) -> dict[str, tuple[str, ...]]:
    """FQN → the FQNs of the stacked matrices that are multiplied in one product: gates, then what they multiply."""
    groups: dict[str, tuple[str, ...]] = {}
    for role in (Role.EXPERT_COLUMN, Role.EXPERT_UP_COLUMN):
        for p in parameters:
            if p.role is role:
                groups[p.module] = (*groups.get(p.module, ()), p.fqn)
    return {fqn: group for group in groups.values() for fqn in group}


def _make_parallel(model: Any, parameters: list[Parameter], *, tp: int, rank: int) -> None:
    mixtures = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, RoutedExperts))
    for name in summed_inputs(parameters):
        if name.startswith(mixtures):
            continue  # it sums the outputs of all its experts at once
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SummedLinear(model.get_submodule(name)))
    model.tok_embeddings = SlicedEmbedding(model.tok_embeddings, tp=tp, rank=rank)
    model.output = GatheredOutput(model.output, tp=tp)


def _fuse(
    model: nn.Module, parameters: list[Parameter], slices: dict[str, Box], *, most: int | None
) -> dict[str, tuple[str, ...]]:
    """Fuse the linear layers that have the same input; returns FQN → the FQNs that are one tensor now.

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
    return group_of


def _owner(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the parameter's name in it."""
    path, _, name = fqn.rpartition(".")
    return model.get_submodule(path), name


def _set(module: nn.Module, name: str, form: Callable[[Tensor], Any] | None, values: Tensor) -> None:
    is_buffer = name in dict(module.named_buffers(recurse=False))
    setattr(module, name, values if is_buffer else nn.Parameter(values, requires_grad=False))
    if form:
        _convert(module, form)


def _is_converted(form: Callable[[Tensor], Any] | None) -> bool:
    """Whether the values that were read are freed: a widened weight keeps them."""
    return form not in (None, WidenedWeight)


def _convert(linear: Any, form: Callable[[Tensor], Any]) -> None:
    """Replace a linear layer's weight by its packed or quantized form."""
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = form(weight)


def _bytes_per_token(body: nn.Module, head: nn.Module) -> int:
    """Weights that every decode step reads: without experts, and without the embedding, of which it reads one row."""
    layers = [module for module in (*body.modules(), *head.modules()) if module is not body.tok_embeddings]
    plain = {id(p): p.nbytes for layer in layers for p in layer.parameters(recurse=False)}
    weights = [getattr(layer, "weight", None) for layer in layers]
    converted = (StoredWeight, PackedWeight, QuantizedWeight, WidenedWeight)
    return sum(plain.values()) + sum(w.num_bytes for w in weights if isinstance(w, converted))
