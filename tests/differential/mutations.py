"""Changes of single fields of a family's config, and of pairs, drawn from the config class's own list of fields.

Odd ones, of files that somebody edited: values of another type, settings of RoPE that lack something, missing keys.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
_LONG |= {"short_factor": [1.5, 1.0, 2.0, 3.0], "long_factor": [2.5, 2.0, 3.0, 4.0]}
# The same values under every key that transformers 4 and 5 read them from
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    _LLAMA3,
    _YARN,
    _LONG,
    {"rope_type": "proportional", "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
]
# The same, where nothing says that they must be read
_ODD_ROPES: list[Any] = [
    {"rope_type": "linear", "factor": 3},
    {"rope_type": "dynamic", "factor": 1.1},
    *(_YARN | more for more in ({"beta_fast": 8.0, "beta_slow": 2}, {"attention_factor": 0.7}, {"truncate": False})),
    *(_YARN | more for more in ({"mscale": 0.8, "mscale_all_dim": 1.3}, {"mscale": 0.8}, {"factor": None})),
    *(_YARN | more for more in ({"truncate": None}, {"original_max_position_embeddings": None})),
    _YARN | {"beta_fast": 0, "beta_slow": 0},
    {"rope_type": "yarn", "factor": 4.0},
    *({"rope_type": kind, "factor": 2.0} for kind in (*ROPE_INIT_FUNCTIONS, "axial", "su", None, 5)),
    {"factor": 4.0},
    {"type": "linear", "rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": "4.0"},
    {key: value for key, value in _LLAMA3.items() if key != "original_max_position_embeddings"},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}},
    {"rope_type": "linear", "factor": 4.0, "colour": "blue"},
    {},
    [1.0],
]
ABSENT = "<absent>"  # a file without the key
_ODD_BY_TYPE: dict[type, list[Any]] = {
    bool: [1, "true", None, ABSENT],
    int: [None, "4", True, 8.0, ABSENT],
    float: [1, None, "0.1", ABSENT],
}
_ODD: dict[str, list[Any]] = {
    "architectures": [[], ["LlamaModel"], ["Qwen2ForCausalLM"], "LlamaForCausalLM", ABSENT],
    "model_type": ["mistral", ABSENT],
    "hidden_act": [None, "no_such"],
    "layer_types": [["attention"] * 4, ["full_attention"] * 3, ["linear_attention"] * 4, "full_attention"],
    "rope_theta": [None, "10000"],
    "is_causal": [True, False],
    "is_decoder": [True],
    "add_cross_attention": [True],
    "attention_chunk_size": [8],
    "per_layer_config": [None, {"0": {"intermediate_size": 16}}],
    "pruned_heads": [{}, {"0": [1]}],
    "text_config": [{"vocab_size": 8}],
    "torchscript": [True],
    "attn_implementation": ["eager", "sdpa"],
    "num_labels": [3],
    "kv_sharing_modes": [["reuse"] * 2],
    "scoring_func": ["sigmoid", "softmax"],
    "moe_layer_freq": [1, 2],
    "index_topk": [8],
    "experts_per_token": [3, 2],
    "initial_context_length": [16, 4096],
    "swiglu_alpha": [1.702],
    "num_nextn_predict_layers": [0, 1],
}
# Values of fields whose type does not say what could stand there
VALUES: dict[str, list[Any]] = {
    "architectures": [None],
    "attention_chunk_size": [3, 8, None],
    "attn_scale": [0.3, 0.0],
    "attn_temperature_tuning": [False, 4],
    "bos_token_id": [None, 5],
    "chunk_size_feed_forward": [4],
    "dtype": ["bfloat16", "float16", None],
    "decoder_sparse_step": [2, 5],
    "eos_token_id": [None, 5, [5, 6]],
    "first_k_dense_replace": [0, 2, 4],
    "floor_scale": [4, 16],
    "head_dim": [8, 12, None],
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu", "silu", "swish"],
    "hidden_size": [48],
    "id2label": [{0: "a", 1: "b", 2: "c"}],
    "interleave_moe_layer_step": [2, 3],
    "intermediate_size": [40],
    "intermediate_size_mlp": [40],
    "kv_lora_rank": [12],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "layer_types": [
        *(["full_attention"] * 4, ["sliding_attention"] * 4, ["full_attention", "sliding_attention"] * 2),
        [*["chunked_attention"] * 3, "full_attention"],
    ],
    "max_position_embeddings": [32, 4096],
    "max_window_layers": [0, 2, 4],
    "mlp_only_layers": [[1], [3, 0], [0, 1, 2, 3]],
    "moe_intermediate_size": [40, 32],
    "moe_layers": [[], [1, 3], [0, 1, 2, 3], [9]],
    "n_group": [1, 2, None],
    "n_routed_experts": [12],
    "n_shared_experts": [2, 3],
    "no_rope_layer_interval": [2, 5],
    "no_rope_layers": [[0, 1, 1, 0], [1, 1, 1, 1], [1, 1]],
    "num_attention_heads": [2, 8],
    "num_experts": [11, 16],
    "num_experts_per_tok": [1, 4],
    "num_hidden_layers": [1, 3],
    "num_key_value_heads": [1, 4, None],
    "num_local_experts": [3, 8],
    "num_mtp_layers": [0, 2],
    "pad_token_id": [0, 5],
    "pretraining_tp": [2],
    "problem_type": ["regression"],
    "q_lora_rank": [12, None],
    "qk_nope_head_dim": [12],
    "qk_rope_head_dim": [4, 12],
    "rms_norm_eps": [1e-5, 0.1],
    "rope_parameters": [rope | {"rope_theta": theta} for rope in ROPES for theta in (10000.0, 500.0)],
    "sliding_window": [3, 8, 4096, None],
    "swiglu_alpha": [1.0],
    "swiglu_limit": [0.5],
    "topk_group": [1, 4, None],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "transformers_version": ["4.57.6", "9.0.0"],
    "v_head_dim": [12],
    "vocab_size": [91],
}
# Keys that the class does not list: older spellings, what other classes compute with, what nobody reads
OTHER_KEYS: dict[str, list[Any]] = {
    "rope_scaling": [
        *ROPES,
        None,
        *({"type": r["rope_type"]} | r for r in ROPES[1:3]),
        {"type": "linear", "factor": 3.0},
    ],
    "rope_theta": [500.0, 1000000],
    "partial_rotary_factor": [0.5],
    "torch_dtype": ["bfloat16"],
    "_name_or_path": ["a/b"],
    "my_own_key": [{"nested": [1, 2]}],
    "logits_scaling": [8.0],
    "residual_multiplier": [0.5],
    "no_rope_layers": [[0, 1, 0, 1]],
    "qkv_bias": [True],
    "quantization_config": [{"quant_method": "fp8"}],
    "auto_map": [{"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}],
}
# A change of these alone titan must accept: its models compute them, or they change no forward pass
ACCEPTED_FIELDS = {
    *("rms_norm_eps", "tie_word_embeddings", "attention_dropout", "head_dim", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "chunk_size_feed_forward"),
    *("output_hidden_states", "return_dict", "id2label", "label2id", "problem_type", "transformers_version"),
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    *("attention_bias", "mlp_bias"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
    *("mlp_only_layers", "output_router_logits", "router_aux_loss_coef"),
    *("vocab_size", "pretraining_tp", "dtype", "torch_dtype", "architectures", "rope_theta", "my_own_key"),
    *("_name_or_path", "logits_scaling", "residual_multiplier", "no_rope_layers", "max_window_layers"),
}


@dataclass(frozen=True)
class Accepts:
    """What else a family accepts, and what it does not."""

    fields: frozenset[str] = frozenset()
    not_fields: frozenset[str] = frozenset()
    ropes: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    windows: bool = False  # in layers of layer_types


# As many keys as heads, and numbers of experts that must fit each other; norm_topk_prob is not of V2's softmax
_LATENT = Accepts(
    frozenset(
        ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "first_k_dense_replace", "n_shared_experts"]
    )
    | {"routed_scaling_factor", "num_mtp_layers"},
    frozenset(
        ["attention_bias", "mlp_bias", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok"]
    )
    | {"norm_topk_prob"},
    ropes=("default", "yarn"),
)
_GPT_OSS = Accepts(
    frozenset({"num_local_experts", "swiglu_limit"}),
    frozenset({"attention_bias"}),
    windows=True,
)
_LLAMA4 = Accepts(
    frozenset(
        ["num_local_experts", "attn_scale", "floor_scale", "attn_temperature_tuning", "interleave_moe_layer_step"]
    )
    | frozenset(["intermediate_size_mlp", "use_qk_norm", "router_jitter_noise", "no_rope_layer_interval"]),
    frozenset({"attention_bias", "no_rope_layers"}),
    ropes=("default", "llama3"),
)
OF_FAMILY = {"deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "gpt_oss": _GPT_OSS, "llama4_text": _LLAMA4}
# Of these, whether it must be accepted depends on the value
_COSMETIC_OR_COMPUTABLE = {
    "hidden_act": ("silu", "swish"),
    "layer_types": (["full_attention"] * 4,),
    "sliding_window": (8, 4096),  # without use_sliding_window nobody looks
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Mutation:
    """Values of one or two fields."""

    values: dict[str, Any]
    is_odd: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.values.items())

    def must_be_accepted(self, family: str, *, in_file: bool) -> bool:
        """In a file a key may contradict another (`rope_parameters`, `num_local_experts`) or the weights: an error."""
        if in_file and self.values.keys() & {"rope_scaling", "rope_theta", "tie_word_embeddings", "num_experts"}:
            return False
        accepts = OF_FAMILY.get(family, Accepts())
        return not self.is_odd and all(_is_accepted(name, value, accepts) for name, value in self.values.items())

    @property
    def names(self) -> set[str]:
        """What a refusal may name: the fields, and what stands in a RoPE setting."""
        inside = [value for name, value in self.values.items() if name in _ROPE_KEYS and isinstance(value, dict)]
        words = {key for value in inside for key in value} | {str(v.get("rope_type", v.get("type"))) for v in inside}
        return {*self.values, *words} - {"default", "None"}


def _is_accepted(name: str, value: Any, accepts: Accepts) -> bool:
    if name in _ROPE_KEYS:
        return value is None or (
            value.get("rope_type", value.get("type")) in accepts.ropes and "partial_rotary_factor" not in value
        )
    if name == "layer_types" and accepts.windows:
        return {*value} <= {"full_attention", "sliding_attention"}
    if name == "sliding_window" and accepts.windows:
        return value is not None
    return name in (ACCEPTED_FIELDS | accepts.fields) - accepts.not_fields or value in _COSMETIC_OR_COMPUTABLE.get(
        name, ()
    )


def single_mutations(config_class: type[PreTrainedConfig]) -> list[Mutation]:
    """Every field of the class with each value that could stand there, and keys that the class does not list."""
    drawn = []
    for field in fields(config_class):
        values = VALUES[field.name] if field.name in VALUES else _values_like(field.name, field.default)
        drawn += [Mutation({field.name: value}) for value in values]
    return [*drawn, *(Mutation({name: value}) for name, values in OTHER_KEYS.items() for value in values)]


def odd_mutations(config_class: type[PreTrainedConfig]) -> list[Mutation]:
    """Values of another type, or none at all, for every field; settings of RoPE under each of their keys."""
    odd = [(name, value) for name, values in _ODD.items() for value in values]
    for field in fields(config_class):
        odd += [(field.name, value) for value in _ODD_BY_TYPE.get(type(field.default), ())]
    drawn = [Mutation({name: value}, is_odd=True) for name, value in odd]
    default = {"rope_theta": 3e3, "rope_type": "default"}
    for rope in _ODD_ROPES:
        inside = rope | {"rope_theta": 3e3} if isinstance(rope, dict) else rope
        settings = ({"rope_scaling": rope, "rope_theta": 5e3}, {"rope_parameters": default, "rope_scaling": rope})
        settings += ({"rope_parameters": inside}, {"rope_scaling": inside})
        drawn += [Mutation(values, is_odd=True) for values in settings]
    return drawn


def _values_like(name: str, default: Any) -> list[Any]:
    match default:
        case bool():
            return [not default]
        case int():
            return [default + 1]
        case float():
            return [default / 2 + 0.1]
    raise ValueError(f"{name}: a field of transformers' class with no values here; add some to VALUES")


def with_pairs(singles: Sequence[Mutation], *, num_pairs: int, seed: int = 0) -> list[Mutation]:
    """`singles`, and pairs of them that change different fields, one of which says how attention is computed."""
    generator, drawn = random.Random(seed), {}
    telling = [
        m for m in singles if any(w in str(m) for w in ("rope", "bias", "window", "tie_", "layer_types", "head"))
    ]
    while len(drawn) < num_pairs:
        one, other = generator.choice(telling), generator.choice(singles)
        if not one.values.keys() & other.values.keys():
            both = Mutation(one.values | other.values)
            drawn[str(both)] = both
    return [*singles, *drawn.values()]
