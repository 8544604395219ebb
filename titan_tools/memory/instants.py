"""Instants of a step in words."""

from titan_tools.memory.trace.events import Place

_PHASES = {
    "build": "when the model is built",
    "states": "when optimizer states are made",
    "reduce": "when a pipeline step's gradients are reduced",
    "clip": "when gradients are clipped",
    "optimizer": "in the optimizer's update",
    "zero_grad": "when gradients are let go",
    "validation": "in validation",
}
_MODULES = {
    "": "the model",
    "output": "the output and the loss",
    "loss": "the loss",
    "norm": "the last norm",
    "tok_embeddings": "the embedding",
}


def in_words(place: Place) -> str:
    """Such as `backward of layers.31, microbatch 2 of stage 1`; counted from 0."""
    if place.phase in _PHASES:
        return _PHASES[place.phase]
    what = {"weight": "weights' gradients"}.get(place.phase, place.phase)
    said = f"{what} of {_MODULES.get(place.module, place.module)}"
    if place.microbatch > 0 or place.stage > 0:
        said += f", microbatch {place.microbatch}"
    return f"{said} of stage {place.stage}" if place.stage > 0 else said
