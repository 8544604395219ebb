"""Command R, a family from outside: numbers, layers, and names in Hugging Face checkpoints."""

from dataclasses import dataclass, fields, replace

from converters.api import (
    DecoderArgs,
    Ends,
    Family,
    Naming,
    Norm,
    Rule,
    dense_block,
    hf_config,
    llama,
    parameters_of,
    register_family,
)
from trainer.api import register_model


@dataclass(frozen=True, slots=True)
class CommandRArgs(DecoderArgs):
    logit_scale: float = 0.0625


def block(args, layer):
    """Llama's attention and feed-forward, in parallel and after one LayerNorm."""
    return replace(dense_block(args, layer), before=Norm(args.norm_eps, centers=True), parallel=True)


def ends(args):
    return Ends(Norm(args.norm_eps, centers=True), logit_scale=args.logit_scale)


# Cohere's RoPE rotates neighboring pairs, as titan's native weights do, so q and k need no permutation. For models that
# rotate halves, as Llama in transformers, these rules have the op `RopeHalves()` as a third argument.
RULES = [Rule(r.native, r.foreign) for r in llama.HF.rules if "ffn_norm" not in r.native]

CONFIG = hf_config.ConfigClass("Command R", "CohereForCausalLM", "cohere", max_seq_len=8192)


def args_from_hf_config(config):
    """Read the numbers from config.json; refuse all settings that mean another computation."""
    refused = ["use_qk_norm = true"] if config.get("use_qk_norm") else []
    read = hf_config.args_from_hf_config(config, CONFIG, also_refused=refused)
    numbers = {field.name: getattr(read, field.name) for field in fields(read)}
    numbers["norm_eps"] = config.get("layer_norm_eps", 1e-5)
    numbers["tied"] = config.get("tie_word_embeddings", True)
    return CommandRArgs(**numbers, logit_scale=config.get("logit_scale", 0.0625))


def to_hf_config(args):
    """Write config.json for transformers."""
    return hf_config.hf_config(args, CONFIG) | {"layer_norm_eps": args.norm_eps, "logit_scale": args.logit_scale}


def make_args(dim, layers, heads, kv_heads, hidden, **more):
    return CommandRArgs(dim, layers, heads, kv_heads, dim // heads, hidden, tied=True, **more)


COMMAND_R = Family(
    name="command_r",
    flavors={
        "tiny": make_args(32, 3, 4, 2, 64, vocab_size=320, rope_theta=10000.0, max_seq_len=128),
        "35B": make_args(8192, 40, 64, 64, 22528, vocab_size=256000, rope_theta=8e6),
    },
    block=block,
    ends=ends,
    parameters=parameters_of(block, ends),
    namings={"hf": Naming("hf", tuple(RULES))},
    args_from_hf_config=args_from_hf_config,
    hf_config=to_hf_config,
    hf_architectures=("CohereForCausalLM",),
    args_type=CommandRArgs,
)
register_family(COMMAND_R)
register_model("command_r")
