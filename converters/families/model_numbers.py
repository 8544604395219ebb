"""Check the numbers of a model, under every name that config.json, params.json and titan_model.json give them."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from converters.common.errors import CheckpointError, list_offenders
from converters.families.args import DecoderArgs, ModelArgs
from converters.families.base import Family
from converters.families.blocks import EXPERT_SCORES, Experts, Latent
from converters.families.limits import LAYERS, Limits
from converters.families.rope import DynamicRope, RopeScaling, YarnRope

_MOST_EXPERTS = 1_000_000  # of all layers: no names are made for more, and no model has a tenth


def check_numbers(content: Mapping[str, Any], limits: Mapping[str, Limits], *, what: str) -> None:
    """Raise CheckpointError with every number of a file that is out of range. Absent and null ones are ignored."""
    problems = [
        f"{key} = {str(content[key])[:40]}: expected {_wanted(of_key)}"
        for key, of_key in limits.items()
        if content.get(key) is not None and not _fits(content[key], of_key)
    ]
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))


def limits_of(record: type[Any]) -> dict[str, Limits]:
    """The limits of a dataclass's fields, by each of their names."""
    limited = [f for f in fields(record) if "limits" in f.metadata]
    return {name: f.metadata["limits"] for f in limited for name in (f.name, *f.metadata["names"])}


def check_args(args: ModelArgs, *, what: str) -> None:
    """Check the numbers read from a file, each alone and together."""
    check_numbers(asdict(args), limits_of(type(args)), what=what)
    numbers = asdict(args)
    of_decoders = {f.name for f in fields(DecoderArgs)} if isinstance(args, DecoderArgs) else {}
    needed = [f for f in fields(args) if f.name in of_decoders or f.default is MISSING]
    problems = [f"{f.name} is null" for f in needed if numbers[f.name] is None and f.name != "rope_scaling"]
    problems += [
        f"{f.name} = {str(numbers[f.name])[:40]}: expected the type of {f.default!r}"
        for f in fields(args)
        if f not in needed and numbers[f.name] != f.default and not _is_like(numbers[f.name], f.default)
    ]
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))
    if isinstance(args, DecoderArgs):
        _check_decoder(args, what=what)


def _check_decoder(args: DecoderArgs, *, what: str) -> None:
    problems = []
    if args.head_dim % 2:
        problems.append(f"a head size of {args.head_dim}: RoPE rotates pairs, so it must be even")
    if args.num_heads % args.num_kv_heads:
        problems.append(f"{args.num_heads} attention heads cannot share {args.num_kv_heads} key/value heads evenly")
    if args.rope_scaling is not None:
        check_numbers(asdict(args.rope_scaling), limits_of(type(args.rope_scaling)), what=f"{what}, rope_scaling,")
        problems += _scaling_problems(args)
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))


def check_blocks(family: Family, args: ModelArgs, *, what: str) -> None:
    """Raise CheckpointError if the layers that a family makes of numbers cannot be."""
    blocks = family.blocks(args)
    experts = [block.feed_forward for block in blocks if isinstance(block.feed_forward, Experts)]
    problems = [problem for one in dict.fromkeys(experts) for problem in _expert_problems(one)]
    for latent in dict.fromkeys(block.latent for block in blocks):
        problems += [] if latent is None else _latent_problems(latent)
    problems += family.problems(args)
    if (total := sum(one.num for one in experts)) > _MOST_EXPERTS:
        problems.append(f"{total:,} experts in {len(experts):,} layers; the most is {_MOST_EXPERTS:,}")
    for name in (f.name for f in fields(args) if f.metadata.get("limits") == LAYERS):
        outside = [layer for layer in getattr(args, name) if layer >= len(blocks)]
        problems += [f"{name} names layer {layer}, but there are only {len(blocks)} layers" for layer in outside]
    if problems:
        raise CheckpointError(f"{what} does not describe a model:" + list_offenders(problems))


def _expert_problems(one: Experts) -> list[str]:
    problems = []
    if not 1 <= one.top_k <= one.num:
        problems.append(f"{one.top_k} experts per token of {one.num}: expected 1 to {one.num}")
    if one.score not in EXPERT_SCORES:
        problems.append(f"a score {str(one.score)[:40]!r} of experts: expected {' or '.join(EXPERT_SCORES)}")
    if one.num % one.num_groups:
        problems.append(f"{one.num} experts cannot stand in {one.num_groups} groups of one size")
    elif not 1 <= one.top_groups <= one.num_groups:
        problems.append(f"{one.top_groups} groups of {one.num_groups} per token: expected 1 to {one.num_groups}")
    elif one.num_groups > 1:
        in_group = one.num // one.num_groups
        eligible = one.top_groups * in_group
        if one.best_of_group > in_group:
            problems.append(f"groups of {in_group} experts, which are rated by their {one.best_of_group} best")
        if one.top_k > eligible:
            problems.append(f"{one.top_k} experts per token, but {one.top_groups} groups have only {eligible}")
    return problems


def _latent_problems(attention: Latent) -> list[str]:
    if attention.rotary_dim % 2:
        return [f"{attention.rotary_dim} rotated features of a head: RoPE rotates pairs, so it must be even"]
    if attention.plain_dim < 1:
        return [f"{attention.rotary_dim} rotated features, which leave none of the head without a rotation"]
    return []


def _scaling_problems(args: DecoderArgs) -> list[str]:
    scaling = args.rope_scaling
    assert scaling is not None
    problems = [
        f"RoPE scaling whose {f.name} is null"
        for f in fields(scaling)
        if f.default is not None and getattr(scaling, f.name) is None
    ]
    if isinstance(scaling, RopeScaling) and not problems and scaling.low_freq_factor > scaling.high_freq_factor:
        problems.append("RoPE scaling whose low_freq_factor is above its high_freq_factor")
    if isinstance(scaling, YarnRope) and (args.rope_theta == 1 or not scaling.beta_fast or not scaling.beta_slow):
        problems.append("RoPE of type yarn with a theta of 1, or a beta_fast or beta_slow of 0")
    if isinstance(scaling, DynamicRope) and args.head_dim == 2:
        problems.append("RoPE of type dynamic with a head size of 2")
    return problems


def _is_like(value: Any, default: Any) -> bool:
    """Whether the types agree; an int is accepted for a float."""
    kind = type(default)
    return default is None or type(value) is kind or (kind is float and type(value) is int)


def _fits(value: Any, limits: Limits) -> bool:
    """Whether a value is in range. An int is accepted for a float, a bool for neither."""
    if limits == LAYERS:
        return isinstance(value, list | tuple) and all(type(layer) is int and layer >= 0 for layer in value)
    if isinstance(value, bool) or limits.kind is bool:
        return isinstance(value, bool) and limits.kind is bool
    return isinstance(value, (int, limits.kind)) and limits.low <= value <= limits.high  # type: ignore[operator]


def _wanted(limits: Limits) -> str:
    if limits == LAYERS:
        return "a list of layers, such as [0, 1]"
    if limits.kind is bool:
        return "true or false"
    low, high = limits.low, limits.high
    return f"a whole number from {low} to {high:,}" if limits.kind is int else f"a number from {low:g} to {high:g}"
