"""Activation checkpointing: which layers or operations are recomputed in backward.

torch is imported inside functions, so that settings are checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.sections import ActivationCheckpoint
from trainer.parallel.stages import SPLIT_BACKWARD_SCHEDULES

if TYPE_CHECKING:
    from trainer.models.units import ModelPart


def activation_checkpoint_problems(
    settings: ActivationCheckpoint, *, compiles_model: bool, schedule: str | None
) -> list[str]:
    """Settings that the chosen mode cannot be combined with. `schedule` is None without a pipeline."""
    is_by_operation = settings.mode == "selective" and settings.selective_ac_option == "op"
    problems = []
    if settings.mode == "memory_budget" and not compiles_model:
        problems.append(
            "activation_checkpoint.mode = memory_budget is applied by the compiler, and the model is not compiled;"
            " nearest: --compile.enable, or mode = selective with selective_ac_option = op"
        )
    if settings.mode != "none" and schedule in SPLIT_BACKWARD_SCHEDULES:
        # Measured: a checkpointed layer runs 11 times instead of 2, once more for each group of its weights; and torch
        # forbids reusing the results that `op` has saved.
        problems.append(
            f"schedule {schedule} runs backward once for inputs and once for each group of weights, and would recompute"
            f" layers as often with activation_checkpoint.mode = {settings.mode}; nearest: mode = none, or schedule"
            " Interleaved1F1B"
        )
    if settings.debug and is_by_operation:
        problems.append(
            "activation_checkpoint.debug and selective_ac_option = op both trace a layer's operations, and torch"
            " supports only one of them; nearest: mode = full"
        )
    if settings.debug and compiles_model and settings.mode in ("full", "selective"):
        problems.append(
            "activation_checkpoint.debug traces operations, which a compiled layer does not run one by one;"
            " nearest: without compile"
        )
    return problems


def set_memory_budget(settings: ActivationCheckpoint, dump_folder: Path) -> None:
    """Set the compiler's memory budget for this process: the share of activations that it may save for backward."""
    import torch._functorch.config as functorch

    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        functorch.unsafe_treat_script_objects_as_zero_size = True  # under TP a DeviceMesh
    is_budget = settings.mode == "memory_budget"
    functorch.activation_memory_budget = settings.memory_budget if is_budget else 1.0
    functorch.visualize_memory_budget_pareto = is_budget and settings.visualize_memory_budget_pareto
    functorch.memory_budget_pareto_dir = str(dump_folder / "memory_budget_pareto")


def apply_activation_checkpoint(model: ModelPart, settings: ActivationCheckpoint) -> None:
    """Recompute layers in backward; `selective` with a number n recomputes every n-th layer of the model.

    Only `forward` is replaced, no module is wrapped: FQNs do not change, and FSDP's hooks run outside it.
    """
    from torch.utils.checkpoint import checkpoint

    from trainer.models.units import blocks_of

    if settings.mode in ("none", "memory_budget"):
        return
    run = partial(
        checkpoint,
        use_reentrant=False,
        early_stop=settings.early_stop,
        preserve_rng_state=settings.preserve_rng_state,
        determinism_check=settings.determinism_check,
        debug=settings.debug,
    )
    every = 1
    if settings.mode == "selective" and settings.selective_ac_option == "op":
        run = partial(run, context_fn=_save_costly_operations)
    elif settings.mode == "selective":
        every = int(settings.selective_ac_option)
    for block in blocks_of(model):
        if (block.number + 1) % every == 0:  # numbered in the whole model: a pipeline does not change the choice
            block.module.forward = _recomputed(block.module.forward, run)


def _recomputed(forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    # A function instead of a partial: Dynamo traces into our functions, but not into torch's checkpoint at the top.
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return run(forward, *args, **kwargs)

    return checkpointed


def _kept_operations() -> frozenset[Any]:
    """Operations whose results are kept, as torchtitan keeps them; matrix products are handled separately.

    All-gathers run again: what they gather is tp times what they are made of. Only functional operations: one that
    fills a buffer, as c10d's collectives do, would leave it empty if it were not run again.
    """
    import torch

    from trainer.parallel.expert_exchange import EXCHANGES
    from trainer.parallel.masked_attention import masked_operations

    aten = torch.ops.aten
    return frozenset(
        {
            *EXCHANGES,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._efficient_attention_forward.default,  # a context rank's, in fp32 on CUDA
            *masked_operations(),
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
            aten.max.default,  # float8's scales: one number each
            aten.topk.default,  # a recomputed score that differs in its last bit must not choose another expert
        }
    )


@cache
def _matrix_products() -> frozenset[Any]:
    import torch

    aten = torch.ops.aten
    return frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default})


def _save_costly_operations() -> Any:
    """Contexts for one checkpointed layer that save attention, reduce-scatters, and every second matrix product.

    Half of the products balance memory and time, as in torchtitan. Forward and recomputation count separately, so that
    they decide alike.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    saved, products = _kept_operations(), _matrix_products()
    num_products = {"forward": 0, "recompute": 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in products:
            phase = "recompute" if context.is_recompute else "forward"
            num_products[phase] += 1
            keep = num_products[phase] % 2 == 1
        else:
            keep = operation in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
