"""titan convert: the same weights in another format."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

convert_app = typer.Typer(
    help="Convert weights between Hugging Face, DCP and Meta's format, at the speed and in the memory of a copy.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class _Format(StrEnum):
    dcp = "dcp"
    hf = "hf"
    meta = "meta"


_Source = Annotated[Path, typer.Argument(help="A checkpoint folder or file; it is never changed.", show_default=False)]
_Destination = Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)]
_DType = Annotated[
    str | None, typer.Option(help="Cast to bfloat16, float32, … Default: the source's own.", show_default=False)
]
_ForMesh = Annotated[
    str | None,
    typer.Option(
        metavar="MESH",
        help="Cut as this mesh reads it, e.g. dp_shard=64,tp=8,pp=4. Default: row blocks that suit any.",
        show_default=False,
    ),
]
_ShardSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most bytes in a file, such as 5GB or 500MB. Default: 5GB.", show_default=False),
]
_ModelFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Take config.json, params.json or titan_model.json and the tokenizer from here, where SRC has none.",
        show_default=False,
    ),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan and check everything; write nothing.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST once the new one is complete.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@convert_app.command("hf-to-dcp")
def hf_to_dcp(
    src: _Source,
    dst: _Destination,
    for_mesh: _ForMesh = None,
    dtype: _DType = None,
    shard_size: _ShardSize = None,
    dry_run: _DryRun = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Hugging Face safetensors to DCP, ready for `titan train` and torchtitan.

    \b
    Examples:
      titan convert hf-to-dcp Llama-3.2-1B llama-1b-dcp
      titan convert hf-to-dcp Llama-3.1-70B llama-70b-dcp --for-mesh dp_shard=8,tp=8 --dtype bfloat16
    """
    _run(
        src,
        dst,
        to="dcp",
        source="hf",
        for_mesh=for_mesh,
        dtype=dtype,
        shard_size=shard_size,
        dry_run=dry_run,
        overwrite=overwrite,
        as_json=as_json,
    )


@convert_app.command("dcp-to-hf")
def dcp_to_hf(
    src: _Source,
    dst: _Destination,
    dtype: _DType = None,
    shard_size: _ShardSize = None,
    model_from: _ModelFrom = None,
    dry_run: _DryRun = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """DCP to a folder that transformers opens as it is. Of a training checkpoint, the weights.

    \b
    Examples:
      titan convert dcp-to-hf outputs/checkpoint/step-1000 my-model
      titan convert dcp-to-hf torchtitan/step-1000 my-model --model-from Llama-3.1-8B --dtype bfloat16
    """
    _run(
        src,
        dst,
        to="hf",
        source="dcp",
        model_from=model_from,
        dtype=dtype,
        shard_size=shard_size,
        dry_run=dry_run,
        overwrite=overwrite,
        as_json=as_json,
    )


@convert_app.command("meta-to-dcp")
def meta_to_dcp(
    src: _Source,
    dst: _Destination,
    for_mesh: _ForMesh = None,
    dtype: _DType = None,
    shard_size: _ShardSize = None,
    dry_run: _DryRun = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Meta's original release (consolidated.00.pth, params.json, tokenizer.model) to DCP.

    \b
    Examples:
      titan convert meta-to-dcp Llama3.2-1B/original llama-1b-dcp
      titan convert meta-to-dcp Llama3.1-8B llama-8b-dcp --for-mesh dp_shard=8 --dry-run
    """
    _run(
        src,
        dst,
        to="dcp",
        source="meta",
        for_mesh=for_mesh,
        dtype=dtype,
        shard_size=shard_size,
        dry_run=dry_run,
        overwrite=overwrite,
        as_json=as_json,
    )


@convert_app.command("dcp-to-meta")
def dcp_to_meta(
    src: _Source,
    dst: _Destination,
    dtype: _DType = None,
    model_from: _ModelFrom = None,
    dry_run: _DryRun = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """DCP to Meta's original format in one file (consolidated.00.pth, params.json), which torchtune opens too.

    \b
    Examples:
      titan convert dcp-to-meta outputs/checkpoint/step-1000 my-model
      titan convert dcp-to-meta llama-8b-dcp my-model --dtype bfloat16
    """
    _run(
        src,
        dst,
        to="meta",
        source="dcp",
        model_from=model_from,
        dtype=dtype,
        dry_run=dry_run,
        overwrite=overwrite,
        as_json=as_json,
    )


@convert_app.command("auto")
def auto(
    src: _Source,
    dst: _Destination,
    to: Annotated[_Format, typer.Option(help="The format to write.", show_default=False)],
    for_mesh: _ForMesh = None,
    dtype: _DType = None,
    shard_size: _ShardSize = None,
    model_from: _ModelFrom = None,
    dry_run: _DryRun = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Whatever SRC is, to DCP, Hugging Face or Meta. Also reads torch files and torchtitan's other layouts.

    \b
    Examples:
      titan convert auto Llama3.2-1B/original my-model --to hf
      titan convert auto checkpoint.pt llama-dcp --to dcp --model-from Llama-3.1-8B
    """
    _run(
        src,
        dst,
        to=to.value,
        source=None,
        for_mesh=for_mesh,
        model_from=model_from,
        dtype=dtype,
        shard_size=shard_size,
        dry_run=dry_run,
        overwrite=overwrite,
        as_json=as_json,
    )


def _run(
    src: Path,
    dst: Path,
    *,
    to: str,
    source: str | None,
    for_mesh: str | None = None,
    model_from: Path | None = None,
    dtype: str | None,
    shard_size: str | None = None,
    dry_run: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """What every command here does, with one difference: what SRC must be."""
    from converters.convert import convert
    from converters.layout import MeshShape
    from converters.outputs.base import OutputOptions
    from titan_tools.console import print_json, progress

    report = convert(
        src,
        dst,
        to=to,
        source=source,
        dtype=dtype,
        options=OutputOptions(
            mesh=MeshShape.parse(for_mesh) if for_mesh else None,
            shard_bytes=None if shard_size is None else _parse_size(shard_size),
        ),
        model_from=model_from,
        overwrite=overwrite,
        dry_run=dry_run,
        progress=progress,
    )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)


def _parse_size(text: str) -> int:
    """`5GB` (10⁹, as Hugging Face counts), `500MiB`, or plain bytes."""
    from converters.errors import ConfigError

    units = {"": 1, "B": 1}
    units |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
    units |= {f"{p}IB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
    number = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(number) :].strip().upper()
    if unit not in units or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
        raise ConfigError(f"--shard-size {text!r} is no size", tries=["--shard-size 5GB", "--shard-size 500MiB"])
    return max(1, int(float(number) * units[unit]))


def _print(report) -> None:
    from converters.sizes import tell_bytes
    from titan_tools.console import count

    verb = "to write" if report.dry_run else "wrote"
    dtypes = ", ".join(report.dtypes)
    print(f"{report.source} ({report.source_format}) to {report.destination} ({report.to})")
    print(f"  model     {report.model}")
    print(
        f"  {verb:<9} {count(report.num_tensors, 'tensor')}, {tell_bytes(report.num_bytes)} of {dtypes} in "
        f"{count(report.num_files, 'file')}, {report.secs:.1f} s"
    )
    if report.num_cast:
        print(f"  cast      {count(report.num_cast, 'tensor')}")
    if report.other_files:
        print(f"  with      {', '.join(report.other_files)}")
    for name, reason in report.dropped.items():
        print(f"  dropped   {name}: {reason}")
    if report.left_out:
        sections, entries = ", ".join(report.left_out), count(sum(report.left_out.values()), "entry")
        print(f"  left out  {sections} ({entries}): only weights are converted; `titan reshard` keeps it")
    for remark in report.remarks:
        print(f"  note      {remark}")
    for name, number in report.non_finite.items():
        print(f"  beware    {name} holds {count(number, 'value')} that are NaN or infinite")
