"""The family of GPT-OSS: names in every format."""

from collections.abc import Mapping
from typing import Any

from converters.errors import UnsupportedError
from converters.families.base import Family, ModelArgs, Naming
from converters.families.gpt_oss import ATTENTION_OF, FLAVORS, GptOssArgs, block, parameters
from converters.families.llama import HF
from converters.rules import Rule

# Halves are rotated in both forms, so that no row moves
_HF = Naming(
    "hf",
    (
        *(Rule(r.native, r.foreign) for r in HF.rules if ".feed_forward." not in r.native),
        Rule("layers.{n}.attention.sinks", "model.layers.{n}.self_attn.sinks"),
        Rule("layers.{n}.moe.router.gate.weight", "model.layers.{n}.mlp.router.weight"),
        Rule("layers.{n}.moe.router.gate.bias", "model.layers.{n}.mlp.router.bias"),
    ),
    HF.drops,
)


def _args_of(config: Mapping[str, Any]) -> ModelArgs:
    raise UnsupportedError("config.json of GPT-OSS is not read")


def _config_of(args: ModelArgs) -> dict[str, Any]:
    raise UnsupportedError("config.json of GPT-OSS is not written yet")


GPT_OSS = Family(
    name="gpt_oss",
    flavors=FLAVORS,
    parameters=parameters,
    namings={_HF.name: _HF},
    args_from_hf_config=_args_of,
    hf_config=_config_of,
    hf_architectures=("GptOssForCausalLM",),
    hf_model_types=("gpt_oss",),
    args_type=GptOssArgs,
    keep_float32=("layers.{n}.moe.expert_bias",),
    block=block,
    attention_of=ATTENTION_OF,
)
