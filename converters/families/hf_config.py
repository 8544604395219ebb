"""config.json of transformers 4 and 5 for Llama-like decoders: read, checked, written so that both versions agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converters.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.base import ModelArgs, RopeScaling
from converters.model_numbers import check_numbers

_TRANSFORMERS_THETA = 10000.0  # what transformers assumes where a file does not say
_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """A config class of transformers: its names, and what it assumes where a file does not say."""

    called: str
    architecture: str
    model_type: str
    max_seq_len: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_kv_heads: int | None = None  # None: as many as heads
    qk_norm: bool = False  # a property of the class, not of a file


LLAMA = ConfigClass("Llama", "LlamaForCausalLM", "llama", max_seq_len=2048)


def llama_args_from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    """args_from_hf_config for LlamaForCausalLM."""
    return args_from_hf_config(config, LLAMA)


def llama_hf_config(args: ModelArgs) -> dict[str, Any]:
    """hf_config for LlamaForCausalLM."""
    return hf_config(args, LLAMA) | {"mlp_bias": False, "pretraining_tp": 1}


def args_from_hf_config(config: Mapping[str, Any], of: ConfigClass, *, also_refused: Sequence[str] = ()) -> ModelArgs:
    """Numbers from config.json.

    Raises CheckpointError for missing keys, and UnsupportedError with everything that means another computation than
    ours; `also_refused` is what the caller found of that kind.
    """
    required = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    )
    missing = [key for key in required if not isinstance(config.get(key), int)]
    if missing:
        raise CheckpointError("config.json lacks numbers that define the model:" + list_offenders(missing))
    check_numbers(config, what="config.json")
    config = {key: value for key, value in config.items() if value is not None}  # null is how some spell "default"
    rope = _rope(config)
    refused = [*_other_architecture(config), *_other_rope(rope), *also_refused]
    if refused:
        raise UnsupportedError(
            f"config.json describes a {of.called} variant that is not covered:" + list_offenders(refused),
            hint="covered: hidden_act silu, no biases, no quantization, full attention, RoPE plain or of type llama3",
        )
    dim, num_heads = config["hidden_size"], config["num_attention_heads"]
    return ModelArgs(
        dim=dim,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or of.num_kv_heads or num_heads,
        head_dim=config.get("head_dim") or of.head_dim or dim // num_heads,
        ffn_hidden=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or _TRANSFORMERS_THETA),
        rope_scaling=_scaling(rope),
        max_seq_len=int(config.get("max_position_embeddings", of.max_seq_len)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=of.qk_norm,
    )


def _other_architecture(config: Mapping[str, Any]) -> list[str]:
    """Settings under which the weights mean another computation."""
    harmless = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "quantization_config": (None,),
    }
    return [f"{key} = {config[key]!r}" for key, allowed in harmless.items() if config.get(key) not in allowed]


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 nests theta and scaling in `rope_parameters`, 4 had `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json: its RoPE parameters are a {type(rope).__name__}, not an object")
    check_numbers(rope, what="config.json, RoPE parameters,")
    return rope


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))  # `type`: the spelling of transformers before 4.43


def _other_rope(rope: Mapping[str, Any]) -> list[str]:
    found = []
    if _rope_type(rope) not in ("default", "llama3"):
        found.append(f"RoPE scaling {_rope_type(rope)!r}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        found.append(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}")
    return found


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if _rope_type(rope) == "default":
        return None
    missing = [key for key in _SCALING_KEYS if rope.get(key) is None]
    if missing:
        raise CheckpointError("config.json lacks numbers of its llama3 RoPE scaling:" + list_offenders(missing))
    factor, low, high, original = (rope[key] for key in _SCALING_KEYS)
    return RopeScaling(float(factor), float(low), float(high), int(original))


def hf_config(args: ModelArgs, of: ConfigClass) -> dict[str, Any]:
    """config.json without token ids and dtype. RoPE is spelled both ways, so that transformers 4 and 5 agree."""
    scaling = None
    if args.rope_scaling is not None:
        scaling = {"rope_type": "llama3"} | {key: getattr(args.rope_scaling, key) for key in _SCALING_KEYS}
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
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
