"""What a model family says about itself, without torch: numbers, parameters, names, shard dims."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from converters.rules import Drop, Rule


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's frequency scaling (`rope_type: llama3`); lengths in tokens."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Every frequency divided by `factor`."""

    rope_type: str = field(default="linear", init=False)
    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """Dynamic NTK: plain RoPE within `max_seq_len`, another theta for each length beyond, which is not covered."""

    rope_type: str = field(default="dynamic", init=False)
    factor: float


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv 2309.00071) with the names and defaults of transformers; the length in tokens.

    attention_factor None: computed from factor, mscale and mscale_all_dim.
    """

    rope_type: str = field(default="yarn", init=False)
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


Scaling = RopeScaling | LinearRope | DynamicRope | YarnRope
SCALINGS: Mapping[str, type[Scaling]] = {
    "llama3": RopeScaling,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
}


def rope_type(scaling: Scaling | None) -> str:
    """What transformers calls it."""
    if scaling is None:
        return "default"
    return next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The numbers of a Llama-like decoder. Serialised as `args` in titan_model.json."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: Scaling | None = None
    max_seq_len: int = 131072
    tied: bool = False  # output.weight is tok_embeddings.weight
    qk_norm: bool = False  # RMSNorm over head_dim on every head of q and k, before RoPE (Qwen 3)
    attention_bias: bool = False  # wq, wk, wv and wo have one
    mlp_bias: bool = False  # w1, w2 and w3 have one


_ADDED_LATER = ("attention_bias", "mlp_bias")


def args_to_json(args: ModelArgs) -> dict[str, Any]:
    """The numbers as titan_model.json has them.

    Fields that were added later are left out at their default: files of models that do without stay as they were.
    """
    return {key: value for key, value in asdict(args).items() if key not in _ADDED_LATER or value}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the unsharded model. `tp_dim`: the dim that tensor parallelism shards, None: replicated."""

    fqn: str
    shape: tuple[int, ...]
    tp_dim: int | None


@dataclass(frozen=True, slots=True)
class Naming:
    """How one foreign naming spells a family's weights: rules (each invertible) and what is left out on purpose."""

    name: str  # "hf" | "meta" | "torchtune" | "titan_model_prefix" | "titan_qkv_linear"
    rules: tuple[Rule, ...]
    drops: tuple[Drop, ...] = ()
    repeats_tied: bool = False  # a tied model's output weight is there again, beside the embedding


def _any(args: ModelArgs) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. Instances are constants in `converters/families/<family>.py`, found through registry.py."""

    name: str
    flavors: Mapping[str, ModelArgs]
    parameters: Callable[[ModelArgs], list[Parameter]]  # in model order; a tied output is not listed
    namings: Mapping[str, Naming]
    args_from_hf_config: Callable[[Mapping[str, Any]], ModelArgs]
    hf_config: Callable[[ModelArgs], dict[str, Any]]  # without token ids and dtype, which the caller knows
    hf_architectures: tuple[str, ...]  # config.json's `architectures` that this family reads
    # (params.json, full shapes) → numbers, and back. None: Meta's format has no such models
    args_from_meta_params: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], ModelArgs] | None = None
    meta_params: Callable[[ModelArgs], dict[str, Any]] | None = None
    meta_shard_dims: Mapping[str, int] = field(default_factory=dict)  # what Meta's shards cut along another than tp_dim
    args_type: type[ModelArgs] = ModelArgs  # a subclass where the family has numbers of its own, all with defaults
    keep_float32: tuple[str, ...] = ()  # native names, `{n}` for the layer: no `--dtype` of 16 bits or less casts them
    # Which of its readers a file is for, where families share an architecture's name or Meta's format
    claims: Callable[[ModelArgs], bool] = _any
    hf_model_types: tuple[str, ...] = ()  # config.json's `model_type`s for which transformers takes hf_architectures

    def num_parameters(self, args: ModelArgs) -> int:
        return sum(prod(p.shape) for p in self.parameters(args))
