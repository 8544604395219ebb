"""What a model family declares, without torch: numbers, blocks, parameters, names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from converters.common.errors import UnsupportedError
from converters.families.args import DecoderArgs, ModelArgs, is_tied
from converters.families.blocks import Block, Ends, Experts, dense_block, plain_ends
from converters.families.foreign import MetaFormat, Multimodal, Release, TrainedOtherwise
from converters.families.parameters import OUTPUT, Parameter, Role, unit_of, units_of
from converters.families.rules import Drop, Rule

if TYPE_CHECKING:
    from converters.common.box import TensorInfo


@dataclass(frozen=True, slots=True)
class FlavorAttention:
    """How the model of a flavor is trained, in torchtitan's words; the numbers of the model do not depend on it."""

    attn_type: str = "sdpa"  # the kernel: sdpa, flex or varlen
    attn_mask_type: str = "causal"  # block_causal: attention stays within a document


@dataclass(frozen=True, slots=True)
class Naming:
    """The names that a foreign naming gives a family's weights: invertible rules, and keys that are dropped."""

    name: str  # "hf" | "meta" | "torchtune" | "titan_model_prefix" | "titan_qkv_linear"
    rules: tuple[Rule, ...]
    drops: tuple[Drop, ...] = ()
    repeats_tied: bool = False  # a tied model has its output weight, too
    has_buffers: bool = False  # each checkpoint has what is saved and not trained; else such a tensor may be missing
    repeats: tuple[Rule, ...] = ()  # further names of tensors, whole names: copies that need not be there


def _no_args(config: Mapping[str, Any]) -> ModelArgs:
    raise UnsupportedError("transformers has no such models")


def _no_hf_config(args: ModelArgs) -> dict[str, Any]:
    return {}


def _any(args: ModelArgs) -> bool:
    return True


def _no_problems(args: ModelArgs) -> list[str]:
    return []


def _same_naming(naming: Naming, args: ModelArgs) -> Naming:
    return naming


def _any_shapes(naming: Naming, args: ModelArgs, tensors: Mapping[str, TensorInfo]) -> Naming:
    return naming


Args = Any  # numbers of the family's own `args_type`


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. Instances are constants in `converters/families/<family>.py`, found through registry.py.

    Only a decoder has blocks and ends.
    """

    name: str
    flavors: Mapping[str, ModelArgs]
    parameters: Callable[[Args], list[Parameter]]  # in model order; a tied output is not listed
    namings: Mapping[str, Naming] = field(default_factory=dict)  # foreign ones
    args_from_hf_config: Callable[[Mapping[str, Any]], ModelArgs] = _no_args
    hf_config: Callable[[Args], dict[str, Any]] = _no_hf_config  # without token ids and dtype, which the caller knows
    hf_architectures: tuple[str, ...] = ()  # config.json's `architectures` that this family reads
    meta: MetaFormat | None = None  # None: Meta's format has no such models
    args_type: type[ModelArgs] = DecoderArgs  # a decoder's own numbers are a subclass of it, all with defaults
    keep_float32: tuple[str, ...] = ()  # native names, `{n}` for the layer: no `--dtype` of 16 bits or less casts them
    # Whether a model is of this family, where several share an architecture's name or Meta's format
    claims: Callable[[Args], bool] = _any
    hf_model_types: tuple[str, ...] = ()  # config.json's `model_type`s of hf_architectures
    block: Callable[[Args, int], Block] = dense_block  # what the layer of that number computes
    ends: Callable[[Args], Ends] = plain_ends
    attention_of: Mapping[str, FlavorAttention] = field(default_factory=dict)  # flavors with another than the default
    # (numbers, beyond_original) → what torchtitan v0.2.2's model computes; None: it computes the published model
    as_torchtitan_trained: Callable[..., TrainedOtherwise] | None = None
    problems: Callable[[Args], list[str]] = _no_problems  # what makes numbers impossible together
    multimodal: Multimodal | None = None
    # One of `namings` as models of these numbers have it, where a foreign format has several classes of one family
    naming_for: Callable[[Naming, Args], Naming] = _same_naming
    # The naming of a checkpoint's tensors among those of the same names, where only shapes distinguish them
    naming_by_shapes: Callable[[Naming, Args, Mapping[str, TensorInfo]], Naming] = _any_shapes
    release: Release | None = None
    quantized_as: tuple[str, ...] = ("fp8",)  # how such models are published, beside 16 bits (quantization.Scheme)

    def units(self, args: ModelArgs) -> list[str]:
        """Names of a model's units in order; a tied output is one without a parameter of its own."""
        units = units_of(self.parameters(args))
        return [*units, unit_of(OUTPUT)] if is_tied(args) else units

    def blocks(self, args: ModelArgs) -> list[Block]:
        """The block of every layer of a decoder."""
        return [self.block(args, layer) for layer in range(args.num_layers)] if isinstance(args, DecoderArgs) else []

    def value_dim(self, args: DecoderArgs) -> int:
        """Features of a head of v; those of q and k are `head_dim`."""
        latent = self.block(args, 0).latent
        return latent.value_dim if latent else args.head_dim

    def num_parameters(self, args: ModelArgs) -> int:
        """Values that are trained."""
        return sum(prod(p.shape) for p in self.parameters(args) if p.is_trained)

    def num_active_parameters(self, args: ModelArgs) -> int:
        """Trained values that the computation for one token uses: of stacked experts those of `top_k`."""

        def active(parameter: Parameter) -> int:
            num_values = prod(parameter.shape)
            if parameter.expert_dim is None or parameter.layer is None or not isinstance(args, DecoderArgs):
                return num_values
            experts = self.block(args, parameter.layer).feed_forward
            assert isinstance(experts, Experts), f"{parameter.fqn}: `block` has no experts in this layer"
            return num_values // experts.num * experts.top_k

        return sum(active(p) for p in self.parameters(args) if p.is_trained)

    def has_role(self, role: Role, args: ModelArgs) -> bool:
        """Whether a model of these numbers has a parameter of that role."""
        return any(p.role is role for p in self.parameters(args))
