"""Which families and flavors exist, and what can be done with each."""

from typing import Any

from converters.families.base import Family
from converters.families.registry import all_families
from titan_tools.memory.from_config import COVERED_FAMILIES
from trainer.models.registry import trained_families

BYTES_COMMANDS = ("convert", "reshard", "inspect", "diff", "verify")
MODEL_COMMANDS = ("seed", "train", "infer")  # these build the model, so the trainer must know it
ESTIMATE = ("estimate-memory",)  # knows the tensors of a layer by name


def list_models() -> list[dict[str, Any]]:
    """One record per family, in the order of registration; sizes are counted from the parameter shapes, never typed."""
    return [_describe(family) for family in all_families().values()]


def _describe(family: Family) -> dict[str, Any]:
    return {
        "family": family.name,
        "commands": [
            *BYTES_COMMANDS,
            *(MODEL_COMMANDS if family.name in trained_families() else ()),
            *(ESTIMATE if family.name in COVERED_FAMILIES else ()),
        ],
        "namings": ["native", *family.namings],
        "flavors": [
            {
                "flavor": flavor,
                "parameters": family.num_parameters(args),
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
            for flavor, args in family.flavors.items()
        ],
    }
