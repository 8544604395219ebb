"""titan reshard: the same DCP checkpoint, sharded for another mesh."""

from typing import Annotated

import typer

from converters.store.location import Location
from titan_tools.commands.convert_options import (
    DEFAULT_WORKERS,
    Destination,
    DryRun,
    ForMesh,
    Json,
    ModelFrom,
    NoDigest,
    Overwrite,
    Resume,
    Select,
    ShardSize,
    Workers,
    checkpoint_argument,
)
from titan_tools.terminal.completion import complete_dtype


def reshard(
    src: Annotated[Location, checkpoint_argument("SRC", "A DCP checkpoint folder; it is never changed.")],
    dst: Destination,
    for_mesh: ForMesh = None,
    num_files: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=100_000, help="Write N data files of about the same size.", show_default=False
        ),
    ] = None,
    shard_size: ShardSize = None,
    drop: Annotated[
        str | None,
        typer.Option(
            metavar="SECTIONS",
            help="Leave out: model, optimizer, lr_scheduler, dataloader, train_state, rng.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Cast the weights, not the optimizer. Default: unchanged.",
            show_default=False,
            autocompletion=complete_dtype,
        ),
    ] = None,
    optimizer_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Cast the optimizer's moments. Default: unchanged.",
            show_default=False,
            autocompletion=complete_dtype,
        ),
    ] = None,
    select: Select = None,
    model_from: ModelFrom = None,
    workers: Workers = DEFAULT_WORKERS,
    allow_missing: Annotated[
        bool,
        typer.Option(
            "--allow-missing", help="Reshard although weights or optimizer states are missing; they are listed."
        ),
    ] = False,
    no_digest: NoDigest = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Shard a DCP checkpoint for another mesh or file count: weights, optimizer, and everything else in it.

    Stock DCP reads whole chunks, so ranks start faster, and with less memory, if each chunk is exactly one rank's.
    A checkpoint with other names of parameters (torchtitan's other layouts, Hugging Face) is written with the names of
    `titan train`, and the moments are permuted like their weights.

    \b
    Examples:
      titan reshard outputs/checkpoint/step-1000 step-1000-fsdp8 --for-mesh dp_shard=8
      titan reshard step-1000 weights-only --drop optimizer,rng --for-mesh dp_shard=16,tp=8,pp=4
      titan reshard step-1000 one-file --num-files 1 --dtype bfloat16 --optimizer-dtype bfloat16
      titan reshard torchtitan/step-500 step-500 --model-from Llama-3.1-8B --drop dataloader
    """
    from converters.common.sizes import parse_shard_size
    from converters.conversion.records import Run
    from converters.layout.mesh_shape import MeshShape
    from converters.reshard import ReshardRequest
    from converters.reshard import reshard as reshard_checkpoint
    from titan_tools.pages.conversion import print_resharding
    from titan_tools.terminal.console import print_json, progress

    request = ReshardRequest(
        src,
        dst,
        mesh=None if for_mesh is None else MeshShape.parse(for_mesh),
        num_files=num_files,
        shard_bytes=None if shard_size is None else parse_shard_size(shard_size),
        dtype=dtype,
        optimizer_dtype=optimizer_dtype,
        drop=[name.strip() for name in drop.split(",") if name.strip()] if drop else (),
        select=select,
        model_from=model_from,
        allow_missing=allow_missing,
    )
    report = reshard_checkpoint(request, Run(workers, not no_digest, resume, overwrite, dry_run, progress))
    if as_json:
        print_json(report.to_json())
    else:
        print_resharding(report)
