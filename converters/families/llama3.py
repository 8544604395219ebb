"""Llama 3, 3.1, 3.2, 3.3: flavors. Parameters and names are those of llama.py."""

from typing import Any

from converters.families.args import DecoderArgs
from converters.families.base import Family, FlavorAttention
from converters.families.foreign import MetaFormat
from converters.families.llama import LLAMA_NAMINGS, llama_args_from_hf_config, llama_hf_config, parameters
from converters.families.llama2 import is_llama2
from converters.families.meta_params import args_from_meta_params, ffn_hidden, llama3_meta_params
from converters.families.rope import RopeScaling


def _args(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, **rest: Any) -> DecoderArgs:
    numbers: dict[str, Any] = {"vocab_size": 128256, "rope_scaling": RopeScaling()} | rest
    return DecoderArgs(dim, layers, heads, kv_heads, dim // heads, hidden, **numbers)


FLAVORS = {
    "debugmodel": _args(256, 6, 16, 16, ffn_hidden(256, multiple_of=256), vocab_size=2048),
    # small on purpose, for parity tests: grouped-query attention, and 3.2's tied embedding with its own scaling
    "debug_gqa": _args(128, 4, 8, 4, 384, vocab_size=2048),
    "debug_tied": _args(128, 4, 8, 4, 384, vocab_size=2048, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "1B": _args(2048, 16, 32, 8, 8192, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "3B": _args(3072, 28, 24, 8, 8192, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "8B": _args(4096, 32, 32, 8, ffn_hidden(4096, multiple_of=1024, multiplier=1.3)),
    "70B": _args(8192, 80, 64, 8, ffn_hidden(8192, multiple_of=4096, multiplier=1.3)),
    "405B": _args(16384, 126, 128, 8, ffn_hidden(16384, multiple_of=4096, multiplier=1.2)),
}

# torchtitan's, of the same numbers
FLAVORS |= dict.fromkeys(("debugmodel_flex_attn", "debugmodel_varlen_attn"), FLAVORS["debugmodel"])
FLAVORS |= dict.fromkeys(("8B_flex", "8B_varlen"), FLAVORS["8B"])
_WITH_MASKS = {
    "debugmodel_flex_attn": "flex",
    "debugmodel_varlen_attn": "varlen",
    "8B_flex": "flex",
    "8B_varlen": "varlen",
}

LLAMA3 = Family(
    name="llama3",
    flavors=FLAVORS,
    attention_of={name: FlavorAttention(kernel, "block_causal") for name, kernel in _WITH_MASKS.items()},
    parameters=parameters,
    namings=LLAMA_NAMINGS,
    args_from_hf_config=llama_args_from_hf_config,
    hf_config=llama_hf_config,
    hf_architectures=("LlamaForCausalLM",),
    hf_model_types=("llama",),
    meta=MetaFormat(args_from_meta_params, llama3_meta_params),
    claims=lambda args: not is_llama2(args),
)
