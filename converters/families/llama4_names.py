"""The family of Llama 4: names in every format."""

from dataclasses import replace

from converters.families.base import Family, Naming
from converters.families.experts import TITAN_EXPERTS
from converters.families.foreign import MetaFormat, Multimodal
from converters.families.llama import HF, TITAN_QKV_LINEAR
from converters.families.llama4 import ATTENTION_OF, FLAVORS, Llama4Args, block, parameters
from converters.families.llama4_config import TEXT, args_of, config_of
from converters.families.llama4_meta import META, args_from_meta_params, meta_params, stored_tensors
from converters.families.llama4_torchtitan import as_torchtitan_trained
from converters.families.rules import Half, Rule, Transposed, Zeros

_L, _HF_L = "layers.{n}.", "model.layers.{n}."
_MOE, _SHARED = _L + "moe.", "moe.shared_experts."
_EXPERT_BIAS = Rule(_MOE + "expert_bias", "", Zeros("published Llama 4 has no such offset"))
# Pairs are rotated in all of them, so that no row moves
_HF = Naming(
    "hf",
    (
        *(Rule(r.native, r.foreign.replace(".mlp.", ".feed_forward.")) for r in HF.rules if ".bias" not in r.native),
        Rule(_MOE + "router.gate.weight", _HF_L + "feed_forward.router.weight"),
        *(
            Rule(_MOE + name, _HF_L + "feed_forward.experts.gate_up_proj", Transposed(Half(number, dim=2)))
            for name, number in {"experts.w1": 0, "experts.w3": 1}.items()
        ),
        Rule(_MOE + "experts.w2", _HF_L + "feed_forward.experts.down_proj", Transposed()),
        *(
            Rule(f"{_L}{_SHARED}{ours}.weight", f"{_HF_L}feed_forward.shared_expert.{theirs}_proj.weight")
            for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
        ),
        _EXPERT_BIAS,
    ),
    HF.drops,
)
_MULTIMODAL = Naming(
    "hf_multimodal",
    tuple(replace(r, foreign=r.foreign and f"language_model.{r.foreign}") for r in _HF.rules),
    tuple(replace(d, pattern=f"language_model.{d.pattern}") for d in HF.drops),
)
_SHARED_RULES = tuple(Rule(n, n) for n in (f"{_L}{_SHARED}{w}.weight" for w in ("w1", "w2", "w3")))
_QKV_LINEAR = Naming(  # torchtitan's last layout that had this family
    TITAN_QKV_LINEAR.name,
    (*(r for r in TITAN_QKV_LINEAR.rules if ".bias" not in r.native), *TITAN_EXPERTS, *_SHARED_RULES),
)

LLAMA4 = Family(
    name="llama4",
    flavors=FLAVORS,
    parameters=parameters,
    namings={naming.name: naming for naming in (_HF, _MULTIMODAL, META, _QKV_LINEAR)},
    args_from_hf_config=args_of,
    hf_config=config_of,
    hf_architectures=(TEXT.architecture,),
    hf_model_types=(TEXT.model_type,),
    meta=MetaFormat(args_from_meta_params, meta_params, key="moe_args", stored=stored_tensors),
    as_torchtitan_trained=as_torchtitan_trained,
    multimodal=Multimodal(
        architecture="Llama4ForConditionalGeneration",
        model_type="llama4",
        text_key="text_config",
        naming=_MULTIMODAL.name,
        extras=("vision_model.{*}", "multi_modal_projector.{*}"),
        files=("preprocessor_config.json", "processor_config.json"),
        outer_keys=("vision_config",),
    ),
    args_type=Llama4Args,
    quantized_as=(),  # experts are stacked, for which fp8 has no form that transformers reads
    keep_float32=(_EXPERT_BIAS.native,),
    block=block,
    attention_of=ATTENTION_OF,
)
