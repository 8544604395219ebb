"""Read params.json of Meta's Llama 2 and 3 releases, and write it for the code of each release."""

from collections.abc import Mapping
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.families.args import DecoderArgs
from converters.families.limits import FACTOR, FLAG, SIZE
from converters.families.model_numbers import check_numbers, limits_of
from converters.families.rope import RopeScaling, describe_rope

# Meta's 3.2 releases have only `use_scaled_rope`, their code hard-codes factor 8, and 32 is right: known by size.
# (dim, layers) of the releases whose embedding is tied and whose factor is 32.
_LLAMA_3_2_SIZES = {(2048, 16), (3072, 28)}
_META_HARD_CODED_FACTOR = 8.0
META_LIMITS = {
    "multiple_of": SIZE,
    "use_scaled_rope": FLAG,
    **dict.fromkeys(("ffn_dim_multiplier", "rope_scaling_factor", "rope_high_freq_factor"), FACTOR),
}
LLAMA2_THETA = 10000.0
_LLAMA3_THETA = 500000.0
_TIKTOKEN_VOCABULARY = 100_000  # Llama 3 has 128,256 tokens, the SentencePiece vocabulary of Llama 2 a third of that


def ffn_hidden(dim: int, *, multiple_of: int, multiplier: float | None = None) -> int:
    """Meta's feed-forward width: 2/3 of 4·dim, scaled, rounded up to a multiple (llama3/model.py, FeedForward)."""
    hidden = int(2 * 4 * dim / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def args_from_meta_params(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DecoderArgs:
    """Numbers from params.json and, where it leaves them open, from the weights' full shapes.

    Widths come from the weights if these are known, else from Meta's formula. A model without output.weight is tied.
    """
    missing = [key for key in ("dim", "n_layers", "n_heads") if not isinstance(params.get(key), int)]
    if missing:
        raise CheckpointError("params.json lacks numbers that define the model:" + list_offenders(missing))
    # Llama 1 and 2 have vocab_size -1: that of the tokenizer
    numbers = {k: v for k, v in params.items() if (k, v) != ("vocab_size", -1)}
    check_numbers(numbers, limits_of(DecoderArgs) | META_LIMITS, what="params.json")
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
    # Llama 1 and 2 releases have no rope_theta and use 10000; every Llama 3 has it, and Meta's code defaults to 500000
    theta = params.get("rope_theta") or (_LLAMA3_THETA if vocab_size >= _TIKTOKEN_VOCABULARY else LLAMA2_THETA)
    wq, w1 = shapes.get("layers.0.attention.wq.weight"), shapes.get("layers.0.feed_forward.w1.weight")
    return DecoderArgs(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=params.get("head_dim") or (wq[0] if wq else dim) // num_heads,
        ffn_hidden=w1[0] if w1 else _formula(params),
        vocab_size=vocab_size,
        norm_eps=float(params.get("norm_eps", 1e-5)),
        rope_theta=float(theta),
        rope_scaling=scaling,
        max_seq_len=params.get("max_seq_len") or (131072 if scaling else 4096 if theta == LLAMA2_THETA else 8192),
        tied=released_3_2 or (bool(shapes) and "output.weight" not in shapes),
    )


def _formula(params: Mapping[str, Any]) -> int:
    multiplier = params.get("ffn_dim_multiplier")
    return ffn_hidden(params["dim"], multiple_of=params.get("multiple_of", 256), multiplier=multiplier)


def llama3_meta_params(args: DecoderArgs) -> dict[str, Any]:
    """params.json's content. Meta's code computes the feed-forward width, so a multiplier is chosen that results in it.

    Raises UnsupportedError if Meta's code would build another model: it has one formula and one kind of scaling.
    There is no max_seq_len: Meta's loader passes its own, and the argument must not be given twice.
    """
    params = _numbers(args)
    scaling = args.rope_scaling
    if scaling is not None and not (
        isinstance(scaling, RopeScaling)
        and scaling == RopeScaling(scaling.factor, high_freq_factor=scaling.high_freq_factor)
    ):
        raise UnsupportedError(
            f"params.json cannot express {describe_rope(scaling)}",
            hint="Meta's code takes low_freq_factor 1 and original_max_position_embeddings 8192",
        )
    params |= {"rope_theta": args.rope_theta, "use_scaled_rope": scaling is not None}
    if isinstance(scaling, RopeScaling):
        # keys of Meta's later releases, which its Llama 3 code ignores and other readers use
        params["rope_scaling_factor"] = scaling.factor
        params["rope_high_freq_factor"] = scaling.high_freq_factor
    return params


def llama2_meta_params(args: DecoderArgs) -> dict[str, Any]:
    """params.json's content for Llama 2, whose code fails on unknown arguments.

    Raises UnsupportedError as llama3_meta_params does. A theta other than the default is written as in Code Llama.
    """
    params = _numbers(args)
    if args.rope_scaling is not None:
        raise UnsupportedError(f"params.json of Llama 2 cannot express {describe_rope(args.rope_scaling)}")
    understood = args.rope_theta == LLAMA2_THETA and args.vocab_size < _TIKTOKEN_VOCABULARY
    return params if understood else params | {"rope_theta": args.rope_theta}


def _numbers(args: DecoderArgs) -> dict[str, Any]:
    if args.attention_bias or args.mlp_bias:
        raise UnsupportedError("params.json cannot express that linear layers have biases: Meta's code has none")
    if args.head_dim * args.num_heads != args.dim:
        raise UnsupportedError(
            f"params.json cannot express head_dim {args.head_dim} with dim {args.dim} and {args.num_heads} heads",
            hint="Meta's code takes dim / n_heads",
        )
    return {
        "dim": args.dim,
        "n_layers": args.num_layers,
        "n_heads": args.num_heads,
        "n_kv_heads": args.num_kv_heads,
        "vocab_size": args.vocab_size,
        "norm_eps": args.norm_eps,
        **_ffn_formula(args),
    }


def _ffn_formula(args: DecoderArgs) -> dict[str, Any]:
    """`multiple_of` and `ffn_dim_multiplier` under which Meta's formula gives `args.ffn_hidden`."""
    base = int(2 * 4 * args.dim / 3)
    multiple_of = next(m for m in (4096, 1024, 256, 128, 64, 32, 16, 8, 4, 2, 1) if args.ffn_hidden % m == 0)
    for multiplier in (None, 1.3, 1.2, 1.5, 1.0, args.ffn_hidden / base, (args.ffn_hidden + 0.5) / base):
        if ffn_hidden(args.dim, multiple_of=multiple_of, multiplier=multiplier) == args.ffn_hidden:
            chosen = {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}
            return {key: value for key, value in chosen.items() if value is not None}
    raise UnsupportedError(f"Meta's formula cannot give a feed-forward width of {args.ffn_hidden} at dim {args.dim}")
