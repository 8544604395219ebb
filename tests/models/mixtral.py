"""Mixtral, a family from outside: Llama with experts in place of each feed-forward."""

from dataclasses import dataclass, replace

from converters.api import (
    DecoderArgs,
    Experts,
    Family,
    Naming,
    Rule,
    Stacked,
    Zeros,
    dense_block,
    hf_config,
    llama,
    parameters_of,
    register_family,
)
from trainer.api import register_model


@dataclass(frozen=True, slots=True)
class MixtralArgs(DecoderArgs):
    num_experts: int = 8
    experts_per_token: int = 2


def block(args, layer):
    experts = Experts(num=args.num_experts, top_k=args.experts_per_token, hidden=args.ffn_hidden)
    return replace(dense_block(args, layer), feed_forward=experts)


OURS, THEIRS = "layers.{n}.moe.", "model.layers.{n}.block_sparse_moe."
RULES = [
    *(rule for rule in llama.HF.rules if ".feed_forward." not in rule.native),
    Rule(OURS + "router.gate.weight", THEIRS + "gate.weight"),
    Rule(OURS + "expert_bias", "", Zeros("Mixtral's experts are balanced by a loss")),
    *(
        Rule(OURS + f"experts.{name}", THEIRS + "experts.{e}." + f"{name}.weight", Stacked())
        for name in ("w1", "w2", "w3")
    ),
]

CONFIG = hf_config.ConfigClass(
    "Mixtral", "MixtralForCausalLM", "mixtral", max_seq_len=131072, num_kv_heads=8, args_type=MixtralArgs
)


def args_from_hf_config(config):
    refused = ["sliding_window"] if config.get("sliding_window") else []
    args = hf_config.args_from_hf_config(config, CONFIG, also_refused=refused)
    return replace(
        args, num_experts=config.get("num_local_experts", 8), experts_per_token=config.get("num_experts_per_tok", 2)
    )


def to_hf_config(args):
    numbers = {"num_local_experts": args.num_experts, "num_experts_per_tok": args.experts_per_token}
    return hf_config.hf_config(args, CONFIG) | numbers | {"sliding_window": None}


MIXTRAL = Family(
    name="mixtral",
    flavors={"tiny": MixtralArgs(32, 3, 4, 2, 8, 64, vocab_size=320, rope_theta=10000.0, max_seq_len=128)},
    parameters=parameters_of(block),
    namings={"hf": Naming("hf", tuple(RULES))},
    args_from_hf_config=args_from_hf_config,
    hf_config=to_hf_config,
    hf_architectures=("MixtralForCausalLM",),
    args_type=MixtralArgs,
    block=block,
)
register_family(MIXTRAL)
register_model("mixtral")
