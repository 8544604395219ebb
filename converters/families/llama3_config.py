"""Llama 3 numbers as others write them: config.json of transformers 4 and 5, params.json of Meta."""

from collections.abc import Mapping
from typing import Any

from converters.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.base import ModelArgs, RopeScaling
from converters.model_numbers import check_numbers

# Meta's 3.2 releases say only `use_scaled_rope`, their code hard-codes factor 8, and 32 is right: known by size.
# (dim, layers) of the releases whose embedding is tied and whose factor is 32.
_LLAMA_3_2_SIZES = {(2048, 16), (3072, 28)}
_META_HARD_CODED_FACTOR = 8.0
_TRANSFORMERS_THETA = 10000.0  # what transformers assumes where a file does not say


def args_from_hf_config(config: Mapping[str, Any]) -> ModelArgs:
    """Numbers from config.json. Raises CheckpointError for missing keys, UnsupportedError for other variants."""
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
    _refuse_other_architectures(config)
    theta, scaling = _rope_from_hf(config)
    dim, num_heads = config["hidden_size"], config["num_attention_heads"]
    return ModelArgs(
        dim=dim,
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or dim // num_heads,
        ffn_hidden=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_seq_len=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse_other_architectures(config: Mapping[str, Any]) -> None:
    """Settings under which the weights mean another computation than this family's."""
    harmless = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "quantization_config": (None,),
    }
    refused = [f"{key} = {config[key]!r}" for key, allowed in harmless.items() if config.get(key) not in allowed]
    if refused:
        raise UnsupportedError(
            "config.json describes a Llama variant that is not covered:" + list_offenders(refused),
            hint="covered: hidden_act silu, no biases, no quantization",
        )


def _rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: transformers 5 nests both in `rope_parameters`, 4 had `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json: its RoPE parameters are a {type(rope).__name__}, not an object")
    check_numbers(rope, what="config.json, RoPE parameters,")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or _TRANSFORMERS_THETA)
    kind = rope.get("rope_type", rope.get("type", "default"))  # `type` is the spelling of transformers before 4.43
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedError(
            f"config.json asks for RoPE scaling {kind!r}",
            hint="covered: default (none) and llama3 (Llama 3.1 and later)",
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if rope.get(key) is None]
    if missing:
        raise CheckpointError("config.json lacks numbers of its llama3 RoPE scaling:" + list_offenders(missing))
    return theta, RopeScaling(float(rope[keys[0]]), float(rope[keys[1]]), float(rope[keys[2]]), int(rope[keys[3]]))


def hf_config(args: ModelArgs) -> dict[str, Any]:
    """config.json without token ids and dtype. RoPE is spelled both ways, so that transformers 4 and 5 agree."""
    scaling = None
    if args.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_max_position_embeddings,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "mlp_bias": False,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def args_from_meta_params(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelArgs:
    """Numbers from params.json and the weights' full shapes, for what params.json leaves open.

    Widths come from the weights where they are there, else from Meta's formula. A model without output.weight is tied.
    """
    missing = [key for key in ("dim", "n_layers", "n_heads") if not isinstance(params.get(key), int)]
    if missing:
        raise CheckpointError("params.json lacks numbers that define the model:" + list_offenders(missing))
    # Llama 1 and 2 say vocab_size -1: it is the tokenizer's
    check_numbers({k: v for k, v in params.items() if (k, v) != ("vocab_size", -1)}, what="params.json")
    dim, num_layers, num_heads = params["dim"], params["n_layers"], params["n_heads"]
    num_kv_heads = params.get("n_kv_heads") or num_heads
    released_3_2 = (dim, num_layers) in _LLAMA_3_2_SIZES
    vocab_size = params.get("vocab_size", -1)
    if vocab_size == -1:
        vocab_size = shapes.get("tok_embeddings.weight", (0,))[0]
    scaling = None
    if params.get("use_scaled_rope"):
        factor = params.get("rope_scaling_factor") or (32.0 if released_3_2 else _META_HARD_CODED_FACTOR)
        scaling = RopeScaling(factor=float(factor), high_freq_factor=float(params.get("rope_high_freq_factor") or 4.0))
    # Llama 1 and 2 releases carry no rope_theta and mean 10000; Meta's Llama 3 code assumes 500000
    theta = params.get("rope_theta") or (10000.0 if vocab_size == 32000 else 500000.0)
    wq, w1 = shapes.get("layers.0.attention.wq.weight"), shapes.get("layers.0.feed_forward.w1.weight")
    return ModelArgs(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=params.get("head_dim") or (wq[0] if wq else dim) // num_heads,
        ffn_hidden=w1[0] if w1 else _ffn_hidden(params),
        vocab_size=vocab_size,
        norm_eps=float(params.get("norm_eps", 1e-5)),
        rope_theta=float(theta),
        rope_scaling=scaling,
        max_seq_len=params.get("max_seq_len") or (131072 if scaling else 8192),
        tied=released_3_2 or (bool(shapes) and "output.weight" not in shapes),
    )


def _ffn_hidden(params: Mapping[str, Any]) -> int:
    """Meta's feed-forward width: 2/3 of 4·dim, scaled, rounded up to a multiple (llama3/model.py, FeedForward)."""
    hidden = int(2 * 4 * params["dim"] / 3)
    if params.get("ffn_dim_multiplier") is not None:
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple_of = params.get("multiple_of", 256)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def meta_params(args: ModelArgs) -> dict[str, Any]:
    """params.json's content. Meta's code computes the feed-forward width, so a multiplier is chosen that gives it back.

    Raises UnsupportedError where Meta's code would build another model: it knows one formula and one kind of scaling.
    No max_seq_len: Meta's loader passes its own beside these, and Python refuses an argument that is given twice.
    """
    if args.head_dim * args.num_heads != args.dim:
        raise UnsupportedError(
            f"params.json cannot say head_dim {args.head_dim} with dim {args.dim} and {args.num_heads} heads",
            hint="Meta's code takes dim / n_heads",
        )
    scaling = args.rope_scaling
    if scaling is not None and scaling != RopeScaling(scaling.factor, high_freq_factor=scaling.high_freq_factor):
        raise UnsupportedError(
            f"params.json cannot say {scaling}",
            hint="Meta's code takes low_freq_factor 1 and original_max_position_embeddings 8192",
        )
    params: dict[str, Any] = {
        "dim": args.dim,
        "n_layers": args.num_layers,
        "n_heads": args.num_heads,
        "n_kv_heads": args.num_kv_heads,
        "vocab_size": args.vocab_size,
        "norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "use_scaled_rope": scaling is not None,
        **_ffn_formula(args),
    }
    if scaling is not None:
        # Keys of Meta's later releases; its Llama 3 code ignores them, readers that know better do not
        params["rope_scaling_factor"] = scaling.factor
        params["rope_high_freq_factor"] = scaling.high_freq_factor
    return params


def _ffn_formula(args: ModelArgs) -> dict[str, Any]:
    """`multiple_of` and `ffn_dim_multiplier` under which Meta's formula gives `args.ffn_hidden`."""
    base = int(2 * 4 * args.dim / 3)
    multiple_of = next(m for m in (4096, 1024, 256, 128, 64, 32, 16, 8, 4, 2, 1) if args.ffn_hidden % m == 0)
    for multiplier in (None, 1.3, 1.2, 1.5, 1.0, args.ffn_hidden / base, (args.ffn_hidden + 0.5) / base):
        chosen = {"dim": args.dim, "multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
        if _ffn_hidden(chosen) == args.ffn_hidden:
            del chosen["dim"]
            return {key: value for key, value in chosen.items() if value is not None}
    raise UnsupportedError(f"Meta's formula cannot give a feed-forward width of {args.ffn_hidden} at dim {args.dim}")
