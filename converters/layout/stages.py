"""The units of each pipeline stage, and the stages of each rank, as torchtitan splits."""

from collections.abc import Sequence
from itertools import islice

from converters.common.errors import ConfigError
from converters.families.parameters import is_block


def split_stages(num_stages: int, units: Sequence[str], *, first_less: int = 1, last_less: int = 1) -> list[list[str]]:
    """Names of the units of each pipeline stage, as torchtitan splits (generate_llm_fqn_per_model_part).

    The units in front of the blocks, such as the embedding, count as `first_less` blocks and those behind them as
    `last_less`; what does not divide goes to the first stages. Raises ConfigError if a stage would be left empty.
    """
    if num_stages == 1:
        return [list(units)]
    layers = [unit for unit in units if is_block(unit)]
    first, last = units.index(layers[0]), units.index(layers[-1]) + 1
    num_layers = len(layers)
    per_stage, extra = divmod(num_layers + first_less + last_less, max(num_stages, 1))
    if num_stages < 1 or per_stage < max(1, first_less, last_less):
        most = (num_layers + first_less + last_less) // max(1, first_less, last_less)
        raise ConfigError(
            f"{num_layers} layers cannot be split into {num_stages} pipeline stages",
            hint=f"embedding counts as {first_less} and output as {last_less} layers; at most {most} stages",
        )
    sizes = [per_stage + (stage < extra) for stage in range(num_stages)]
    sizes[0] -= first_less
    sizes[-1] -= last_less
    remaining = iter(layers)
    stages = [list(islice(remaining, size)) for size in sizes]
    stages[0][:0] = units[:first]
    stages[-1] += units[last:]
    return stages


def ranks_of_stages(num_stages: int, pp: int, *, v_shaped: bool = False) -> tuple[int, ...]:
    """The pipeline rank of each stage: round robin, or V-shaped, where rank 0 holds the first and the last stage."""
    if v_shaped:
        return tuple(min(stage % (2 * pp), 2 * pp - 1 - stage % (2 * pp)) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))
