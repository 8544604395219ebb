"""Read, check and write config.json of Llama-like decoders, for transformers 4 and 5."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.args import DecoderArgs
from converters.families.hf_rope import DEFAULT_THETA, read_rope, refused_rope, rope_parameters
from converters.families.limits import Limits
from converters.families.model_numbers import check_numbers, limits_of

# The use of a field of a config class. A tuple: the only accepted values, because others change the logits
TRANSLATED = "becomes a number of ModelArgs"
NO_EFFECT = "changes no logits"

# The fields of transformers 5.23's classes, all of them: a test compares this with the classes. Those of a family's own
# class are in the family's file
Fields = dict[str, str | tuple[Any, ...]]  # field → its use
_BASE_FIELDS: Fields = {
    **dict.fromkeys(("transformers_version", "architectures"), TRANSLATED),
    **dict.fromkeys(("output_hidden_states", "return_dict", "dtype", "chunk_size_feed_forward"), NO_EFFECT),
    **dict.fromkeys(("id2label", "label2id", "problem_type"), NO_EFFECT),  # of classifiers
    "is_encoder_decoder": (False, None),
}
DECODER_FIELDS: Fields = _BASE_FIELDS | {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), TRANSLATED),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), TRANSLATED),
    **dict.fromkeys(("max_position_embeddings", "rms_norm_eps", "rope_parameters"), TRANSLATED),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias"), TRANSLATED),
    **dict.fromkeys(("initializer_range", "attention_dropout", "use_cache"), NO_EFFECT),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), NO_EFFECT),
    "hidden_act": ("silu", "swish"),  # two names of one function
}
USUAL_FIELDS: Fields = DECODER_FIELDS | {"mlp_bias": TRANSLATED, "pretraining_tp": NO_EFFECT}  # Llama's
# No fields of these classes, but transformers' shared code reads them from every config and computes differently
_SHARED: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "attention_chunk_size": (None,),
    "kv_sharing_modes": (None,),
    "fusion_config": (None,),
    "configuration_files": (None,),
    "text_config": (None,),
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """A config class of transformers: its names, and its defaults."""

    called: str
    architecture: str
    model_type: str
    max_seq_len: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_kv_heads: int | None = None  # None: as many as heads
    norm_eps: float = 1e-6
    rope_theta: float = DEFAULT_THETA
    args_type: type[DecoderArgs] = DecoderArgs  # its own numbers keep their defaults: config.json does not have them
    biases: tuple[str, ...] = ()  # those of attention_bias and mlp_bias that the family supports
    attention: str = "full causal"  # that the family supports
    fields: Mapping[str, str | tuple[Any, ...]] = field(default_factory=lambda: USUAL_FIELDS)
    limits: dict[str, Limits] = field(default_factory=dict)  # of fields that are no number of `args_type`


def args_from_hf_config(config: Mapping[str, Any], of: ConfigClass, *, also_refused: Sequence[str] = ()) -> DecoderArgs:
    """Numbers from config.json.

    Raises CheckpointError for missing keys, and UnsupportedError with every setting that changes the computation;
    `also_refused`: such settings that the caller has found.
    """
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise CheckpointError("config.json lacks numbers that define the model:" + list_offenders(missing))
    check_numbers(config, limits_of(of.args_type) | of.limits, what="config.json")
    same_heads = {"num_key_value_heads": config["num_attention_heads"]} if "num_key_value_heads" in config else {}
    config = same_heads | {key: value for key, value in config.items() if value is not None}  # null means the default
    refused = [*_other_values(config, of), *refused_rope(config), *also_refused]
    if refused:
        raise UnsupportedError(
            f"config.json describes a {of.called} variant that is not covered:" + list_offenders(refused),
            hint=f"covered: hidden_act silu, {_covered_biases(of)}, {of.attention} attention",
        )
    max_seq_len = config.get("max_position_embeddings", of.max_seq_len)
    rope = read_rope(config, max_positions=max_seq_len, default_theta=of.rope_theta)
    dim, num_heads = config["hidden_size"], config["num_attention_heads"]
    return of.args_type(
        dim=dim,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or of.num_kv_heads or num_heads,
        head_dim=config.get("head_dim") or of.head_dim or dim // num_heads,
        ffn_hidden=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_eps=float(config.get("rms_norm_eps", of.norm_eps)),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_seq_len=max_seq_len,
        tied=config.get("tie_word_embeddings", False),
        **{bias: config.get(bias, False) for bias in of.biases},
    )


def _other_values(config: Mapping[str, Any], of: ConfigClass) -> list[str]:
    """Settings that change the computation."""
    allowed = {key: values for key, values in _SHARED.items() if key not in of.fields}
    allowed |= {key: values for key, values in of.fields.items() if isinstance(values, tuple)}
    allowed |= dict.fromkeys(sorted({"attention_bias", "mlp_bias"} & of.fields.keys() - {*of.biases}), (False,))
    given = {key: config[key] for key in allowed if key in config}
    return [f"{key} = {value!r}" for key, value in given.items() if value not in allowed[key]]


def _covered_biases(of: ConfigClass) -> str:
    return " and ".join(of.biases) or "no biases"


def other_layer_types(config: Mapping[str, Any]) -> list[str]:
    """Layers that do not attend to the whole sequence, or a list of the wrong length."""
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None:
        return []
    if not isinstance(kinds, list) or len(kinds) != layers:
        return [f"layer_types = {str(kinds)[:60]}: not a list of {layers} entries, one for each layer"]
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "attention"})  # the second: its old name
    return [f"layer_types: {', '.join(others)}"] if others else []


def hf_config(args: DecoderArgs, of: ConfigClass) -> dict[str, Any]:
    """config.json without token ids and dtype. RoPE is written for transformers 4 and 5."""
    scaling = None if args.rope_scaling is None else rope_parameters(args.rope_scaling)
    return {
        "architectures": [of.architecture],
        "model_type": of.model_type,
        "hidden_size": args.dim,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.ffn_hidden,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "tie_word_embeddings": args.tied,
        "rope_parameters": {"rope_theta": args.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": args.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
