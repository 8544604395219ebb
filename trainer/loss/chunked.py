"""Output projection and loss on chunks of the tokens, so that whole logits never exist, forward or backward.

Forward and backward of each chunk run together, during the model's forward pass. They leave the gradient of the hidden
states and of the output's parameters, which are summed in fp32; the model's backward only scales these. So the output's
products are computed as often as with a plain loss, with the memory of one chunk.

Under schedules that run many forward passes before the first backward, each microbatch would hold a whole gradient of
the output. There (`in_backward`) the chunks are computed in backward, and their logits twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

LossSum = Callable[[Tensor, Tensor], Tensor]


class ChunkedOutput:
    """Replaces `output.forward`: hidden states [B, L, D] → the summed loss of the targets [B, L] set by `given`.

    As the module's forward it runs inside the module's hooks, once per pass: FSDP gathers its weights, tensor
    parallelism gathers the sequence. The module may be anything that maps [1, T, D] to logits [1, T, V].
    """

    def __init__(self, output: nn.Module, loss_sum: LossSum, *, chunk_tokens: int, in_backward: bool):
        """`loss_sum` takes the logits that `output` returns, which are DTensors under tensor parallelism."""
        self._output, self._project, self._loss_sum = output, output.forward, loss_sum
        self._chunk_tokens, self.in_backward = chunk_tokens, in_backward
        self._targets: Tensor | None = None

    @contextmanager
    def given(self, targets_BL: Tensor) -> Iterator[None]:
        """Context in which a call of `output` computes the loss of these targets."""
        self._targets = targets_BL
        try:
            yield
        finally:
            self._targets = None

    def __call__(self, h_BLD: Tensor) -> Tensor:
        targets_BL = self._targets
        assert targets_BL is not None, "the part's forward sets the targets"
        # Sequence parallelism gathers h and sums its gradients over the ranks' columns: once for all chunks.
        wrap = _replicated_over(h_BLD) if isinstance(h_BLD, DTensor) else _unchanged
        own_BLD = h_BLD.to_local(grad_placements=[Partial()]) if isinstance(h_BLD, DTensor) else h_BLD
        if torch.is_grad_enabled():
            # Local tensors for autograd; read at each call, because FSDP replaces the parameters while gathered.
            parameters = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters())
            loss: Tensor = _ChunkedLossSum.apply(self, wrap, own_BLD, targets_BL, *parameters)  # type: ignore[no-untyped-call]
        else:
            loss = self.loss(wrap, own_BLD, targets_BL)
        if not isinstance(h_BLD, DTensor):
            return loss
        return DTensor.from_local(loss, h_BLD.device_mesh, [Replicate()], run_check=False)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._output.parameters() if parameter.requires_grad]

    def loss(self, wrap: Callable[[Tensor], Tensor], h_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        """The summed loss, without gradients."""
        total = torch.zeros((), device=h_BLD.device)
        for h_1TD, targets_1T in self._chunks(h_BLD, targets_BL):
            total += self._loss_sum(self._project(wrap(h_1TD)), targets_1T)
        return total

    def loss_and_gradients(
        self, wrap: Callable[[Tensor], Tensor], h_BLD: Tensor, targets_BL: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The summed loss, and its gradients for h and for each parameter, in their dtypes; all local tensors."""
        parameters = self.parameters()
        total = torch.zeros((), device=h_BLD.device)
        grad_BLD = torch.empty_like(h_BLD, memory_format=torch.contiguous_format)
        sums: list[Tensor] = []
        chunks = list(self._chunks(h_BLD, targets_BL))
        grads_1TD = self._split(grad_BLD)
        for (h_1TD, targets_1T), grad_1TD in zip(chunks, grads_1TD, strict=True):
            with torch.enable_grad():
                chunk_1TD = wrap(h_1TD).detach().requires_grad_()
                loss = self._loss_sum(self._project(chunk_1TD), targets_1T)
            with _gradients_as_computed(parameters):
                grad_chunk, *grads = torch.autograd.grad(loss, [chunk_1TD, *parameters])
            wait_for_autograd_thread(total)
            total += loss.detach()
            grad_1TD.copy_(_local_as(grad_chunk, [Partial()]))
            _add_up(sums, parameters, grads, num_chunks=len(chunks))
            del grad_chunk, grads  # free them before the next chunk's, which are as large as the output
        gradients = [grad_BLD]
        while sums:  # one at a time: each sum is freed before the next cast
            gradients.append(sums.pop(0).to(parameters[len(gradients) - 1].dtype))
        return total, gradients

    def _chunks(self, h_BLD: Tensor, targets_BL: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        targets_1T = torch.split(targets_BL.reshape(1, -1), self._chunk_tokens, dim=1)
        return zip(self._split(h_BLD), targets_1T, strict=True)

    def _split(self, h_BLD: Tensor) -> Sequence[Tensor]:
        return torch.split(h_BLD.reshape(1, -1, h_BLD.shape[-1]), self._chunk_tokens, dim=1)


@contextmanager
def _gradients_as_computed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let autograd return gradients in the dtype that it computes them in.

    From torch 2.15 on, FSDP asks for them in the dtype in which it reduces, which is a copy of every chunk's, of twice
    the size. Sums of chunks need none.
    """
    widened = [(parameter, parameter.grad_dtype) for parameter in parameters if parameter.grad_dtype != parameter.dtype]
    for parameter, _ in widened:
        parameter.grad_dtype = None
    try:
        yield
    finally:
        for parameter, dtype in widened:
            parameter.grad_dtype = dtype


def wait_for_autograd_thread(tensor: Tensor) -> None:
    """Wait until the autograd thread of a tensor's device has dropped the gradients that it returned last.

    That thread wakes the caller of `torch.autograd.grad` before it drops its own reference to the results
    (`Engine::thread_main`, torch/csrc/autograd/engine.cpp). Preempted in between, on a busy host, it keeps gradients as
    large as the output beside the next chunk's logits. It runs one task after the other: when it has run another one,
    the last one is over.
    """
    leaf = tensor.detach().requires_grad_()
    with torch.enable_grad():
        view = leaf.view_as(leaf)  # no kernel, no memory
    torch.autograd.grad(view, leaf, tensor.detach())


class _ChunkedLossSum(torch.autograd.Function):
    """Backward may run twice: schedules with a split backward compute gradients of weights separately."""

    @staticmethod
    def forward(
        ctx: Any,
        chunked: ChunkedOutput,
        wrap: Callable[[Tensor], Tensor],
        h_BLD: Tensor,
        targets_BL: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.chunked, ctx.wrap = chunked, wrap
        if chunked.in_backward:
            ctx.save_for_backward(h_BLD, targets_BL)
            return chunked.loss(wrap, h_BLD, targets_BL)
        loss, gradients = chunked.loss_and_gradients(wrap, h_BLD, targets_BL)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.chunked.in_backward:
            _, gradients = ctx.chunked.loss_and_gradients(ctx.wrap, *ctx.saved_tensors)
        else:
            gradients = ctx.saved_tensors
        grad_h_BLD, *grads = (gradient * each for each in gradients)
        return None, None, grad_h_BLD, None, *grads


def _add_up(sums: list[Tensor], parameters: list[nn.Parameter], grads: list[Tensor], *, num_chunks: int) -> None:
    """Add gradients of parameters to sums in fp32: one product would round once, bf16 sums at every chunk.

    A single chunk has no sum, and that of two is rounded once in any dtype.
    """
    is_first = not sums
    for i, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        local = _local_as(grad, getattr(parameter, "placements", None))
        if is_first:
            sums.append(local.to(torch.float32, copy=True) if num_chunks > 2 else local)
        elif num_chunks > 2:
            sums[i] += local
        else:
            sums[i] = sums[i] + local  # not in place: two parameters may have the same gradient


def _unchanged(h: Tensor) -> Tensor:
    return h


def _replicated_over(h: DTensor) -> Callable[[Tensor], Tensor]:
    mesh = h.device_mesh
    return lambda local: DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def _local_as(gradient: Tensor, placements: Any) -> Tensor:
    """This rank's part of a gradient, which usually has these placements already."""
    return gradient.redistribute(placements=placements).to_local() if isinstance(gradient, DTensor) else gradient
