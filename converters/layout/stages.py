"""The modules of each pipeline stage, and the stages of each rank, as torchtitan splits."""

from itertools import islice

from converters.common.errors import ConfigError


def split_stages(num_stages: int, num_layers: int, *, first_less: int = 1, last_less: int = 1) -> list[list[str]]:
    """Module names per pipeline stage, as torchtitan splits (generate_llm_fqn_per_model_part).

    The embedding counts as `first_less` layers and norm + output as `last_less`; what does not divide goes to the first
    stages. Raises ConfigError if a stage would be left empty.
    """
    layers = [f"layers.{n}" for n in range(num_layers)]
    if num_stages == 1:
        return [["tok_embeddings", *layers, "norm", "output"]]
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
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def ranks_of_stages(num_stages: int, pp: int, *, v_shaped: bool = False) -> tuple[int, ...]:
    """The pipeline rank of each stage: round robin, or V-shaped, where rank 0 holds the first and the last stage."""
    if v_shaped:
        return tuple(min(stage % (2 * pp), 2 * pp - 1 - stage % (2 * pp)) for stage in range(num_stages))
    return tuple(stage % pp for stage in range(num_stages))


def module_of(fqn: str) -> str:
    """The module that pipeline splitting moves: `layers.3` of `layers.3.attention.wq.weight`, `norm` of its weight."""
    head, _, rest = fqn.partition(".")
    return f"{head}.{rest.partition('.')[0]}" if head == "layers" else head
