"""titan verify: check that a checkpoint is complete and undamaged."""

import sys
from typing import Annotated

import typer

from titan_tools.commands.convert_options import Checkpoint, ModelFrom, Select


def verify(
    checkpoint: Checkpoint,
    quick: Annotated[
        bool, typer.Option("--quick", help="Structure, names, sizes and small files; reads no tensor.")
    ] = False,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="After an intended change: check the files, list what differs, and rewrite titan_manifest.json.",
        ),
    ] = False,
    select: Select = None,
    model_from: ModelFrom = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check structure, names, shapes, checksums and digests of a checkpoint. Exits with 1 if a check fails.

    A checkpoint that titan wrote is checked bit for bit against its manifest; for stock DCP and torch files, the CRC32
    of every item is checked (torch itself never does). Lists what cannot be checked. For the folder of a run,
    checks the newest step.

    --accept is for a folder that was changed after titan wrote it (save_pretrained into it, an edited config.json).
    Damage is refused: truncated files, wrong CRC32s, missing tensors, a config of another model. Changed values are
    listed by tensor, so that you can check that they were intended.

    \b
    Examples:
      titan verify outputs/checkpoint/step-1000
      titan verify Llama-3.2-1B --quick --json
      titan verify my-finetune --accept
    """
    from converters.common.errors import ConfigError
    from converters.common.sizes import format_bytes
    from converters.verify import verify as verify_checkpoint
    from titan_tools.infer.find import newest_step
    from titan_tools.terminal.console import count, non_finite, note, print_json, progress, styled, wrapped

    if accept and quick:
        raise ConfigError("--accept reads every tensor: leave --quick out")
    checkpoint = newest_step(checkpoint)
    report = verify_checkpoint(
        checkpoint, quick=quick, accept=accept, select=select, model_from=model_from, progress=progress
    )
    if as_json:
        print_json(report.to_json())
    else:
        for check in report.checks:
            lines = "\n".join([f"{check.name}: {check.detail}", *check.problems]).replace("\n", "\n" + " " * 14)
            text = wrapped(f"{check.outcome:<12}  {lines}", sys.stdout, indent=14)
            print(styled(check.outcome, sys.stdout) + text.removeprefix(check.outcome))
        for name, number in report.non_finite.items():
            print(f"note          {non_finite(name, number)}")
        size = f"{count(report.num_tensors, 'tensor')}, {format_bytes(report.num_bytes)}"
        verdict = wrapped(f"{report.path}: {report.verdict}" + (f" ({size})" if report.container else ""), sys.stdout)
        print(verdict.replace("FAILED", styled("FAILED", sys.stdout)) if not report.ok else verdict)
    if not report.ok:
        if accept:
            note("titan_manifest.json was not changed")
        elif any(check.name == "files" and check.outcome == "failed" for check in report.checks):
            note(f"hint: files that were changed on purpose are accepted by: titan verify {checkpoint} --accept")
        raise typer.Exit(1)
