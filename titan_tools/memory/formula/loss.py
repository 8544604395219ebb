"""Bytes of logits, loss and output projection, plain and in pieces, in addition to the activations."""

from dataclasses import dataclass
from math import ceil

from titan_tools.memory.formula.float8 import CAST_BYTES, output_cast_bytes
from titan_tools.memory.formula.run_shape import FP32, RunShape

Moment = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LossBytes:
    """One microbatch on the last stage."""

    forward: tuple[Moment, ...]
    kept: int  # from its forward to its backward
    backward: tuple[Moment, ...]  # what is kept included
    output_backward: int  # besides the output's gradient: what its products read, or the hidden states' gradient
    keeps_hidden: bool  # the output's input stays until backward
    logits: tuple[Moment, ...] = ()  # whole logits, in the output's forward
    # Where backward is split:
    kept_for_weights: int = 0  # from the backward of inputs to that of weights
    kept_within: int = 0  # in addition, until the end of the backward of inputs


def loss_bytes(run: RunShape) -> LossBytes:
    """As trainer/loss/install.py chooses: whole logits, or pieces whose backward runs at once or in backward."""
    if not run.loss_chunks:
        return _plain(run)
    pieces = _pieces_forward_and_back(run)
    hidden = run.num_tokens * run.args.dim * run.compute_bytes
    gradients = hidden + _output_elements(run) * run.gradient_bytes
    scaled = ("gradients of the loss scaled", 2 * gradients)
    if run.loss_in_backward:
        per_piece = _logits(run, _piece_tokens(run, run.num_tokens)) * loss_forward_bytes(run)
        per_piece = max(per_piece, output_cast_bytes(run))
        return LossBytes((("loss of a piece", per_piece),), 0, (*pieces, scaled), hidden, keeps_hidden=True)
    return LossBytes(pieces, gradients, (scaled,), hidden, keeps_hidden=False, kept_for_weights=gradients)


def validation_loss_bytes(run: RunShape) -> int:
    """Of the forward of a validation batch."""
    num_tokens = run.validation_samples * run.validation_seq_len // run.mesh.cp
    return _logits(run, _piece_tokens(run, num_tokens)) * loss_forward_bytes(run)


def loss_kept_bytes(run: RunShape) -> int:
    """Bytes per logit from the loss's forward to its backward: log_softmax's result, or the probabilities.

    Compiled, log_softmax's is recomputed from the logits and two numbers per token; the sharded loss keeps the same.
    """
    return run.compute_bytes if run.compiles_loss and not run.loss_parallel else FP32


def loss_forward_bytes(run: RunShape) -> int:
    """Bytes per logit, the most in cross entropy's forward: the logits, their fp32 cast, what is kept.

    A compiled one casts in its kernels. Without loss parallelism it keeps the logits, and under TP the maximum comes
    before it: this rank's columns, all ranks', and a copy that joins those.
    """
    if run.compiles_loss and run.loss_parallel:
        return run.compute_bytes + FP32
    if run.compiles_loss:
        return run.compute_bytes if run.mesh.tp == 1 else 2 * run.compute_bytes + run.compute_bytes // run.mesh.tp
    cast = 0 if run.compute_bytes == FP32 else FP32
    return run.compute_bytes + cast + loss_kept_bytes(run)


def loss_backward_bytes(run: RunShape) -> int:
    """Bytes per logit, the most in cross entropy's backward, in addition to what is kept.

    torch: the gradients of nll_loss and of log_softmax, fp32. The sharded loss of trainer/loss/cross_entropy.py: the
    gradient, its product with the incoming one, and the result in the compute dtype. The logits are freed by then.
    Compiled, both are a kernel that writes the result.
    """
    if run.compiles_loss:
        return run.compute_bytes
    cast = 0 if run.compute_bytes == FP32 else run.compute_bytes
    return 2 * FP32 + (cast if run.loss_parallel else 0)


def _plain(run: RunShape) -> LossBytes:
    logits = _logits(run, run.num_tokens)
    cast = _output_elements(run) * run.compute_bytes if run.casts_weights else 0  # the output's weight, as it was read
    return LossBytes(
        forward=(("end of forward", max(cast + logits * loss_forward_bytes(run), output_cast_bytes(run))),),
        kept=cast + logits * loss_kept_bytes(run),
        backward=(("cross-entropy backward", cast + logits * (loss_kept_bytes(run) + loss_backward_bytes(run))),),
        output_backward=cast + _output_backward(run, run.num_tokens, logits),
        keeps_hidden=True,
        logits=(("forward of the output", cast + logits * run.compute_bytes),),
        kept_for_weights=run.num_tokens * run.args.vocab_size // run.mesh.tp * run.compute_bytes,
        kept_within=logits * loss_kept_bytes(run),
    )


def _pieces_forward_and_back(run: RunShape) -> tuple[Moment, ...]:
    """The maxima of a piece other than the first: the output's gradient is accumulated in fp32."""
    args, element = run.args, run.compute_bytes
    tokens = _piece_tokens(run, run.num_tokens)
    logits, output = _logits(run, tokens), _output_elements(run)
    held = run.num_tokens * args.dim * element  # the gradient of all hidden states
    # of all chunks before: in fp32, of two chunks as it was made
    sums = output * (0 if run.loss_chunks == 1 else run.gradient_bytes if run.loss_chunks == 2 else FP32)
    made = tokens * args.dim * element + output * run.gradient_bytes  # by the two products of a piece
    added = sums + (output * run.gradient_bytes if run.loss_chunks == 2 else 0)  # the sum of two is not made in place
    cast = output * element if run.casts_weights else 0  # the output's weight, and later its gradient before its cast
    return (
        (
            "cross-entropy backward of a piece",
            held + sums + cast + logits * (loss_kept_bytes(run) + loss_backward_bytes(run)),
        ),
        ("backward of the output for a piece", held + sums + cast + _output_backward(run, tokens, logits) + made),
        ("output's gradient added up", held + added + made),
    )


def _output_backward(run: RunShape, num_tokens: int, logits: int) -> int:
    """Besides the output's gradient: the gradient of the logits.

    In float8 products read it, and the hidden states, in both orders. Or more is held before the output's gradient:
    while its weight is cast, or the gradient of the logits for the second time.
    """
    gradient = logits * run.compute_bytes
    if run.float8 is None or not run.float8.converts_output:
        return gradient
    hidden = num_tokens * run.args.dim
    weight = 0 if run.float8.gathers else _output_elements(run)
    again = (CAST_BYTES + 1) * logits + weight + hidden * run.compute_bytes
    before = max(again, logits + CAST_BYTES * weight) - _output_elements(run) * run.gradient_bytes
    return gradient + max(3 * logits + 2 * hidden, before)


def _output_elements(run: RunShape) -> int:
    return run.args.vocab_size // run.mesh.tp * run.args.dim


def _piece_tokens(run: RunShape, num_tokens: int) -> int:
    return min(num_tokens, ceil(run.num_tokens / run.loss_chunks)) if run.loss_chunks else num_tokens


def _logits(run: RunShape, num_tokens: int) -> int:
    """Logits that the loss reads: with loss parallelism the vocabulary stays sharded by TP."""
    return num_tokens * (run.args.vocab_size // (run.mesh.tp if run.loss_parallel else 1))
