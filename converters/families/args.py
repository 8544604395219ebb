"""The numbers of a model, without torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from converters.common.errors import UnsupportedError
from converters.families.limits import FLAG, LENGTH, SIZE, Limits, limited
from converters.families.rope import DynamicRope, Scaling


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The numbers of a model, each a field of a family's own record. Serialized as `args` in titan_model.json."""


@dataclass(frozen=True, slots=True)
class DecoderArgs(ModelArgs):
    """The numbers of a decoder, which has layers of attention and feed-forward and predicts the next token."""

    dim: int = field(metadata=limited(SIZE, "hidden_size"))
    num_layers: int = field(metadata=limited(Limits(int, 1, 10_000), "num_hidden_layers", "n_layers"))
    num_heads: int = field(metadata=limited(SIZE, "num_attention_heads", "n_heads"))
    num_kv_heads: int = field(metadata=limited(SIZE, "num_key_value_heads", "n_kv_heads"))
    head_dim: int = field(metadata=limited(SIZE))
    ffn_hidden: int = field(metadata=limited(SIZE, "intermediate_size"))
    vocab_size: int = field(metadata=limited(SIZE))
    norm_eps: float = field(default=1e-5, metadata=limited(Limits(float, 0, 1), "rms_norm_eps"))
    rope_theta: float = field(default=500000.0, metadata=limited(Limits(float, 1, 1e15)))
    rope_scaling: Scaling | None = None
    max_seq_len: int = field(default=131072, metadata=limited(LENGTH, "max_position_embeddings"))
    tied: bool = field(default=False, metadata=limited(FLAG, "tie_word_embeddings"))  # to the embedding
    attention_bias: bool = field(default=False, metadata=limited(FLAG))  # wq, wk, wv and wo have one
    mlp_bias: bool = field(default=False, metadata=limited(FLAG))  # w1, w2 and w3 have one


def decoder_args(args: ModelArgs) -> DecoderArgs:
    """The numbers of a decoder. Raises UnsupportedError for another model."""
    if not isinstance(args, DecoderArgs):
        raise UnsupportedError(f"models with {type(args).__name__} are no decoders, which alone are supported here")
    return args


def is_tied(args: ModelArgs) -> bool:
    """Whether a model's output and embedding are one weight."""
    return isinstance(args, DecoderArgs) and args.tied


def num_layers(args: ModelArgs) -> int:
    """Layers of a decoder; 0 for another model."""
    return args.num_layers if isinstance(args, DecoderArgs) else 0


def describe_size(args: ModelArgs) -> str:
    """The numbers that tell the size of a model: all, if it is no decoder."""
    if isinstance(args, DecoderArgs):
        return f"{args.num_layers} layers, dim {args.dim}"
    return ", ".join(f"{name} {value}" for name, value in args_to_json(args).items())


# titan_model.json lists these numbers of one family for every family, after `tied`, with this value where the family's
# args have no such number: the file's bytes do not change.
LISTED_FOR_EVERY_FAMILY: Mapping[str, Any] = {"qk_norm": False}
_OMITTED_AT_DEFAULT = ("attention_bias", "mlp_bias")  # added later: files of models without them stay as they were
OMITTED_AT_DEFAULT = {"omitted": True}  # metadata of such a field of a family's own args
ONLY_FOR_TRAINING = OMITTED_AT_DEFAULT | {"only for training": True}  # which no file but titan's states
BALANCE_RATE = ONLY_FOR_TRAINING | limited(Limits(float, 0, 1))  # see Experts


def all_numbers(args: ModelArgs) -> dict[str, Any]:
    """Every number, those that are listed for every family included, for comparing models of two families."""
    listed: dict[str, Any] = {}
    for name, value in asdict(args).items():
        listed[name] = value
        if name == "tied":
            listed |= LISTED_FOR_EVERY_FAMILY
    return listed


def computed_numbers(args: ModelArgs) -> dict[str, Any]:
    """`all_numbers` without those that change training, but not what the model computes."""
    others = {f.name for f in fields(args) if f.metadata.get("only for training")}
    return {name: value for name, value in all_numbers(args).items() if name not in others}


def defining_numbers(args: ModelArgs) -> dict[str, Any]:
    """`computed_numbers` without max_seq_len, which only says how far a model may look, except to a dynamic RoPE."""
    numbers = computed_numbers(args)
    if isinstance(args, DecoderArgs) and not isinstance(args.rope_scaling, DynamicRope):
        del numbers["max_seq_len"]
    return numbers


def other_numbers(ours: ModelArgs, theirs: ModelArgs) -> list[str]:
    """The numbers that make a second checkpoint another model, with both values."""
    wanted, found = defining_numbers(ours), computed_numbers(theirs)
    return [f"{key}: {value}, there {found.get(key)}" for key, value in wanted.items() if value != found.get(key)]


def args_to_json(args: ModelArgs) -> dict[str, Any]:
    """The numbers as titan_model.json lists them."""
    omitted = {f.name: f.default for f in fields(args) if f.name in _OMITTED_AT_DEFAULT or f.metadata.get("omitted")}
    return {name: value for name, value in all_numbers(args).items() if name not in omitted or value != omitted[name]}
