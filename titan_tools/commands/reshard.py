"""titan reshard: the same DCP checkpoint, cut for another mesh."""

from pathlib import Path
from typing import Annotated

import typer


def reshard(
    src: Annotated[Path, typer.Argument(help="A DCP checkpoint folder; it is never changed.", show_default=False)],
    dst: Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)],
    for_mesh: Annotated[
        str | None,
        typer.Option(
            metavar="MESH",
            help="The mesh that will read it, e.g. dp_shard=64,tp=8,pp=4. Default: row blocks that suit any.",
            show_default=False,
        ),
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option(
            metavar="SECTIONS",
            help="Leave out: optimizer, lr_scheduler, dataloader, train_state, rng.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast the weights, not the optimizer. Default: as they are.", show_default=False)
    ] = None,
    model_from: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Take config.json, params.json or titan_model.json from here, where SRC has none.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and check everything; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST once the new one is complete.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Cut a DCP checkpoint for another mesh: weights, optimizer, and everything else in it.

    Stock DCP reads whole chunks, so ranks start faster, and from less memory, where each chunk is exactly one rank's.

    \b
    Examples:
      titan reshard outputs/checkpoint/step-1000 step-1000-fsdp8 --for-mesh dp_shard=8
      titan reshard step-1000 weights-only --drop optimizer,rng --for-mesh dp_shard=16,tp=8,pp=4
    """
    from converters.layout import MeshShape
    from converters.reshard import reshard as reshard_checkpoint
    from converters.sizes import tell_bytes
    from titan_tools.console import count, print_json, progress

    report = reshard_checkpoint(
        src,
        dst,
        mesh=MeshShape.parse(for_mesh) if for_mesh else None,
        dtype=dtype,
        drop=[name.strip() for name in drop.split(",") if name.strip()] if drop else (),
        model_from=model_from,
        overwrite=overwrite,
        dry_run=dry_run,
        progress=progress,
    )
    if as_json:
        print_json(report.to_json())
        return
    verb = "to write" if report.dry_run else "wrote"
    print(f"{report.source} to {report.destination}, cut for mesh {report.mesh}")
    print(
        f"  {verb:<9} {count(report.num_tensors, 'tensor')} and {count(report.num_blobs, 'value')}, "
        f"{tell_bytes(report.num_bytes)} in {count(report.num_files, 'file')}, {report.secs:.1f} s"
    )
    print(f"  sections  {', '.join(f'{section} ({number:,})' for section, number in report.sections.items())}")
    if report.num_cast:
        print(f"  cast      {count(report.num_cast, 'tensor')}; now {', '.join(report.dtypes)}")
    if report.dropped_sections:
        entries = count(sum(report.dropped_sections.values()), "entry")
        print(f"  left out  {', '.join(report.dropped_sections)} ({entries}), as asked")
    for name, reason in report.dropped.items():
        print(f"  dropped   {name}: {reason}")
    for remark in report.remarks:
        print(f"  note      {remark}")
