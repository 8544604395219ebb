"""`titan models`: list the supported model families and flavors."""

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
    from titan_tools.terminal.console import print_json, table

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
            flavor["layers"],
            flavor["dim"],
            flavor["heads"],
            flavor["kv_heads"],
            flavor["head_dim"],
            flavor["vocab_size"],
            "yes" if flavor["tied"] else "no",
        )
        for family in listed
        for flavor in family["flavors"]
    ]
    table(columns, rows)
    print()
    for family in listed:
        print(f"{family['family']} ({', '.join(family['architectures'])})")
        print(f"  commands  {', '.join(family['commands'])}")
        print(f"  written   {', '.join(family['formats'])}")
        print(f"  names     {', '.join(family['namings'])}")
        print(f"  quantize  {', '.join(family['quantize']) or 'none'}")
