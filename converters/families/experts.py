"""The names that other formats give the parameters of mixture-of-experts layers."""

from converters.families.rules import Half, Rule, Stacked, Zeros

NO_EXPERT_BIAS = "Hugging Face's class has no such offset, its experts are balanced by a loss"

_NATIVE, _HF = "layers.{n}.moe.", "model.layers.{n}.mlp."
_ROUTER = (
    Rule(_NATIVE + "router.gate.weight", _HF + "gate.weight"),
    Rule(_NATIVE + "expert_bias", "", Zeros(NO_EXPERT_BIAS)),
)
HF_EXPERTS = (  # one tensor per expert, as transformers saves them
    *_ROUTER,
    Rule(_NATIVE + "experts.w1", _HF + "experts.{e}.gate_proj.weight", Stacked()),
    Rule(_NATIVE + "experts.w2", _HF + "experts.{e}.down_proj.weight", Stacked()),
    Rule(_NATIVE + "experts.w3", _HF + "experts.{e}.up_proj.weight", Stacked()),
)
HF_FUSED_EXPERTS = (  # as transformers 5 holds them in memory
    *_ROUTER,
    Rule(_NATIVE + "experts.w1", _HF + "experts.gate_up_proj", Half(0, dim=1)),
    Rule(_NATIVE + "experts.w2", _HF + "experts.down_proj"),
    Rule(_NATIVE + "experts.w3", _HF + "experts.gate_up_proj", Half(1, dim=1)),
)
TITAN_EXPERTS = tuple(
    Rule(_NATIVE + name, _NATIVE + name)
    for name in ("router.gate.weight", "expert_bias", "experts.w1", "experts.w2", "experts.w3")
)
_NEWEST = _NATIVE + "routed_experts.inner_experts."
TITAN_NEWEST_EXPERTS = (  # torchtitan's newest names
    Rule(_NATIVE + "router.gate.weight", _NATIVE + "router.gate.weight"),
    Rule(_NATIVE + "expert_bias", _NATIVE + "expert_bias_E"),
    Rule(_NATIVE + "experts.w1", _NEWEST + "w1_EFD"),
    Rule(_NATIVE + "experts.w2", _NEWEST + "w2_EDF"),
    Rule(_NATIVE + "experts.w3", _NEWEST + "w3_EFD"),
)
