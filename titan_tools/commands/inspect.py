"""titan inspect: what is in this checkpoint?"""

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder or file of any format.", show_default=False)],
    every: Annotated[bool, typer.Option("--every", help="One line per tensor, layers not folded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show the model, tensors, sections and values of a checkpoint. Reads headers only.

    \b
    Examples:
      titan inspect outputs/checkpoint/step-1000
      titan inspect Llama-3.2-1B --every --json
    """
    from converters.inspect import inspect_checkpoint, summarize_values
    from titan_tools.console import count, print_json, table, tell_bytes

    found = inspect_checkpoint(checkpoint, fold=not every)
    if as_json:
        print_json(found.to_json())
        return
    manifest = "with a manifest" if found.has_manifest else "no manifest"
    print(f"{found.path}: {found.container}, {found.naming} names, {manifest}")
    if found.model:
        print("model: " + ", ".join(f"{key} {value}" for key, value in found.model.items()))
    else:
        print("model: nothing here says what it is (titan_model.json, config.json or params.json would)")
    print(f"{found.num_parameters:,} parameters; {tell_bytes(found.num_bytes)} in {count(found.num_files, 'file')}\n")
    for section in dict.fromkeys(line.section for line in found.lines):
        rows = [
            (line.name, line.dtype, list(line.shape), line.num_tensors, line.num_chunks, tell_bytes(line.num_bytes))
            for line in found.lines
            if line.section == section
        ]
        table((section, "dtype", "shape", "tensors", "chunks", "bytes"), rows)
        print()
    if found.values:
        table(("value", ""), [(name, str(value)) for name, value in summarize_values(found.values).items()])
