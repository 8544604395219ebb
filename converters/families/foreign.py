"""How formats and classes of others have the models of a family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.families.args import DecoderArgs, ModelArgs


@dataclass(frozen=True, slots=True)
class TrainedOtherwise:
    """What a trainer computes that has another model than the published one."""

    args: ModelArgs  # that say it most nearly
    unsaid: list[str]  # what no numbers say
    summary: str  # the differences, in a few words


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the files of Meta's releases that Meta's code takes apart, or renames, as it loads them."""

    name: str
    parts: Mapping[str, int]  # name in Meta's code → its share of a shard's rows; they follow one another
    stack: int = 0  # the number of matrices below one another that are a stack; 0: none are


@dataclass(frozen=True, slots=True)
class MetaFormat:
    """How Meta's format has the models of a family."""

    args_from_params: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], DecoderArgs]  # params.json, shapes
    params: Callable[[Any], dict[str, Any]]
    key: str = ""  # a key of params.json that only this family's has; "": it has none of the other families'
    shard_dims: Mapping[str, int] = field(default_factory=dict)  # where shards are not cut along tp_dim
    stored: Callable[[Any], list[StoredTensor]] = lambda args: []


@dataclass(frozen=True, slots=True)
class Release:
    """config.json of a family's own release, which is not transformers'."""

    read: Callable[[Mapping[str, Any]], dict[str, Any] | None]  # as transformers would state it; None for other files
    write: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A class of transformers that has a family's models as its text part, with encoders of other media beside."""

    architecture: str
    model_type: str
    text_key: str  # the field of config.json with the text part's fields
    naming: str  # the family's naming in checkpoints of this class
    extras: tuple[str, ...]  # native names of its other tensors, those of transformers; `{*}` stands for anything
    files: tuple[str, ...]  # small files of the class: how images become inputs
    outer_keys: tuple[str, ...] = ()  # fields of config.json beside `text_key` that describe the other tensors
