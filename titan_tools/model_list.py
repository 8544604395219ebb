"""The list of model families and flavors, with the commands and formats that support them."""

from collections.abc import Iterator
from typing import Any

from converters.common.errors import UnsupportedError
from converters.families.args import DecoderArgs, ModelArgs, args_to_json
from converters.families.base import Family
from converters.families.registry import all_families
from converters.formats.base import OutputOptions
from converters.formats.registry import FORMATS
from converters.quantized.quantization import SPELLINGS
from trainer.models.registry import get_trainer_family, trained_families

BYTES_COMMANDS = ("convert", "reshard", "inspect", "diff", "verify")
MODEL_COMMANDS = ("seed", "train", "infer", "estimate-memory")  # these need a model registered with the trainer


def list_models() -> list[dict[str, Any]]:
    """One record per family, in the order of registration; sizes are computed from the parameter shapes."""
    return [_describe(family) for family in all_families().values()]


def _describe(family: Family) -> dict[str, Any]:
    return {
        "family": family.name,
        "architectures": [*family.hf_architectures, *([family.multimodal.architecture] if family.multimodal else [])],
        "commands": list(_commands(family)),
        "formats": list(_formats(family)),
        "namings": ["native", *family.namings],
        "quantize": [text for text, scheme in SPELLINGS.items() if scheme.method in family.quantized_as],
        "flavors": [
            {
                "flavor": flavor,
                "parameters": family.num_parameters(args),
                "active_parameters": family.num_active_parameters(args),
                **_numbers(args),
            }
            for flavor, args in family.flavors.items()
        ],
    }


def _numbers(args: ModelArgs) -> dict[str, Any]:
    if not isinstance(args, DecoderArgs):
        return args_to_json(args)
    return {
        "layers": args.num_layers,
        "dim": args.dim,
        "heads": args.num_heads,
        "kv_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "ffn_hidden": args.ffn_hidden,
        "vocab_size": args.vocab_size,
        "max_seq_len": args.max_seq_len,
        "tied": args.tied,
    }


def _commands(family: Family) -> Iterator[str]:
    yield from BYTES_COMMANDS
    if family.name in trained_families():
        predicts_tokens = get_trainer_family(family.name).objective is None
        yield from (command for command in MODEL_COMMANDS if command != "infer" or predicts_tokens)


def _formats(family: Family) -> Iterator[str]:
    """Formats that `titan convert … --to` can write; a single model may still need what a format cannot express."""
    for name, output in FORMATS.items():
        try:
            output.naming(family, OutputOptions())
        except UnsupportedError:
            continue
        yield name
