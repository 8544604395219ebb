"""Gemma 3 as a description from outside of titan, and tiny models of it that transformers writes.

Layers of two kinds, each with its own theta; norms before and after, whose factor is 1 + weight; GeGLU; a scale of the
scores and of the embeddings.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from converters.api import (
    Block,
    DecoderArgs,
    Dense,
    Ends,
    Family,
    GroupedQuery,
    Naming,
    Norm,
    Rope,
    Rule,
    hf_config,
    llama,
    parameters_of,
)
from converters.families import registry as families
from trainer.models import registry as trained_families

NUMBERS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "layer_types": [("sliding_attention", "full_attention")[n % 3 == 2] for n in range(7)],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
    "pad_token_id": None,
}


@dataclass(frozen=True, slots=True)
class Gemma3Args(DecoderArgs):
    """`rope_theta` and `rope_scaling` are those of the full layers."""

    window: int = 1024
    window_layers: tuple[int, ...] = ()
    window_theta: float = 1e4
    scores_divided_by_root_of: float = 256.0


def block(args, layer):
    norm, slides = Norm(args.norm_eps, plus_one=True), layer in args.window_layers
    full = Rope(args.rope_theta, args.head_dim, pairs=False, scaling=args.rope_scaling)
    attention = GroupedQuery(
        Rope(args.window_theta, args.head_dim, pairs=False) if slides else full,
        qk_norm=norm,
        scale=args.scores_divided_by_root_of**-0.5,
        window=args.window if slides else None,
    )
    return Block(attention, Dense(args.ffn_hidden, "gelu_tanh"), before=norm, after=norm)


def ends(args):
    return Ends(Norm(args.norm_eps, plus_one=True), embedding_scale=args.dim**0.5)


CONFIG = hf_config.ConfigClass(
    "Gemma 3",
    "Gemma3ForCausalLM",
    "gemma3_text",
    max_seq_len=131072,
    args_type=Gemma3Args,
    fields=hf_config.DECODER_FIELDS | {"hidden_activation": ("gelu_pytorch_tanh",), "final_logit_softcapping": (None,)},
)


def args_from_hf_config(config):
    rope = config["rope_parameters"]
    args = hf_config.args_from_hf_config({**config, "rope_parameters": rope["full_attention"]}, CONFIG)
    return replace(
        args,
        window=config["sliding_window"],
        window_layers=tuple(n for n, kind in enumerate(config["layer_types"]) if kind == "sliding_attention"),
        window_theta=rope["sliding_attention"]["rope_theta"],
        scores_divided_by_root_of=float(config["query_pre_attn_scalar"]),
    )


def to_hf_config(args):
    kinds = ["sliding_attention" if n in args.window_layers else "full_attention" for n in range(args.num_layers)]
    written = hf_config.hf_config(args, CONFIG)
    unused = ("rope_theta", "rope_scaling", "hidden_act")
    sliding = {"rope_type": "default", "rope_theta": args.window_theta}
    return {key: value for key, value in written.items() if key not in unused} | {
        "rope_parameters": {"full_attention": written["rope_parameters"], "sliding_attention": sliding},
        "layer_types": kinds,
        "sliding_window": args.window,
        "query_pre_attn_scalar": args.scores_divided_by_root_of,
        "hidden_activation": "gelu_pytorch_tanh",
    }


NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
RULES = [Rule(r.native, r.foreign) for r in llama.HF.rules if "_norm" not in r.native and ".bias" not in r.native]
RULES += [Rule(f"layers.{{n}}.{ours}.weight", f"model.layers.{{n}}.{theirs}.weight") for ours, theirs in NORMS.items()]

GEMMA3 = Family(
    name="gemma3",
    flavors={
        "tiny": Gemma3Args(32, 7, 4, 2, 24, 56, vocab_size=97, window=8, window_layers=(0, 1, 3, 4, 6), tied=True)
    },
    block=block,
    ends=ends,
    parameters=parameters_of(block, ends),
    namings={"hf": Naming("hf", tuple(RULES))},
    args_from_hf_config=args_from_hf_config,
    hf_config=to_hf_config,
    hf_architectures=(CONFIG.architecture,),
    hf_model_types=(CONFIG.model_type,),
    args_type=Gemma3Args,
)


@contextmanager
def registered():
    """The family known to this process meanwhile."""
    families.register(GEMMA3)
    trained_families.register("gemma3")
    try:
        yield
    finally:
        del families._FAMILIES["gemma3"], trained_families._FAMILIES["gemma3"]


def write(folder: Path, *, numbers=None, dtype: torch.dtype = torch.float32):
    """Write an HF folder and return its model, every parameter of which is random and large."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**NUMBERS | (numbers or {}))
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder)
    return model
