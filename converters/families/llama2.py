"""Llama 2: flavors, and how it is distinguished from Llama 3. Parameters and names are those of llama.py."""

from typing import Any

from converters.families.args import DecoderArgs
from converters.families.base import Family
from converters.families.foreign import MetaFormat
from converters.families.llama import LLAMA_NAMINGS, llama_args_from_hf_config, llama_hf_config, parameters
from converters.families.meta_params import LLAMA2_THETA, args_from_meta_params, ffn_hidden, llama2_meta_params
from converters.families.rope import RopeScaling

SENTENCEPIECE_VOCABULARIES = range(32000, 33000)  # Llama 2's own, Code Llama's 32016, and those of fine-tuned models


def is_llama2(args: DecoderArgs) -> bool:
    """Whether a LlamaForCausalLM, or a model with a params.json, is a Llama 2.

    Neither file says so, and the computation is the same: the family determines the form of Meta's files. Llama 3 has
    theta 500000 and 128,256 tokens, from 3.1 on a RoPE scaling too; Llama 2 has theta 10000 and 32,000 tokens.
    """
    has_theta = args.rope_theta == LLAMA2_THETA
    is_llama31 = isinstance(args.rope_scaling, RopeScaling)
    return not is_llama31 and (has_theta or args.vocab_size in SENTENCEPIECE_VOCABULARIES)


def _args(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, **rest: Any) -> DecoderArgs:
    numbers: dict[str, Any] = {"vocab_size": 32000, "rope_theta": LLAMA2_THETA, "max_seq_len": 4096} | rest
    return DecoderArgs(dim, layers, heads, kv_heads, dim // heads, hidden, **numbers)


FLAVORS = {
    "debugmodel": _args(256, 6, 16, 16, ffn_hidden(256, multiple_of=256), vocab_size=2048),
    "debug_gqa": _args(128, 4, 8, 4, 384, vocab_size=2048),
    "7B": _args(4096, 32, 32, 32, ffn_hidden(4096, multiple_of=256)),
    "13B": _args(5120, 40, 40, 40, ffn_hidden(5120, multiple_of=256)),
    "70B": _args(8192, 80, 64, 8, ffn_hidden(8192, multiple_of=4096, multiplier=1.3)),
}

LLAMA2 = Family(
    name="llama2",
    flavors=FLAVORS,
    parameters=parameters,
    namings=LLAMA_NAMINGS,
    args_from_hf_config=llama_args_from_hf_config,
    hf_config=llama_hf_config,
    hf_architectures=("LlamaForCausalLM",),
    hf_model_types=("llama",),
    meta=MetaFormat(args_from_meta_params, llama2_meta_params, shard_dims={"tok_embeddings.weight": 1}),
    claims=is_llama2,
)
