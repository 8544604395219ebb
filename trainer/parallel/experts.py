"""Settings of mixture-of-experts models: what is not supported for them, and what is for them alone.

torch is imported inside functions, so that settings are checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.families.args import ModelArgs
from converters.families.base import Family
from converters.families.blocks import Experts
from converters.families.parameters import Role
from converters.families.rules import Zeros
from converters.layout.mesh_check import expert_mesh_problems
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Config

if TYPE_CHECKING:
    from trainer.models.units import ModelPart


_KEYS = {
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


def has_experts(family: Family, args: ModelArgs) -> bool:
    return family.has_role(Role.ROUTER, args)


def balance_rate(config: Config, of_model: float) -> float:
    """The rate at which a run moves `expert_bias`. Forced loads say nothing about the router: none moves then."""
    if config.debug.moe_force_load_balance:
        return 0.0
    rate = config.training.expert_balance_rate
    return of_model if rate is None else rate


def expert_problems(config: Config, family: Family, args: ModelArgs, dims: MeshShape) -> list[str]:
    """Settings that a model with experts, or one without them, cannot be combined with."""
    rate = config.training.expert_balance_rate
    mixtures = {b.feed_forward for b in family.blocks(args) if isinstance(b.feed_forward, Experts)}
    problems = [
        f"parallelism.{_KEYS[degree]} = {getattr(dims, degree)} {text}"
        for degree, text in expert_mesh_problems(dims, family, args)
    ]
    if not has_experts(family, args):
        if config.debug.moe_force_load_balance:
            problems.append("debug.moe_force_load_balance = true, but the model has no experts; nearest: false")
        if rate is not None:
            problems.append(f"training.expert_balance_rate = {rate}, but the model has no experts; nearest: unset")
        return problems
    is_balanced = any(balance_rate(config, m.balance_rate) for m in mixtures)
    if config.checkpoint.last_save_in_hf and is_balanced and not _has_biases_in_hf(family, args):
        problems.append(
            "checkpoint.last_save_in_hf: Hugging Face's models have no place for moe.expert_bias, which balances the"
            " experts of this run; nearest: training.expert_balance_rate = 0, or last_save_in_hf = false, and after the"
            " run titan convert dcp-to-hf --drop-expert-bias"
        )
    return problems


def _has_biases_in_hf(family: Family, args: ModelArgs) -> bool:
    """Whether Hugging Face's models have a place for the biases that balance the experts."""
    rules = family.naming_for(family.namings["hf"], args).rules if "hf" in family.namings else ()
    nameless = {rule.native for rule in rules if isinstance(rule.op, Zeros)}
    biases = [p for p in family.parameters(args) if p.role is Role.ROUTER_BIAS]
    return nameless.isdisjoint(p.fqn.replace(f"layers.{p.layer}.", "layers.{n}.", 1) for p in biases)


def apply_expert_settings(model: ModelPart, config: Config) -> None:
    """Set what the config says about the experts of a model."""
    from trainer.models.moe import MoE

    for module in model.modules():
        if isinstance(module, MoE):
            module.router.forces_balance = config.debug.moe_force_load_balance
            module.balance_rate = balance_rate(config, module.balance_rate)
