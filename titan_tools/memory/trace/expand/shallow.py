"""A model cut in depth whose layers stand for all of another's: what to capture in its place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from converters.families.base import ModelArgs
from converters.families.registry import get_family
from converters.layout import MeshShape
from titan_tools.memory.trace.events import NO_LAYER, layer_of
from titan_tools.memory.trace.expand.depth import Depth, captured_layers
from trainer.config.sections import ActivationCheckpoint, Config
from trainer.parallel.float8 import is_float8
from trainer.stages import split_model


@dataclass(frozen=True, slots=True)
class Shallow:
    """The config and the numbers of a model with few layers, and what its layers are to a rank's in the whole one."""

    config: Config
    args: ModelArgs
    depths: tuple[Depth, ...]  # of the rank's stages that hold layers


def shallow_model(config: Config, args: ModelArgs, dims: MeshShape, *, rank: int) -> Shallow | None:
    """The shallowest model that stands for this one; each stage is cut for itself. None where none would be shallower.

    Also None where few layers might not show how all are treated: parameters have different shapes, or float8 is for
    some layers.
    """
    period = layer_period(config.activation_checkpoint)
    whole = split_model(config.parallelism, args.num_layers, dims.pp)
    modules = _cut(whole.modules, period)
    if modules == whole.modules or not _are_alike(config, args):
        return None
    held = [stage for stage in whole.stages_of(dims.coordinates(rank).pp) if _layers(whole.modules[stage])]
    parallelism = config.parallelism
    if dims.pp > 1:
        parallelism = replace(parallelism, module_fqns_per_model_part=modules)
    return Shallow(
        config=replace(config, parallelism=parallelism),
        args=replace(args, num_layers=sum(len(_layers(names)) for names in modules)),
        depths=tuple(Depth(_layers(modules[stage]), _layers(whole.modules[stage]), period) for stage in held),
    )


def layer_period(settings: ActivationCheckpoint) -> int:
    """Every so many layers are alike: they differ in which ones are computed again, if anything."""
    if settings.mode == "selective" and settings.selective_ac_option != "op":
        return int(settings.selective_ac_option)
    return 1


def _are_alike(config: Config, args: ModelArgs) -> bool:
    left_out = config.float8.filter_fqns if is_float8(config.model) else ()
    shapes: dict[int, list] = {}
    for parameter in get_family(config.model.name).parameters(args):
        if (layer := layer_of(parameter.fqn)) != NO_LAYER:
            name = parameter.fqn.partition(f"{layer}.")[2]
            is_left_out = any(part in parameter.fqn for part in left_out)
            shapes.setdefault(layer, []).append((name, parameter.shape, parameter.role, parameter.tp_dim, is_left_out))
    first, *others = shapes.values()
    return len(shapes) == args.num_layers and all(layer == first for layer in others)


def _cut(stages: Sequence[Sequence[str]], period: int) -> tuple[tuple[str, ...], ...]:
    """Modules of stages with as few layers as stand for theirs, numbered anew."""
    start, cut = 0, []
    for modules in stages:
        count = captured_layers(len(_layers(modules)), period)
        first = next((i for i, name in enumerate(modules) if layer_of(name) != NO_LAYER), len(modules))
        layers = (f"layers.{number}" for number in range(start, start + count))
        cut.append((*modules[:first], *layers, *(name for name in modules[first:] if layer_of(name) == NO_LAYER)))
        start += count
    return tuple(cut)


def _layers(modules: Sequence[str]) -> range:
    numbers = [layer_of(name) for name in modules if layer_of(name) != NO_LAYER]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)
