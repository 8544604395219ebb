"""The degrees of the run that is to be estimated, with everything that cannot be told at once."""

from collections.abc import Sequence

from converters.errors import ConfigError, list_offenders
from converters.families.registry import get_family
from converters.layout import MeshShape
from trainer.config.sections import Config
from trainer.job import layout_problems, required_world_size, resolve


def resolved_layout(
    config: Config, *, world_size: int | None = None, problems: Sequence[str] | None = None
) -> MeshShape:
    """The degrees on `world_size` ranks (None: as many as the config's degrees name, as `titan config check` has it).

    Raises ConfigError with everything that cannot be, `problems` of the caller included.
    """
    args = get_family(config.model.name).flavors[config.model.flavor]
    dims, tries, found = _degrees(config, world_size)
    found = [*(problems or ()), *found, *layout_problems(config, args, dims)]
    if found:
        raise ConfigError(f"nothing was estimated, {_count(found)}:" + list_offenders(found, most=50), tries=tries)
    return dims


def _degrees(config: Config, world_size: int | None) -> tuple[MeshShape, list[str], list[str]]:
    """The degrees, or near ones and why they are not what was asked for, with what to try."""
    parallelism = config.parallelism
    needed = required_world_size(parallelism)
    try:
        return resolve(parallelism, world_size or needed), [], []
    except ConfigError as error:
        multiples = sorted({max(world_size // needed, 1) * needed, (world_size // needed + 1) * needed})
        fitting = multiples if parallelism.data_parallel_shard_degree == -1 else [needed]
        near = ", ".join(f"--world-size {n}" for n in fitting)
        return (
            resolve(parallelism, needed),
            [f"--world-size {n}" for n in fitting],
            [f"{error.message}; nearest: {near}"],
        )


def _count(problems: list[str]) -> str:
    return "one thing cannot be" if len(problems) == 1 else f"{len(problems)} things cannot be"
