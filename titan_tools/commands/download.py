"""`titan download`: download a model from the Hugging Face hub."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from titan_tools.commands.convert_options import local_path

ANNOUNCED_BYTES = 1 << 30


class _Assets(Enum):
    """Kinds of files, by their names in torchtitan."""

    tokenizer = "tokenizer"
    config = "config"
    index = "index"
    safetensors = "safetensors"


def download(
    repository: Annotated[
        str,
        typer.Argument(
            metavar="REPOSITORY",
            help="Name as in the URL of its page, such as meta-llama/Llama-3.2-1B.",
            show_default=False,
        ),
    ],
    dst: Annotated[
        Path | None,
        typer.Argument(
            metavar="DST",
            help="The folder to create, or that of an earlier download to check. Default: the HF cache (HF_HOME).",
            show_default=False,
            parser=local_path,
        ),
    ] = None,
    revision: Annotated[str, typer.Option(metavar="REVISION", help="Branch, tag or commit.")] = "main",
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Download these files, such as '*.json'; may be repeated. Default: safetensors (else .bin, else Meta's"
            " .pth) with config and tokenizer.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Skip these files; may be repeated.", show_default=False)
    ] = None,
    assets: Annotated[
        list[_Assets] | None,
        typer.Option(
            help="Download these files only: the tokenizer with what exports carry along, the config, the index of the "
            "weights, or the weights; may be repeated.",
            show_default=False,
        ),
    ] = None,
    original: Annotated[bool, typer.Option("--original", help="Download the folder original/ too.")] = False,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="Default: HF_TOKEN, else the token stored by `hf auth login`.", show_default=False
        ),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Files to download at a time.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List files and sizes; download nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Download a model from the Hugging Face hub and print its folder, which every command can read.

    After an interruption the same command resumes. Every file is checked against the hub's checksum, those of earlier
    downloads, too; damaged ones are downloaded again. With HF_HUB_OFFLINE=1 an earlier download is checked.
    HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HTTPS_PROXY are respected.

    \b
    Examples:
      titan download meta-llama/Llama-3.2-1B
      titan download Qwen/Qwen3-0.6B qwen3-0.6b --revision main
      titan download meta-llama/Llama-3.1-8B assets/hf/Llama-3.1-8B --assets tokenizer
      titan download meta-llama/Llama-3.1-8B --original --exclude '*.safetensors' --dry-run
    """
    from converters.common.errors import ConfigError
    from converters.common.sizes import format_bytes
    from titan_tools.hub.download import FileSelection
    from titan_tools.hub.download import download as fetch
    from titan_tools.terminal.console import count, note, print_json, progress, table

    if assets and str(dst) in _Assets.__members__:
        raise ConfigError(
            f"{dst} would be the folder to create", hint="--assets takes one kind", tries=[f"--assets {dst}"]
        )

    def announced(total: int, what: str) -> AbstractContextManager[Callable[[int], None]]:
        if total >= ANNOUNCED_BYTES:  # seconds pass
            note(f"{what}: {format_bytes(total)}")
        return progress(total, what)

    report = fetch(
        repository,
        dst,
        revision=revision,
        selection=FileSelection(include or (), exclude or (), original, [kind.value for kind in assets or ()]),
        token=token,
        workers=workers,
        dry_run=dry_run,
        progress=announced,
    )
    if as_json:
        print_json(report.to_json())
        return
    for folder in report.stale:
        note(f"{folder} is an unfinished download of another commit; remove it if it is not needed")
    for name in report.damaged:
        what = "would be downloaded again" if dry_run else "was downloaded again"
        note(f"{name}: here, it does not match the hub's checksum; it {what}")
    if report.unchecked:
        has_sizes = any(f.etag for f in report.files if f.name in report.unchecked)
        why = "the hub's checksum is of another kind; compared by size" if has_sizes else "no checksum is recorded here"
        what = f"{count(len(report.unchecked), 'file')}: {why}"
        note(f"{what} ({', '.join(report.unchecked[:3])}{', …' if report.unchecked[3:] else ''})")
    fetched = report.num_fetched_bytes
    here = "" if fetched == report.num_bytes else f", {format_bytes(report.num_bytes - fetched)} already downloaded"
    what = f"{repository} at {report.commit[:12]}: {count(len(report.files), 'file')}, {format_bytes(report.num_bytes)}"
    if dry_run:
        table(("file", "bytes", "here"), [(f.name, f.num_bytes, f.num_bytes_here) for f in report.files])
        note(f"{what}{here}; nothing was downloaded")
        return
    note(f"{what}{here}, {report.secs:.1f} s")
    print(report.path)
