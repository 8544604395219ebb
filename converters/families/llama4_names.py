"""The family of Llama 4: names in every format."""

from collections.abc import Mapping
from typing import Any

from converters.errors import UnsupportedError
from converters.families.base import Family, ModelArgs, Naming
from converters.families.llama import HF
from converters.families.llama4 import ATTENTION_OF, FLAVORS, Llama4Args, block, parameters
from converters.rules import Rule

# Pairs are rotated in both forms, so that no row moves
_HF = Naming(
    "hf",
    (
        *(Rule(r.native, r.foreign.replace(".mlp.", ".feed_forward.")) for r in HF.rules if ".bias" not in r.native),
        Rule("layers.{n}.moe.router.gate.weight", "model.layers.{n}.feed_forward.router.weight"),
    ),
    HF.drops,
)


def _args_of(config: Mapping[str, Any]) -> ModelArgs:
    raise UnsupportedError("config.json of Llama 4 is not read yet")


def _config_of(args: ModelArgs) -> dict[str, Any]:
    raise UnsupportedError("config.json of Llama 4 is not written yet")


LLAMA4 = Family(
    name="llama4",
    flavors=FLAVORS,
    parameters=parameters,
    namings={_HF.name: _HF},
    args_from_hf_config=_args_of,
    hf_config=_config_of,
    hf_architectures=("Llama4ForCausalLM",),
    hf_model_types=("llama4_text",),
    args_type=Llama4Args,
    keep_float32=("layers.{n}.moe.expert_bias",),
    block=block,
    attention_of=ATTENTION_OF,
)
