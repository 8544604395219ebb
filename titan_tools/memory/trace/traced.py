"""A rank's trace at any depth: of few layers, expanded; of all where the model is shallow or its layers differ."""

from converters.families.base import ModelArgs
from converters.layout import MeshShape
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.expand.expand import expand_layers
from titan_tools.memory.trace.expand.shallow import shallow_model
from titan_tools.memory.trace.expand.templates import Aperiodic
from titan_tools.memory.trace.kernels.kernels import Kernels
from trainer.config.sections import Config


def trace_rank(
    config: Config, args: ModelArgs, dims: MeshShape, *, rank: int, kernels: Kernels, num_steps: int = 2
) -> Trace:
    """What `capture` gives, event for event, mostly without running all layers. The layout must have been checked."""
    if shallow := shallow_model(config, args, dims, rank=rank):
        trace = capture(shallow.config, shallow.args, dims, rank=rank, kernels=kernels, num_steps=num_steps)
        try:
            return expand_layers(trace, shallow.depths)
        except Aperiodic:
            pass  # layers that differ are all to be run
    return capture(config, args, dims, rank=rank, kernels=kernels, num_steps=num_steps)
