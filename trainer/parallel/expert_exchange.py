"""Rows to the ranks that hold their experts, and back: all-to-all with as many rows as the router has chosen.

Custom operations, because the number of received rows is known on the host only after an exchange of counts: inside of
one operation that neither breaks a compiled graph nor is traced. Every rank of the group must call them in turn.

Shape letters: R rows of this rank's tokens in expert order, W ranks, E experts, L = E / W experts of a rank,
S received rows in the order (expert, sending rank).
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

NO_ROWS_ASSUMED = -1


class Counts(NamedTuple):
    """Numbers of rows by destination. The first two are on the CPU."""

    sent_W: Tensor  # int64
    received_WL: Tensor  # int64
    ends_L: Tensor  # int32: where the rows of each expert of this rank end


def exchange_counts(ends_E: Tensor, group_name: str, num_ranks: int) -> Counts:
    """Tell each rank how many rows it will receive for each of its experts. The host waits for the device once."""
    ends_L, sent_W, received_WL = _exchange_counts(ends_E, group_name, num_ranks)
    return Counts(sent_W, received_WL, ends_L)


def send_to_experts(x_RD: Tensor, counts: Counts, group_name: str, *, assumed_rows: int = NO_ROWS_ASSUMED) -> Tensor:
    """The rows that all ranks have for this rank's experts, [S, D].

    `assumed_rows`: S for fake tensors, which have no counts.
    """
    received: Tensor = _send_to_experts(x_RD, counts.sent_W, counts.received_WL, group_name, assumed_rows)
    return received


def return_from_experts(out_SD: Tensor, counts: Counts, group_name: str, *, num_rows: int) -> Tensor:
    """The inverse of `send_to_experts`: [R, D] for R = `num_rows`."""
    returned: Tensor = _return_from_experts(out_SD, counts.sent_W, counts.received_WL, group_name, num_rows)
    return returned


@torch.library.custom_op("titan::exchange_counts", mutates_args=())
def _exchange_counts(ends_E: Tensor, group_name: str, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    counts_WL = ends_E.diff(prepend=ends_E.new_zeros(1)).long().view(num_ranks, -1)
    received_WL = torch.empty_like(counts_WL)
    dist.all_to_all_single(received_WL, counts_WL, group=_resolve_process_group(group_name))  # type: ignore[arg-type]
    ends_L = received_WL.sum(dim=0).cumsum(dim=0).int()
    on_host = torch.cat([counts_WL.sum(dim=1), received_WL.flatten()]).cpu()
    return ends_L, on_host[:num_ranks].clone(), on_host[num_ranks:].view_as(counts_WL).clone()


@_exchange_counts.register_fake
def _(ends_E: Tensor, group_name: str, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    num_experts = ends_E.shape[0] // num_ranks
    sent_W = torch.empty(num_ranks, dtype=torch.int64, device="cpu")
    received_WL = torch.empty(num_ranks, num_experts, dtype=torch.int64, device="cpu")
    return ends_E.new_empty(num_experts), sent_W, received_WL


@torch.library.custom_op("titan::send_to_experts", mutates_args=())
def _send_to_experts(x_RD: Tensor, sent_W: Tensor, received_WL: Tensor, group_name: str, assumed_rows: int) -> Tensor:
    received = _all_to_all(x_RD, sent_W.tolist(), received_WL.sum(dim=1).tolist(), group_name)
    return received.index_select(0, _order(received_WL, x_RD.device))


@_send_to_experts.register_fake
def _(x_RD: Tensor, sent_W: Tensor, received_WL: Tensor, group_name: str, assumed_rows: int) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size() if assumed_rows == NO_ROWS_ASSUMED else assumed_rows
    return x_RD.new_empty(rows, x_RD.shape[1])


@torch.library.custom_op("titan::return_from_experts", mutates_args=())
def _return_from_experts(out_SD: Tensor, sent_W: Tensor, received_WL: Tensor, group_name: str, num_rows: int) -> Tensor:
    by_rank = out_SD.index_select(0, _inverse(_order(received_WL, out_SD.device)))
    return _all_to_all(by_rank, received_WL.sum(dim=1).tolist(), sent_W.tolist(), group_name)


@_return_from_experts.register_fake
def _(out_SD: Tensor, sent_W: Tensor, received_WL: Tensor, group_name: str, num_rows: int) -> Tensor:
    return out_SD.new_empty(num_rows, out_SD.shape[1])


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group_name: str) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _order(received_WL: Tensor, device: torch.device) -> Tensor:
    """The position among rows in the order (rank, expert) of each row in the order (expert, rank), int64 [S]."""
    starts_LW = (received_WL.flatten().cumsum(0) - received_WL.flatten()).view_as(received_WL).T
    sizes = received_WL.T.flatten()
    shifts = starts_LW.flatten() - (sizes.cumsum(0) - sizes)
    num_rows = int(sizes.sum())
    sizes, shifts = sizes.to(device, non_blocking=True), shifts.to(device, non_blocking=True)
    return shifts.repeat_interleave(sizes, output_size=num_rows) + torch.arange(num_rows, device=device)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, sent_W, received_WL, ctx.group_name, _ = inputs
    ctx.save_for_backward(sent_W, received_WL)
    ctx.num_rows = rows.shape[0]


def _return_gradient(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _return_from_experts(grad_SD, *ctx.saved_tensors, ctx.group_name, ctx.num_rows), None, None, None, None


def _send_gradient(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _send_to_experts(grad_RD, *ctx.saved_tensors, ctx.group_name, ctx.num_rows), None, None, None, None


_send_to_experts.register_autograd(_return_gradient, setup_context=_keep_counts)
_return_from_experts.register_autograd(_send_gradient, setup_context=_keep_counts)

EXCHANGES = tuple(
    getattr(torch.ops.titan, name).default for name in ("exchange_counts", "send_to_experts", "return_from_experts")
)
"""The operations as torch dispatches them."""


def bytes_sent(exchange: Any, args: tuple[Any, ...]) -> int:
    """Bytes that this rank sends in a call of one of EXCHANGES, to itself too: rows; or one int64 for each expert."""
    rows: Tensor = args[0]
    return rows.numel() * (torch.int64.itemsize if exchange is EXCHANGES[0] else rows.itemsize)
