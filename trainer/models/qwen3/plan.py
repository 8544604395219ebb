"""Qwen 3's tensor-parallel plan: Llama's, but the norms of q and k work on the heads here, not on sequence shards."""

from collections.abc import Sequence

from converters.families.base import Parameter
from trainer.models.llama3 import plan as llama3
from trainer.models.styles import TensorStyle


def tensor_plan(parameters: Sequence[Parameter]) -> dict[str, TensorStyle]:
    """The style of every module that tensor parallelism touches."""
    plan = llama3.tensor_plan(parameters)
    return plan | {module: TensorStyle.HEADS for module in plan if module.endswith((".q_norm", ".k_norm"))}
