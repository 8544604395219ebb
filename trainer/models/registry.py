"""The model families that can be trained; their numbers and names are in `converters/families`. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from converters.common.errors import UnsupportedError, list_offenders
from converters.common.extensions import ExtensionError, check_attributes, check_call, check_name, check_record
from converters.families.args import ModelArgs, decoder_args
from converters.families.base import Family
from converters.families.blocks import GroupedQuery
from converters.families.parameters import Parameter
from converters.families.registry import get_family
from trainer.models.initialization import Distribution, gpt_oss_distribution, initial_distribution
from trainer.models.tensor_plan import TensorStyle, tensor_plan
from trainer.objective import Objective, check_objective

if TYPE_CHECKING:
    from trainer.models.units import ModelPart


@dataclass(frozen=True, slots=True)
class TrainerFamily:
    """Building, sharding and objective of the model of the `converters` Family of the same name.

    Every model has `units()` and `tie()`, as ModelPart. One that predicts the next token has `tok_embeddings`,
    `layers` (a ModuleDict by number), `norm` and `output`, any of which a pipeline stage may remove, and
    `forward(x, positions)`; attention has `inner_attention(q, k, v)`, which also takes `scale`, the factor of the
    scores, and `sinks_N=`. An attention with a window, chunk or sinks has them in `kind`. Forward ends with a call
    of `output`, if there is one, which must treat each token separately: a chunked loss calls it on chunks of the
    tokens. With `takes_documents` it is `forward(x, positions, documents)`, and as Transformer's it passes what
    `make_mask` makes of the documents to every inner attention.
    """

    build_model: Callable[[ModelArgs], ModelPart]  # or a module with the same methods
    tensor_plan: Callable[[Sequence[Parameter]], dict[str, TensorStyle]] = tensor_plan
    initial_distribution: Callable[[Parameter, ModelArgs], Distribution] = initial_distribution
    takes_documents: bool = False
    objective: Objective | None = None  # None: to predict the next token


def decoder_of(family: str) -> TrainerFamily:
    """The decoder that the blocks of the `converters` Family of that name describe."""
    return TrainerFamily(partial(_build_decoder, family), takes_documents=True)


def _build_decoder(family: str, args: ModelArgs) -> ModelPart:
    from trainer.models.decoder import Transformer

    described = get_family(family)
    return Transformer(decoder_args(args), described.block, described.ends(args))


_FAMILIES = {name: decoder_of(name) for name in ("llama3", "llama2", "qwen3", "deepseek_v3", "gpt_oss", "llama4")}
_FAMILIES["gpt_oss"] = replace(_FAMILIES["gpt_oss"], initial_distribution=gpt_oss_distribution)


def register(name: str, family: TrainerFamily | None = None) -> None:
    """Make a family trainable, by default as `decoder_of`; register it with `converters.families.registry`, too."""
    family = decoder_of(name) if family is None else family
    check_record(family, TrainerFamily, f"family {name!r}")
    check_name("model", name, _FAMILIES)
    if family.objective is not None:
        check_objective(family.objective, name)
    _FAMILIES[name] = family


def trained_families() -> tuple[str, ...]:
    """Names of the families that can be trained."""
    return tuple(_FAMILIES)


def get_trainer_family(name: str) -> TrainerFamily:
    """The family of that name. Raises UnsupportedError, naming those that exist."""
    if name not in _FAMILIES:
        raise UnsupportedError(
            f"family {name!r} cannot be trained here",
            hint=f"families: {', '.join(_FAMILIES)}; trainer.api.register_model adds the model of your own family",
        )
    return _FAMILIES[name]


def check_kinds(model: Any, family: Family, args: ModelArgs) -> None:
    """Raise UnsupportedError if a layer's attention has other windows, chunks or sinks than the family's `block`.

    The masks are made for the `kind` of the layer's attention.
    """
    differing, blocks = [], family.blocks(args)
    for unit in (unit for unit in model.units() if unit.place == "block" and blocks):
        described = blocks[unit.number].attention
        built = getattr(getattr(unit.module, "attention", None), "kind", None)
        if isinstance(described, GroupedQuery) and described != built and (described.needs_mask or built is not None):
            differing.append(f"{unit.name}.attention: kind = {built}, not {described}")
    if differing:
        raise UnsupportedError(
            f"family {family.name!r}: the model's attention is not what `block` describes:" + list_offenders(differing)
        )


def check_modules(model: Any, family: str) -> None:
    """Raise ExtensionError if a family's model (a user's own) lacks what training and inference replace or call."""
    what = f"the model of family {family!r}"
    trained = get_trainer_family(family)
    check_attributes(model, ("units", "tie", "forward"), what, made_by=trained.build_model)
    if trained.objective is not None:
        return
    check_attributes(model, ("tok_embeddings", "layers", "norm", "output"), what)
    documents = ("documents",) if trained.takes_documents else ()
    check_call(model.forward, ("x", "positions", *documents), f"`forward` of {what}")
    check_attributes(model.layers, ("items",), f"`layers` of {what}, which is a ModuleDict by number,")
    for number, layer in model.layers.items():
        check_attributes(layer, ("attention",), f"layer {number} of {what}")
        check_attributes(layer.attention, ("inner_attention", "head_dim"), f"the attention of layer {number} of {what}")


def _check_numbers(model: Any, family: str) -> None:
    numbers = [unit.number for unit in model.units() if unit.place == "block"]
    if numbers != [*range(len(numbers))]:
        raise ExtensionError(
            f"the blocks in the units() of the model of family {family!r} have the numbers"
            f" {', '.join(map(str, numbers))}, not 0 to {len(numbers) - 1} in the order of forward",
            hint="Unit(name, module, number=…) takes the number; selective recomputation chooses blocks by it",
        )


def check_parameters(model: Any, parameters: Sequence[Parameter], *, family: str) -> None:
    """Raise UnsupportedError if a family (a user's own) lists other parameters than its model has.

    Parameters that are not trained are buffers of the model; other buffers are not listed.
    """
    check_modules(model, family)
    _check_numbers(model, family)
    model.tie()  # then a tied output's weight counts once
    untrained = {p.fqn for p in parameters if not p.is_trained}
    built = {(fqn, tuple(parameter.shape), "") for fqn, parameter in model.named_parameters()}
    built |= {(fqn, tuple(t.shape), ", not trained") for fqn, t in model.named_buffers() if fqn in untrained}
    listed = {(p.fqn, p.shape, "" if p.is_trained else ", not trained") for p in parameters}
    differing = [f"{fqn} {list(shape)}{kind}: only in the model" for fqn, shape, kind in sorted(built - listed)]
    differing += [f"{fqn} {list(shape)}{kind}: only in the list" for fqn, shape, kind in sorted(listed - built)]
    if differing:
        raise UnsupportedError(
            f"family {family!r}: `parameters` does not match the parameters of the model:" + list_offenders(differing)
        )
