"""A rank's trace at any depth: of few layers, expanded; of all where the model is shallow or its layers differ."""

from collections.abc import Sequence
from dataclasses import replace

from converters.families.base import ModelArgs
from converters.layout import MeshShape
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.depth import Depth, captured_layers
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.expand import expand_layers
from titan_tools.memory.trace.kernels import Kernels
from titan_tools.memory.trace.templates import NO_LAYER, Aperiodic, layer_of
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.stages import split_model


def trace_rank(
    config: Config, args: ModelArgs, dims: MeshShape, *, rank: int, kernels: Kernels, num_steps: int = 2
) -> Trace:
    """What `capture` gives, event for event, mostly without running all layers. The layout must have been checked."""
    whole = split_model(config.parallelism, args.num_layers, dims.pp)
    period = layer_period(config.activation_checkpoint)
    shallow = shallow_stages(whole.modules, period)
    if shallow == whole.modules:
        return capture(config, args, dims, rank=rank, kernels=kernels, num_steps=num_steps)
    parallelism = config.parallelism
    if dims.pp > 1:
        parallelism = replace(parallelism, module_fqns_per_model_part=shallow)
    captured = capture(
        replace(config, parallelism=parallelism),
        replace(args, num_layers=sum(len(layers_in(modules)) for modules in shallow)),
        dims,
        rank=rank,
        kernels=kernels,
        num_steps=num_steps,
    )
    try:
        held = whole.stages_of(dims.coordinates(rank).pp)
        return expand_layers(
            captured,
            [
                d
                for stage in held
                if (d := Depth(layers_in(shallow[stage]), layers_in(whole.modules[stage]), period)).captured
            ],
        )
    except Aperiodic:
        return capture(config, args, dims, rank=rank, kernels=kernels, num_steps=num_steps)


def layer_period(settings: ActivationCheckpoint) -> int:
    """Every so many layers are alike: what differs between them is which ones are computed again."""
    if settings.mode == "selective" and settings.selective_ac_option != "op":
        return int(settings.selective_ac_option)
    return 1


def shallow_stages(stages: Sequence[Sequence[str]], period: int) -> tuple[tuple[str, ...], ...]:
    """Modules of stages with as few layers as stand for all, numbered anew."""
    start, shallow = 0, []
    for modules in stages:
        count = captured_layers(len(layers_in(modules)), period)
        layers = [f"layers.{number}" for number in range(start, start + count)]
        at = next((i for i, name in enumerate(modules) if layer_of(name) != NO_LAYER), len(modules))
        shallow.append((*modules[:at], *layers, *(name for name in modules[at:] if layer_of(name) == NO_LAYER)))
        start += count
    return tuple(shallow)


def layers_in(modules: Sequence[str]) -> range:
    numbers = [layer_of(name) for name in modules if layer_of(name) != NO_LAYER]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)
