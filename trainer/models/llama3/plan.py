"""Llama 3's tensor-parallel plan, module FQN → style: derived from the dims that `converters` says TP shards.

Between the blocks the hidden states are sequence shards (sequence parallelism): embedding and row-parallel products end
in a reduce-scatter over the sequence, norms work on shards, attention and feed-forward gather their input.
"""

from collections.abc import Sequence

from converters.families.base import Parameter
from trainer.models.styles import TensorStyle

_BY_TP_DIM = {0: TensorStyle.COLUMNS, 1: TensorStyle.ROWS, None: TensorStyle.SEQUENCE_SHARDS}
_ENDS = {"tok_embeddings": TensorStyle.EMBEDDING, "output": TensorStyle.LOGITS}


def tensor_plan(parameters: Sequence[Parameter]) -> dict[str, TensorStyle]:
    """The style of every module that tensor parallelism touches."""
    plan = {}
    for parameter in parameters:
        if parameter.fqn.endswith(".bias"):
            continue  # goes with its weight, whose module has the style
        module = parameter.fqn.removesuffix(".weight")
        plan[module] = _ENDS.get(module, _BY_TP_DIM[parameter.tp_dim])
        block, _, last = module.rpartition(".")
        if last in ("wq", "w1"):  # once per attention and feed-forward
            plan[block] = TensorStyle.GATHER_SEQUENCE
    plan.setdefault("output", TensorStyle.LOGITS)  # tied: no parameter of its own, but a module
    return plan
