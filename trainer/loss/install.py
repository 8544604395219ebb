"""Choose the loss of a run and make the model's last part compute it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from converters.common.errors import UnsupportedError
from converters.common.extensions import ExtensionError, where_defined
from trainer.config.sections import Compile, Training
from trainer.loss.chunked import ChunkedOutput, LossSum
from trainer.loss.cross_entropy import cross_entropy_sum, sharded_cross_entropy_sum
from trainer.loss.registry import CHUNKED, PLAIN, get_loss
from trainer.parallel.compile import compiles

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from trainer.models.decoder import Transformer


def install_loss(
    part: "Transformer",
    training: Training,
    compile: Compile,
    *,
    chunk_tokens: int,
    tp_mesh: "DeviceMesh | None" = None,
    is_loss_parallel: bool = False,
    all_forward_first: bool = False,
) -> None:
    """Make a part's `forward(x, positions)` a `forward(x, positions, targets)` that returns the summed loss, in fp32.

    Both also take `documents`, if the model does. A part without the output projection returns its hidden states. Only
    `forward` is replaced, also the output module's: FQNs do not change, and hooks of FSDP and tensor parallelism still
    run. Call it before FSDP or DDP wraps the part. `chunk_tokens`: tokens of a chunk of the chunked loss. `tp_mesh` is
    None without tensor parallelism; `all_forward_first` says that the pipeline schedule runs all forward passes before
    the first backward.
    """
    if part.output is None:
        part.forward = partial(_pass_on, part.forward)  # type: ignore[method-assign]
        return
    group = tp_mesh.get_group() if tp_mesh is not None and is_loss_parallel else None
    loss_sum = choose_loss(training.loss, compile, group)
    if training.loss == CHUNKED:
        if tp_mesh is not None:
            loss_sum = (_of_columns if is_loss_parallel else _of_whole_logits)(loss_sum)
        chunked = ChunkedOutput(part.output, loss_sum, chunk_tokens=chunk_tokens, in_backward=all_forward_first)
        part.output.forward = chunked
        part.forward = partial(_loss_of_output, part.forward, chunked)  # type: ignore[method-assign]
    else:
        part.forward = partial(_loss_of_logits, part.forward, loss_sum)  # type: ignore[method-assign]


def choose_loss(name: str, compile: Compile, group: "dist.ProcessGroup | None") -> LossSum:
    """The loss of plain local logits: whole logits, or with a `group` this rank's columns of them."""
    if name not in (CHUNKED, PLAIN):
        loss_sum = get_loss(name).loss_sum
    else:
        loss_sum = cross_entropy_sum if group is None else sharded_cross_entropy_sum
    compiled = maybe_compile_loss(loss_sum if group is None else partial(loss_sum, group=group), compile)
    return compiled if name in (CHUNKED, PLAIN) else partial(_checked, compiled, name)


def _checked(loss_sum: LossSum, name: str, logits: Tensor, targets: Tensor) -> Tensor:
    """A registered loss. Raises ExtensionError if it is not one number in fp32 that depends on the logits."""
    loss: Any = loss_sum(logits, targets)
    if not isinstance(loss, Tensor):
        returned = f"a {type(loss).__name__}"
    elif loss.ndim or loss.dtype not in (torch.float32, torch.float64):
        returned = f"a tensor of {str(loss.dtype).removeprefix('torch.')} of shape {list(loss.shape)}"
    elif logits.requires_grad and not loss.requires_grad:
        returned = "a number that does not depend on the logits"
    else:
        return loss
    raise ExtensionError(
        f"{where_defined(get_loss(name).loss_sum)}: loss {name!r} returned {returned}, not the sum over tokens, one "
        "number in fp32"
    )


def maybe_compile_loss(loss_sum: LossSum, settings: Compile) -> LossSum:
    """The loss, compiled if `compile.components` includes it: cast, softmax and sum fused, without fp32 logits."""
    return torch.compile(loss_sum, backend=settings.backend) if compiles(settings, "loss") else loss_sum


def _of_columns(loss_sum: LossSum) -> LossSum:
    """The loss of the output module's DTensor, from this rank's columns."""

    def of_columns(logits: "DTensor", targets: Tensor) -> Tensor:
        return loss_sum(logits.to_local(), targets)

    return cast("LossSum", of_columns)


def _of_whole_logits(loss_sum: LossSum) -> LossSum:
    """The loss of the output module's DTensor, gathered."""

    def of_whole(logits: "DTensor", targets: Tensor) -> Tensor:
        return loss_sum(logits.full_tensor(), targets)

    return cast("LossSum", of_whole)


Forward = Callable[..., Tensor]


def _pass_on(forward: Forward, x: Tensor, positions: Tensor, targets: Tensor, **documents: Tensor) -> Tensor:
    return forward(x, positions, **documents)


def _loss_of_logits(
    forward: Forward, loss_sum: LossSum, x: Tensor, positions: Tensor, targets: Tensor, **documents: Tensor
) -> Tensor:
    return loss_sum(forward(x, positions, **documents), targets)


def _loss_of_output(
    forward: Forward, chunked: ChunkedOutput, x: Tensor, positions: Tensor, targets: Tensor, **documents: Tensor
) -> Tensor:
    with chunked.given(targets):
        loss = forward(x, positions, **documents)
    if loss.ndim:
        raise UnsupportedError(
            'training.loss = "chunked" needs a model whose forward ends with a call of its `output` module; this one'
            f" returned a tensor of shape {tuple(loss.shape)}",
            tries=["--training.loss plain"],
        )
    return loss
