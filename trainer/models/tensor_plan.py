"""The tensor-parallel plan of a model, module FQN → style, derived from the roles of its parameters.

Between the blocks the hidden states are sequence shards (sequence parallelism): embedding and row-parallel products end
in a reduce-scatter over the sequence, norms work on shards, attention and feed-forward gather their input.
`trainer/parallel/tensor.py` translates the styles to DTensor's.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from converters.families.parameters import Parameter, Role


class TensorStyle(Enum):
    """The style of a module under tensor parallelism with sequence parallelism."""

    EMBEDDING = "rows of the vocabulary here; output becomes sequence shards"
    SEQUENCE_SHARDS = "weights replicated, works on sequence shards (norms)"
    HEADS = "weights replicated, works on the heads here: [B, L, heads, H]"
    SINKS = "a parameter, and no module: one number of each head here, which the inner attention reads"
    TOKENS = "weights replicated, works on the tokens of sequence shards: [T, D]"
    GATHER_SEQUENCE = "input sequence shards are gathered for the module"
    COLUMNS = "output features here"
    COLUMNS_OF_GATHERED = "reads tokens that are gathered; output features here, and a part of the input's gradient"
    GATHERED_COLUMNS = "gathers its input, sequence shards; output features here"
    GATHER_LATENTS = "input sequence shards are gathered; each rank has a part of the output's gradient"
    ROWS = "input features here; partial sums become sequence shards"
    PARTIAL_ROWS = "input features here; returns partial sums"
    LOGITS = "gathers its input; columns of the vocabulary here"


_STYLES: Mapping[Role, TensorStyle] = {
    Role.EMBEDDING: TensorStyle.EMBEDDING,
    Role.OUTPUT: TensorStyle.LOGITS,
    Role.NORM: TensorStyle.SEQUENCE_SHARDS,
    Role.HEAD_NORM: TensorStyle.HEADS,
    Role.COLUMN: TensorStyle.COLUMNS,
    Role.KV_COLUMN: TensorStyle.COLUMNS,
    Role.UP_COLUMN: TensorStyle.COLUMNS,
    Role.ROW: TensorStyle.ROWS,
    Role.ROUTER: TensorStyle.TOKENS,
    Role.LATENT: TensorStyle.TOKENS,
    Role.LATENT_NORM: TensorStyle.TOKENS,
}


def tensor_plan(parameters: Sequence[Parameter]) -> dict[str, TensorStyle]:
    """The style of every module that tensor parallelism touches, and of sinks; a bias follows its weight's.

    Experts have none: `trainer/parallel/expert_parallel.py` distributes them, and changes the plan of shared experts
    where it gathers their tokens.

    Latent attention makes its latents of sequence shards, with whole weights, and gathers them: they are a fraction of
    the hidden states. A query that is made of the hidden states themselves gathers those.
    """
    plan: dict[str, TensorStyle] = {}
    latent_attentions = {p.input_group for p in parameters if p.role is Role.LATENT}
    for parameter in parameters:
        if parameter.role is Role.SINK:
            plan[parameter.fqn] = TensorStyle.SINKS
        if not parameter.is_bias and parameter.role in _STYLES:
            plan[parameter.module] = _STYLES[parameter.role]
        if parameter.role is Role.COLUMN and parameter.input_group in latent_attentions:
            plan[parameter.module] = TensorStyle.GATHERED_COLUMNS
        elif parameter.role is Role.COLUMN and parameter.module.rpartition(".")[0] in latent_attentions:
            plan[parameter.module] = TensorStyle.COLUMNS_OF_GATHERED
        elif parameter.input_group and parameter.input_group not in latent_attentions:
            plan[parameter.input_group] = TensorStyle.GATHER_SEQUENCE
    plan |= {f"{attention}.latents": TensorStyle.GATHER_LATENTS for attention in latent_attentions}
    plan.setdefault("output", TensorStyle.LOGITS)  # tied: no parameter of its own, but a module
    return plan
