"""Settles at build which loss a run computes, and makes the model's last part compute it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from converters.errors import UnsupportedError
from trainer.config.sections import Compile, Config
from trainer.loss.chunked import ChunkedOutput, LossSum
from trainer.loss.cross_entropy import cross_entropy_sum, sharded_cross_entropy_sum
from trainer.loss.registry import ALL_FORWARD_FIRST, CHUNKED, PLAIN, get_loss, is_loss_parallel
from trainer.parallel.compile import compiles

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from trainer.mesh import Meshes


def leaves_columns(config: Config, meshes: "Meshes") -> bool:
    """Whether the output module leaves this rank's columns of the logits: not where it computes the loss itself."""
    return is_loss_parallel(config, meshes.dims) and config.training.loss != CHUNKED


def install_loss(part: nn.Module, config: Config, meshes: "Meshes") -> None:
    """Make a part's `forward(x, positions)` a `forward(x, positions, targets)` that returns the summed loss, in fp32.

    A part without the output passes its hidden states on. Only `forward` is replaced, also that of the output: FQNs
    stay, and what FSDP and tensor parallelism hook around them goes on. Comes before FSDP or DDP wraps the part.
    """
    if part.output is None:
        part.forward = partial(_pass_on, part.forward)
    elif config.training.loss == CHUNKED:
        pipelined = meshes.dims.pp > 1
        chunked = ChunkedOutput(
            part.output,
            _of_output(choose_loss(config, meshes), config, meshes),
            num_chunks=config.training.loss_chunks,
            in_backward=pipelined and config.parallelism.pipeline_parallel_schedule in ALL_FORWARD_FIRST,
        )
        part.output.forward = chunked
        part.forward = partial(_loss_of_output, part.forward, chunked)
    else:
        part.forward = partial(_loss_of_logits, part.forward, choose_loss(config, meshes))


def choose_loss(config: Config, meshes: "Meshes") -> LossSum:
    """The loss of logits as they come, plain local tensors: whole ones, or this rank's columns under loss parallel."""
    group = {"group": meshes["tp"].get_group()} if is_loss_parallel(config, meshes.dims) else {}
    name = config.training.loss
    if name not in (CHUNKED, PLAIN):
        loss_sum = get_loss(name).loss_sum
    else:
        loss_sum = sharded_cross_entropy_sum if group else cross_entropy_sum
    return maybe_compile_loss(partial(loss_sum, **group), config.compile)


def maybe_compile_loss(loss_sum: LossSum, settings: Compile) -> LossSum:
    """Compiled, if `compile.components` says so: cast, softmax and sum in one go, without the fp32 logits."""
    return torch.compile(loss_sum, backend=settings.backend) if compiles(settings, "loss") else loss_sum


def _of_output(loss_sum: LossSum, config: Config, meshes: "Meshes") -> LossSum:
    """The loss of logits as the output module makes them: sharded over tp, where there is tensor parallelism."""
    if meshes.dims.tp == 1:
        return loss_sum

    def of_columns(logits: "DTensor", targets: Tensor) -> Tensor:
        return loss_sum(logits.to_local(), targets)

    def of_whole(logits: "DTensor", targets: Tensor) -> Tensor:
        return loss_sum(logits.full_tensor(), targets)

    return of_columns if is_loss_parallel(config, meshes.dims) else of_whole


Forward = Callable[[Tensor, Tensor], Tensor]


def _pass_on(forward: Forward, x: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    return forward(x, positions)


def _loss_of_logits(forward: Forward, loss_sum: LossSum, x: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    return loss_sum(forward(x, positions), targets)


def _loss_of_output(forward: Forward, chunked: ChunkedOutput, x: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    with chunked.given(targets):
        loss = forward(x, positions)
    if loss.ndim:
        raise UnsupportedError(
            'training.loss = "chunked" needs a model whose forward ends with a call of its `output` module; this one'
            f" returned a tensor of shape {tuple(loss.shape)}",
            tries=["--training.loss plain"],
        )
    return loss
