"""Which part of each weight a tensor-parallel rank of inference holds. Torch-free."""

from collections.abc import Sequence

from converters.catalog import Box
from converters.errors import ConfigError
from converters.families.base import ModelArgs, Parameter, Role
from converters.layout import chunk_bounds


def valid_tp(args: ModelArgs) -> list[int]:
    """The tp degrees that slice attention at head boundaries; with more ranks than KV heads, those are replicated.

    Feed-forward and vocabulary may be sliced unevenly, so they set no limit.
    """
    heads, kv_heads = args.num_heads, args.num_kv_heads
    return [tp for tp in range(1, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)]


def check_tp(args: ModelArgs, tp: int) -> None:
    """Raise ConfigError where `tp` cannot divide the attention heads."""
    valid = valid_tp(args)
    if tp not in valid:
        raise ConfigError(
            f"--tp {tp} cannot split {args.num_heads} attention heads and {args.num_kv_heads} key/value heads",
            hint=f"valid: {', '.join(map(str, valid))}",
            tries=[f"--tp {max((v for v in valid if v < tp), default=1)}"],
        )


def slice_for_rank(parameter: Parameter, args: ModelArgs, *, tp: int, rank: int) -> Box:
    """The box that `rank` of `tp` holds; it may be empty where uneven slicing leaves nothing."""
    offsets, sizes = [0] * len(parameter.shape), list(parameter.shape)
    dim = parameter.tp_dim
    if dim is not None:
        if tp > args.num_kv_heads and parameter.role is Role.KV_COLUMN:
            # Several ranks hold the same KV head: the one of this rank's query heads
            offsets[dim], sizes[dim] = rank * args.num_kv_heads // tp * args.head_dim, args.head_dim
        else:
            offsets[dim], sizes[dim] = chunk_bounds(sizes[dim], tp, rank)
    return Box(tuple(offsets), tuple(sizes))


def same_input(parameters: Sequence[Parameter]) -> list[tuple[str, ...]]:
    """The linear layers that read the same input: one group per attention and feed-forward, in model order."""
    groups: dict[str, list[str]] = {}
    for parameter in parameters:
        if parameter.input_group and parameter.is_linear_weight:
            groups.setdefault(parameter.input_group, []).append(parameter.module)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def summed_inputs(parameters: Sequence[Parameter]) -> list[str]:
    """The linear layers with sliced input features, whose outputs are partial sums: wo and w2 of each layer."""
    return [p.module for p in parameters if p.role is Role.ROW and not p.is_bias]
