"""The family of GPT-OSS: names in every format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.common.errors import CheckpointError
from converters.families.args import DecoderArgs
from converters.families.base import Family, Naming
from converters.families.experts import NO_EXPERT_BIAS
from converters.families.foreign import Release
from converters.families.gpt_oss import ATTENTION_OF, FLAVORS, GptOssArgs, block, parameters
from converters.families.gpt_oss_config import args_of, config_of, from_release, release_config
from converters.families.llama import HF, TITAN_QKV_LINEAR
from converters.families.rules import Op, Rows, Rule, Same, Transposed, Zeros

if TYPE_CHECKING:
    from converters.common.box import TensorInfo

_L, _HF_L = "layers.{n}.", "model.layers.{n}."
_MOE, _EXPERTS = _L + "moe.", _L + "moe.experts."
_EXPERT_BIAS = _MOE + "expert_bias"
_GATE_UP, _DOWN = _EXPERTS + "mlp1_weight", _EXPERTS + "mlp2_weight"


def _dense(naming: Naming) -> tuple[Rule, ...]:
    """Llama's names without permutations, because halves are rotated in both forms, and without a feed-forward."""
    return tuple(Rule(each.native, each.foreign) for each in naming.rules if ".feed_forward." not in each.native)


def _hf(name: str, *, end: str, op: Op) -> Naming:
    """Hugging Face's names; those of the experts' matrices have `end`, and `op` makes native ones of them."""
    theirs = _HF_L + "mlp.experts."
    experts = (
        Rule(_GATE_UP, f"{theirs}gate_up_proj{end}", op),
        Rule(_EXPERTS + "mlp1_bias", theirs + "gate_up_proj_bias"),
        Rule(_DOWN, f"{theirs}down_proj{end}", op),
        Rule(_EXPERTS + "mlp2_bias", theirs + "down_proj_bias"),
    )
    others = (
        Rule(_L + "attention.sinks", _HF_L + "self_attn.sinks"),
        *(Rule(f"{_MOE}router.gate.{x}", f"{_HF_L}mlp.router.{x}") for x in ("weight", "bias")),
        Rule(_EXPERT_BIAS, "", Zeros(NO_EXPERT_BIAS)),
    )
    return Naming(name, (*_dense(HF), *others, *experts), HF.drops)


_HF = _hf("hf", end="", op=Transposed())  # as transformers holds and saves them: [experts, in, out]
# As they are published, in mxfp4. torchtitan's export has floating tensors under these names, in the same orientation
_BLOCKS = _hf("hf_mxfp4", end="_blocks", op=Same())
# What transformers 5 makes of them when it saves a dequantized model
_RESAVED = _hf("hf_mxfp4_resaved", end="_blocks", op=Transposed())

_NEWEST_EXPERTS = {"mlp1_weight": "_EGD", "mlp1_bias": "_EG", "mlp2_weight": "_EDF", "mlp2_bias": "_ED"}
_NEWEST = Naming(  # torchtitan's newest layout
    "titan_qkv_linear",
    (
        *_dense(TITAN_QKV_LINEAR),
        *(
            Rule(name, name)
            for name in (_L + "attention.sinks", _MOE + "router.gate.weight", _MOE + "router.gate.bias")
        ),
        Rule(_EXPERT_BIAS, _EXPERT_BIAS + "_E"),
        *(
            Rule(_EXPERTS + name, f"{_MOE}routed_experts.inner_experts.{name}{letters}")
            for name, letters in _NEWEST_EXPERTS.items()
        ),
    ),
)

_OWN_L = "block.{n}."
_Q, _K, _V = (_L + f"attention.{name}" for name in ("wq", "wk", "wv"))
_QKV = _OWN_L + "attn.qkv"
_OWN = Naming(  # OpenAI's release, whose experts are mxfp4; the rows of q, k and v are counted in _naming_for
    "openai",
    (
        Rule("tok_embeddings.weight", "embedding.weight"),
        *(Rule(f"{name}.{x}", f"{_QKV}.{x}", Rows(0, 0)) for name in (_Q, _K, _V) for x in ("weight", "bias")),
        *(Rule(f"{_L}attention.wo.{x}", f"{_OWN_L}attn.out.{x}") for x in ("weight", "bias")),
        Rule(_L + "attention.sinks", _OWN_L + "attn.sinks"),
        *(Rule(f"{_MOE}router.gate.{x}", f"{_OWN_L}mlp.gate.{x}") for x in ("weight", "bias")),
        Rule(_EXPERT_BIAS, "", Zeros(NO_EXPERT_BIAS)),
        Rule(_GATE_UP, _OWN_L + "mlp.mlp1_weight.blocks"),
        Rule(_EXPERTS + "mlp1_bias", _OWN_L + "mlp.mlp1_bias"),
        Rule(_DOWN, _OWN_L + "mlp.mlp2_weight.blocks"),
        Rule(_EXPERTS + "mlp2_bias", _OWN_L + "mlp.mlp2_bias"),
        Rule(_L + "attention_norm.weight", _OWN_L + "attn.norm.scale"),
        Rule(_L + "ffn_norm.weight", _OWN_L + "mlp.norm.scale"),
        Rule("norm.weight", "norm.scale"),
        Rule("output.weight", "unembedding.weight"),
    ),
)
# What OpenAI's own class holds in memory, and saves: values under the names of their parameters
_OWN_VALUES = Naming(
    "openai_values", tuple(replace(rule, foreign=rule.foreign.removesuffix(".blocks")) for rule in _OWN.rules)
)


def _naming_for(naming: Naming, args: DecoderArgs) -> Naming:
    """OpenAI's names with the rows of q, k and v in their fused matrix."""
    if naming.name not in (_OWN.name, _OWN_VALUES.name):
        return naming
    q_rows, kv_rows = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    starts, total = {_Q: 0, _K: q_rows, _V: q_rows + kv_rows}, q_rows + 2 * kv_rows

    def counted(rule: Rule) -> Rule:
        if not isinstance(rule.op, Rows):
            return rule
        return replace(rule, op=Rows(starts[rule.native.rpartition(".")[0]], total))

    return replace(naming, rules=tuple(map(counted, naming.rules)))


def _naming_by_shapes(naming: Naming, args: GptOssArgs, tensors: Mapping[str, TensorInfo]) -> Naming:
    """How floating tensors under the names of codes lie: as gate_up_proj's shape says, for down_proj too.

    down_proj, which is square in published models, says it where there is no gate_up_proj. Raises CheckpointError
    if no shape can.
    """
    from converters.common.dtypes import DTYPES  # with numpy, which a config does not load

    if naming.name != _BLOCKS.name:
        return naming
    of = {rule.native: rule.foreign for rule in naming.rules}
    gate_up, down = (
        [name for layer in range(args.num_layers) if (name := of[native].replace("{n}", str(layer))) in tensors]
        for native in (_GATE_UP, _DOWN)
    )
    matrices = gate_up or down
    num_in, num_out = (args.dim, 2 * args.ffn_hidden) if gate_up else (args.ffn_hidden, args.dim)
    floating = [name for name in matrices if DTYPES[tensors[name].dtype].is_floating]
    if not floating:
        return naming
    if num_in == num_out:
        raise CheckpointError(
            f"{floating[0]} is {tensors[floating[0]].dtype}: torchtitan saves such tensors as [experts, out, in], and "
            f"transformers as [experts, in, out]; with as many features in as out, {num_in:,}, no shape says which",
            hint="save them again as gate_up_proj and down_proj, as transformers' class has them: [experts, in, out]",
        )
    if not all(tensors[name].shape == (args.num_experts, num_in, num_out) for name in floating):
        return naming
    rules = {rule.native: rule.op for rule in _RESAVED.rules}
    return replace(
        naming, name=_RESAVED.name, rules=tuple(replace(rule, op=rules[rule.native]) for rule in naming.rules)
    )


GPT_OSS = Family(
    name="gpt_oss",
    flavors=FLAVORS,
    parameters=parameters,
    namings={naming.name: naming for naming in (_HF, _BLOCKS, _RESAVED, _NEWEST, _OWN, _OWN_VALUES)},
    naming_for=_naming_for,
    naming_by_shapes=_naming_by_shapes,
    args_from_hf_config=args_of,
    hf_config=config_of,
    release=Release(from_release, release_config),
    hf_architectures=("GptOssForCausalLM",),
    hf_model_types=("gpt_oss",),
    quantized_as=("mxfp4",),
    args_type=GptOssArgs,
    keep_float32=(_EXPERT_BIAS,),
    block=block,
    attention_of=ATTENTION_OF,
)
