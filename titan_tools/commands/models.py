"""`titan models`: list the supported model families and flavors."""

import sys
from typing import Annotated

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List model families and flavors, their sizes, and the commands that support them.

    \b
    Examples:
      titan models
      titan models --json
    """
    from titan_tools.model_list import list_models
    from titan_tools.terminal.console import print_json, table, wrapped

    listed = list_models()
    if as_json:
        print_json({"families": listed})
        return
    columns = (
        "family", "flavor", "parameters", "active",
        "layers", "dim", "heads", "kv heads", "head dim", "vocabulary", "tied",
    )  # fmt: skip
    rows = [
        (
            family["family"],
            flavor["flavor"],
            flavor["parameters"],
            flavor["active_parameters"],
            *(flavor.get(key, "") for key in ("layers", "dim", "heads", "kv_heads", "head_dim", "vocab_size")),
            "yes" if flavor.get("tied") else "no",
        )
        for family in listed
        for flavor in family["flavors"]
    ]
    table(columns, rows, drop=("tied", "head dim", "kv heads", "heads", "vocabulary", "dim", "layers"))
    print()
    for family in listed:
        print(wrapped(f"{family['family']} ({', '.join(family['architectures'])})", sys.stdout, indent=2))
        details = {
            "commands": family["commands"],
            "written": family["formats"],
            "names": family["namings"],
            "quantize": family["quantize"] or ["none"],
        }
        for name, values in details.items():
            print(wrapped(f"  {name:<9} {', '.join(values)}", sys.stdout, indent=10))
