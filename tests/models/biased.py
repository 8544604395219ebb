"""Families with biases, as a user's own module would register them, and tiny models of them that transformers writes.

"qwen2": biases of q, k and v, halves rotated. "biased_llama": biases of every linear layer, the output's too, and
neighbouring pairs rotated, so that rows of q's and k's biases change their order.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from converters.families import hf_config, llama
from converters.families import registry as families
from converters.families.base import Family, Naming
from converters.families.blocks import Block, Dense, GroupedQuery, Norm, rope_of
from converters.families.parameters import Parameter, Role, parameters_of
from converters.families.rules import Rule, Same
from tests.models.dense import NUMBERS
from trainer.models import registry as trained_families
from trainer.models.decoder import Transformer
from trainer.models.registry import TrainerFamily

BIASED = {
    "qwen2": ("wq", "wk", "wv"),
    "biased_llama": ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "output"),
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "biased_llama": "BiasedLlamaForCausalLM"}


def write(folder: Path, name: str, **numbers):
    """Write an HF folder and return its model, every parameter of which is random and large."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**NUMBERS | numbers)).eval()
        else:
            config = LlamaConfig(**NUMBERS | numbers, attention_bias=True, mlp_bias=True)
            model = LlamaForCausalLM(config).eval()
            model.lm_head.bias = nn.Parameter(torch.zeros(config.vocab_size))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            for module in model.modules():
                if "Norm" in type(module).__name__:
                    module.weight.add_(1)
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [ARCHITECTURES[name]]}))
    return model


@contextmanager
def registered(*names: str):
    """Both families known to this process meanwhile; `names`: these alone."""
    chosen = names or tuple(BIASED)
    for name in chosen:
        families.register(_family(name))
        trained_families.register(name, TrainerFamily(_builder(name)))
    try:
        yield
    finally:
        for name in chosen:
            del families._FAMILIES[name], trained_families._FAMILIES[name]


def _family(name: str) -> Family:
    config_class = hf_config.ConfigClass(name, ARCHITECTURES[name], name, max_seq_len=2048)

    def parameters(args):
        output_bias = Parameter("output.bias", (args.vocab_size,), Role.OUTPUT, tp_dim=0, is_bias=True)
        return parameters_of(_block_of(name))(args) + ([output_bias] if "output" in BIASED[name] else [])

    def args_from_hf_config(config):
        unbiased = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
        return hf_config.args_from_hf_config(unbiased, config_class)

    rules = []
    for rule in llama.HF.rules:
        rule = Rule(rule.native, rule.foreign, rule.op if name == "biased_llama" else Same())
        rules.append(rule)
        if rule.native.split(".")[-2] in BIASED[name]:
            rules.append(Rule(*(n.replace(".weight", ".bias") for n in (rule.native, rule.foreign)), rule.op))
    return Family(
        name=name,
        flavors={},
        block=_block_of(name),
        parameters=parameters,
        namings={"hf": Naming("hf", tuple(rules))},
        args_from_hf_config=args_from_hf_config,
        hf_config=lambda args: hf_config.hf_config(args, config_class),
        hf_architectures=(ARCHITECTURES[name],),
    )


def _block_of(name: str):
    def block(args, layer):
        everywhere = name == "biased_llama"
        attention = GroupedQuery(rope_of(args, pairs=everywhere), qkv_bias=True, out_bias=everywhere)
        return Block(attention, Dense(args.ffn_hidden, has_biases=everywhere), Norm(args.norm_eps))

    return block


def _builder(name: str):
    def build_model(args):
        model = Transformer(args, _block_of(name))
        if "output" in BIASED[name]:
            model.output.bias = nn.Parameter(model.output.weight.new_empty(args.vocab_size))
        return model

    return build_model
