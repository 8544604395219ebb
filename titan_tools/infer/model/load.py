"""Build a rank's model on the meta device and read the slice of each parameter from a checkpoint of any format.

A weight is fused, packed for the CPU or quantized as soon as it is read, and so is each expert's, so that memory is the
shard, the largest weight, and the blocks that are being read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from converters.common.box import Box, TensorSource
from converters.common.errors import UnsupportedError
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
from titan_tools.infer.model.stored_weight import StoredSlice, StoredWeight, reads_of, slice_of
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
        return any(isinstance(one, GroupedQuery) and one.has_sinks for one in self.attentions)

    def reaches(self, room: int) -> list[Reach]:
        """The reach of every layer, in rows of `room` tokens."""
        return [reach_of(attention, room) for attention in self.attentions]

    def cache_bytes(self, room: int) -> int:
        """Keys and values of a row of `room` tokens in all layers on this rank, with the copies of its windows."""
        copies = 1 + MOST_MARKS
        return self._bytes_of(sum(each.size * (copies if each.is_window else 1) for each in self.reaches(room)))

    def cache_bytes_seen(self, num: int) -> int:
        """Keys and values that the last of `num` tokens sees, in all layers on this rank."""
        return self._bytes_of(sum(each.num_seen(num - 1) for each in self.reaches(num)))

    def _bytes_of(self, num_tokens: int) -> int:
        per_head = self.head_dim if self.latent else 2 * self.head_dim
        return num_tokens * self.num_kv_heads * per_head * self.dtype.itemsize

    def expert_bytes(self, num: int) -> int:
        """Weights of the experts that a decode step of `num` sequences chooses on average if all are equally likely."""
        return sum(layer.bytes_chosen(num) for layer in self.experts)


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
    args, family, trained = info.args, get_family(info.family), get_trainer_family(info.family)
    if trained.objective is not None:
        raise UnsupportedError(f"models of family {family.name!r} learn {trained.objective.unit}, not the next token")
    parameters = family.parameters(args)
    with torch.device("meta"), _NoInitialValues():
        model: Any = trained.build_model(args)
    check_parameters(model, parameters, family=info.family)
    slices = {p.fqn: slice_for_rank(p, args, tp=tp, rank=rank) for p in parameters}
    blocks = family.blocks(args)
    _replace_experts(model, blocks, tp=tp)
    _replace_latent_attention(model, blocks)
    if tp > 1:
        _make_parallel(model, parameters, tp=tp, rank=rank)
    num_kv_heads = _num_kv_heads(slices, info, blocks[0].latent)
    single = [p for p in parameters if p.expert_dim is None]
    # On a CPU packing needs memory for the whole fused weight: it may not exceed the largest slice
    most = max(_FEW, *(slices[p.fqn].num_elements for p in single)) if device.type == "cpu" else None
    blocks_source = source if isinstance(source, BlocksSource) and quantize == STORED else None
    joins = fused and not blocks_source  # layers' blocks need not end where layers do
    group_of = _expert_groups(parameters) | (_fuse(model, single, slices, most=most) if joins else {})

    # Packed fp32 weights are faster for several rows of activations, and an expert has one or few in a decode step
    stays_plain = len(single) < len(parameters) and dtype == torch.float32

    def form_of(shape: tuple[int, ...]) -> Callable[[Tensor], Any] | None:
        """The function that packs or quantizes a linear layer's weight; None: it stays as it is."""
        if quantize and quantize != STORED:
            return partial(quantize_weight, how=quantize)
        if packed and can_pack(shape, dtype, device) and not stays_plain:
            return PackedWeight
        return WidenedWeight if packed and not multiplies(dtype, device) else None

    places: dict[Joined, Callable[[Tensor], None]] = {}  # what is read, and what is called with its values
    roles, biases = {p.fqn: p.role for p in parameters}, {p.fqn for p in parameters if p.is_bias}
    # Decode steps take a head's rows of these
    read_by_head = {f"layers.{n}.attention.wkv_b.weight" for n, block in enumerate(blocks) if block.latent}
    for fqns in dict.fromkeys(group_of.get(p.fqn, (p.fqn,)) for p in parameters):
        module, name = _owner(model, fqns[0])
        boxes, role = tuple((fqn, slices[fqn]) for fqn in fqns), roles[fqns[0]]
        is_linear = name == "weight" and isinstance(module, nn.Linear | SummedLinear | GatheredOutput | FusedLinear)
        is_plain = role in _IN_FP32 or fqns[0] in read_by_head
        if isinstance(module, SlicedExperts):
            name = "down" if role is Role.EXPERT_ROW else "gate_up"
            if fqns[0] in biases:
                if name == "gate_up" or rank == 0:  # the ranks' outputs are added
                    places[Joined(boxes, dtype)] = partial(setattr, module, f"{name}_bias")
                continue
        if blocks_source and not is_plain and blocks_source.blocks.keys() >= set(fqns):
            kept = [(slice_of(fqn, box, blocks_source), fqn, box) for fqn, box in boxes]
            _keep_blocks(module, name, [each for each, _, _ in kept])
            for each, fqn, box in kept:
                places |= reads_of(each, fqn, box, blocks_source)
            continue
        if isinstance(module, SlicedExperts):
            whole = Joined(boxes, dtype, dim=1)
            form = form_of(whole.shape[1:])
            stacked = device.type != "cpu" or not packed
            places |= module.reads(name, whole, form, is_temporary=_is_converted(form), stacked=stacked)
            continue
        joined = Joined(boxes, torch.float32 if role in _IN_FP32 else dtype)
        form = form_of(joined.shape) if is_linear and not is_plain else None
        places[replace(joined, is_temporary=_is_converted(form))] = partial(_set, module, name, form)
    for joined, values in read_in_order([*places], source, device=device):
        places[joined](values)
        del values  # before the next weight is allocated
    model.tie()
    if args.tied and (form := form_of(model.output.weight.shape)):
        _convert(model.output, form)
    model.to(device)  # its buffers, such as rotary frequencies
    choose_products(model, dtype)
    head, model.output = model.output, None
    latent = blocks[0].latent
    head_dim = latent.kv_rank + latent.rotary_dim if latent else args.head_dim
    return SlicedModel(
        model.eval(),
        head,
        device,
        dtype,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bytes_per_token=_bytes_per_token(model, head),
        experts=tuple(module for module in model.modules() if isinstance(module, RoutedExperts)),
        latent=latent,
        attentions=tuple(block.attention for block in blocks),
        quantized=quantize,
    )


def _num_kv_heads(slices: Mapping[str, Box], info: ModelInfo, latent: Latent | None) -> int:
    """Heads of the cache on this rank. Raises UnsupportedError for a family whose keys and values it cannot store."""
    if latent:
        return 1
    k, v = (slices.get(f"layers.0.attention.{name}.weight") for name in ("wk", "wv"))
    if k is None or v is None or k.sizes[0] != v.sizes[0] or k.sizes[0] % info.args.head_dim:
        raise UnsupportedError(
            f"family {info.family!r}: the cache of `titan infer` stores heads of layers.N.attention.wk and wv, both"
            f" {info.args.head_dim} wide, and this family has others"
        )
    return k.sizes[0] // info.args.head_dim


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


def _keep_blocks(module: Any, name: str, slices: list[StoredSlice]) -> None:
    """Give a linear layer, or experts, a weight of blocks, which are read later."""
    if isinstance(module, SlicedExperts):
        setattr(module, name, StoredExperts(slices))
        return
    delattr(module, name)
    setattr(module, name, StoredWeight(slices))


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
