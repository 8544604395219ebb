"""The steps between opening weights and planning their output: each returns weights, and remarks on what it did."""

from collections.abc import Callable
from contextlib import ExitStack

from converters.common.errors import CheckpointError, ConfigError
from converters.conversion.completed import completed
from converters.conversion.records import Request
from converters.conversion.trained_by import apply_trained_by
from converters.families.registry import get_family
from converters.formats.registry import FORMATS, usual_format
from converters.model.multimodal import require_extras
from converters.source.weights import NativeWeights

Step = Callable[[NativeWeights, Request, ExitStack], tuple[NativeWeights, list[str]]]


def check_names(weights: NativeWeights, request: Request, files: ExitStack) -> tuple[NativeWeights, list[str]]:
    """A remark on the names in the source, if its format was named: other formats have the same container, too.

    Raises CheckpointError if they are those of another format.
    """
    wanted, container, names = request.source, weights.catalog.container, weights.naming
    if wanted is None:
        return weights, []
    remarks = [text for begin, text in wanted.names.items() if begin == container or names.startswith(begin)]
    if remarks or not wanted.names:
        return weights, [text for text in remarks if text]
    others = (f for f in FORMATS.values() if container in f.containers and names.startswith(tuple(f.names)))
    actual = next(others, usual_format(container)) or wanted
    if actual is wanted:
        return weights, [f"tensors have {names} names, not those of {wanted.called}"]
    tries = [f"titan convert {actual.name}-to-{request.output.name} {request.src} {request.dst}"]
    raise CheckpointError(f"{request.src} is {actual.called} with {names} names, not {wanted.called}", tries=tries)


def complete_extras(weights: NativeWeights, request: Request, files: ExitStack) -> tuple[NativeWeights, list[str]]:
    """--keep-extra: all that a multimodal checkpoint has beside its text model, of `model_from` if the source lacks it.

    Raises ConfigError if there is nothing to keep, or not all of it.
    """
    if not request.keep_extra:
        return weights, []
    weights = files.enter_context(completed(weights, request.model_from))
    require_extras(get_family(weights.info.family), weights.info.outer, weights.extras, where=request.src)
    return weights, []


def describe_training(weights: NativeWeights, request: Request, files: ExitStack) -> tuple[NativeWeights, list[str]]:
    """--trained-by: the numbers of the model that was trained."""
    return apply_trained_by(weights, request.trained_by)


def require_mtp(weights: NativeWeights, request: Request, files: ExitStack) -> tuple[NativeWeights, list[str]]:
    """--mtp keep: raise ConfigError if there are no layers for multi-token prediction."""
    if request.keep_mtp and not weights.num_mtp_layers:
        raise ConfigError(f"--mtp keep: {request.src} has no layers for multi-token prediction", hint="leave it out")
    return weights, []


STEPS: tuple[Step, ...] = (check_names, complete_extras, describe_training, require_mtp)


def take_steps(weights: NativeWeights, request: Request, files: ExitStack) -> tuple[NativeWeights, list[str]]:
    """Take all steps in order; what they open is closed with `files`."""
    remarks: list[str] = []
    for step in STEPS:
        weights, notes = step(weights, request, files)
        remarks += notes
    return weights, remarks
