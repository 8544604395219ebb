"""The known families. `register` adds a user's own, from a module that `custom_import` or `--import` names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.extensions import ExtensionError, check_name, check_record, where_defined
from converters.families.args import DecoderArgs, ModelArgs
from converters.families.base import Family
from converters.families.blocks import Block
from converters.families.deepseek import DEEPSEEK_V3
from converters.families.gpt_oss_names import GPT_OSS
from converters.families.llama2 import LLAMA2
from converters.families.llama3 import LLAMA3
from converters.families.llama4_names import LLAMA4
from converters.families.parameters import Parameter
from converters.families.qwen3 import QWEN3

_FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA3, LLAMA2, QWEN3, DEEPSEEK_V3, GPT_OSS, LLAMA4)}


# Models that resemble a known family, by model_type: why they are not read as one
_NOT_COVERED = {
    "deepseek_v32": "DeepSeek V3.2 attends only to tokens that an indexer chooses, which is not covered; V3, V3.1 and "
    "R1 are",
}


def register(family: Family) -> None:
    """Add a family under its name; one of a built-in name may only have other flavors.

    Raises ExtensionError for fields of other types, and functions that cannot be called or return other types.
    """
    check_record(family, Family, f"family {getattr(family, 'name', '?')!r}")
    known = _FAMILIES.get(family.name)
    if known is None or replace(family, flavors=known.flavors) != known:
        check_name("family", family.name, _FAMILIES)
    for args in list(family.flavors.values())[:1]:
        parameters = family.parameters(args)
        if not (isinstance(parameters, list) and all(isinstance(each, Parameter) for each in parameters)):
            raise _returns_other(family, "parameters", parameters, "a list of Parameter")
        if isinstance(args, DecoderArgs) and not isinstance(block := family.block(args, 0), Block):
            raise _returns_other(family, "block", block, "a Block")
    _FAMILIES[family.name] = family


def _returns_other(family: Family, name: str, value: Any, expected: str) -> ExtensionError:
    where = where_defined(getattr(family, name))
    return ExtensionError(f"{where}: `{name}` of family {family.name!r} returns {value!r:.80}, not {expected}")


def all_families() -> Mapping[str, Family]:
    return _FAMILIES


def get_family(name: str) -> Family:
    """The family of that name. Raises UnsupportedError, naming those that exist."""
    if name not in _FAMILIES:
        raise UnsupportedError(f"unknown model family: {name!r}", hint=f"families: {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


def read_hf_config(config: Mapping[str, Any]) -> tuple[Family, ModelArgs]:
    """Family and numbers of a transformers config.json. Raises UnsupportedError if no family reads it.

    How the weights are quantized is no property of a family (quantization.read_quantization).
    """
    config = {key: value for key, value in as_hf_config(config).items() if key != "quantization_config"}
    for family in _families_for(config):
        args = family.args_from_hf_config(config)
        if family.claims(args):
            return family, args
    raise UnsupportedError("config.json describes a model of no known family")


def as_hf_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json in transformers' words, also where it is of a family's own release."""
    found = (family.release.read(config) for family in _FAMILIES.values() if family.release)
    return next((translated for translated in found if translated is not None), config)


def _families_for(config: Mapping[str, Any]) -> list[Family]:
    """Families whose class a config.json is for.

    transformers' AutoModelForCausalLM uses only `model_type`, a class's own from_pretrained neither key: where a file
    has both they must agree, and where one is missing the other decides.
    """
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"config.json: its architectures are {architectures!r:.60}, not a list of names")
    families = list(_FAMILIES.values())
    # A base class (LlamaModel) saves the same weights without the output, which a tied model does not need
    bases = {name.replace("ForCausalLM", "Model"): name for f in families for name in f.hf_architectures}
    architectures = [bases.get(name, name) for name in architectures]
    named = [f for f in families if set(architectures) & set(f.hf_architectures)]
    typed = [f for f in families if model_type in f.hf_model_types]
    if named and not typed and not any(f.hf_model_types for f in named):
        return named  # a user's family: its architecture is enough
    if not architectures and typed:
        return typed
    if model_type in _NOT_COVERED and not typed:
        raise UnsupportedError(f"config.json: model_type {model_type!r} is not covered", hint=_NOT_COVERED[model_type])
    agreeing = [f for f in named if model_type is None or f in typed or not f.hf_model_types]
    unnamed = [name for name in architectures if not any(name in f.hf_architectures for f in named)]
    if agreeing and (model_type is not None or not unnamed):
        return agreeing
    types_of = {name: f.hf_model_types for f in families for name in f.hf_architectures}
    read = ", ".join(f"{name} ({types[0]})" if types else name for name, types in sorted(types_of.items()))
    says = f"architectures {config.get('architectures') or []}" + (
        f" and model_type {model_type!r}" if model_type is not None else ""
    )
    if named and model_type is not None:
        raise UnsupportedError(
            f"config.json names {says}, which are of different models",
            hint="transformers uses model_type; correct the one that is wrong. Supported: " + read,
        )
    raise UnsupportedError(
        f"config.json names {says}, which no family supports",
        hint=f"supported: {read}; import your own family first",
        tries=["titan --import MODULE …"],
    )


def read_meta_params(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Family, DecoderArgs]:
    """Family and numbers of a params.json, which names no family; `shapes`: those of the weights that are known."""
    if isinstance(params.get("model"), Mapping):  # Llama 4's, in some releases
        params = params["model"]
    formats = [(family, family.meta) for family in _FAMILIES.values() if family.meta]
    with_key = [(family, meta) for family, meta in formats if meta.key and meta.key in params]
    for family, meta in with_key or [(family, meta) for family, meta in formats if not meta.key]:
        args = meta.args_from_params(params, shapes)
        if family.claims(args):
            return family, args
    raise UnsupportedError("params.json describes a model of no known family")
