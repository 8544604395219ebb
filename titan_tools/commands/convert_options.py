"""The options that `titan convert` and other commands share: their types and help."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from converters.formats.base import OPTIONS
from converters.store.location import Location, locate
from titan_tools.terminal.completion import complete_checkpoint, complete_dtype


def find_checkpoint(context: typer.Context, place: Location | None) -> Location | None:
    """The callback of a parameter that takes a checkpoint: the snapshot of a model that is named as on the hub."""
    if place is None or context.resilient_parsing:  # the latter during completion
        return place
    from converters.store.hub_names import find_local
    from titan_tools.terminal.console import note

    if (found := find_local(place)) != place:
        note(f"{place}: {found}")
    return found


def local_path(text: str) -> Path:
    """The parser of a path that a command writes to or reads as it is. Raises UnsupportedError for a URI."""
    return locate(text).path


def checkpoint_argument(metavar: str, help: str) -> Any:
    """A positional parameter that takes a checkpoint: a folder, a file or a name on the hub."""
    return typer.Argument(metavar=metavar, help=help, **_CHECKPOINT)


def checkpoint_option(*flags: str, metavar: str, help: str) -> Any:
    """An option that takes a checkpoint, like `checkpoint_argument`."""
    return typer.Option(*flags, metavar=metavar, help=help, **_CHECKPOINT)


_CHECKPOINT: dict[str, Any] = {
    "show_default": False,
    "parser": locate,  # no Path is made of a URI
    "callback": find_checkpoint,
    "autocompletion": complete_checkpoint,
}


def format_option(field: str) -> Any:
    """The command-line option of a field of OutputOptions."""
    text = OPTIONS[field]
    if text.is_checkpoint:
        return checkpoint_option(text.flag, metavar=text.metavar or "FOLDER", help=text.help)
    return typer.Option(text.flag, metavar=text.metavar, help=text.help, show_default=False)


Source = Annotated[
    Location,
    checkpoint_argument("SRC", "A checkpoint folder or file, or a model's name in the hub's cache; never changed."),
]
Destination = Annotated[
    Location, typer.Argument(metavar="DST", help="The folder to create.", show_default=False, parser=locate)
]
Checkpoint = Annotated[
    Location,
    checkpoint_argument(
        "CHECKPOINT", "A checkpoint folder or file of any format, or a model's name in the hub's cache."
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        autocompletion=complete_dtype,
        help="Cast to bfloat16, float16, float32, … Default: the source's own. "
        "Tensors that are float32 in a checkpoint of 16-bit weights are not cast.",
        show_default=False,
    ),
]
ForMesh = Annotated[str | None, format_option("mesh")]
ShardSize = Annotated[str | None, format_option("shard_bytes")]
ModelFrom = Annotated[
    Location | None,
    checkpoint_option(
        metavar="FOLDER",
        help="Take config.json, params.json or titan_model.json and the tokenizer from here, "
        "where the checkpoint has none. Also a model's name in the hub's cache.",
    ),
]
Select = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The model to read, where the checkpoint holds several (policy and reference, model and EMA).",
        show_default=False,
    ),
]
Workers = Annotated[
    int, typer.Option(metavar="N", min=1, max=256, help="Threads that copy; 16 MiB each, 40 that transpose.")
]
AllowMissing = Annotated[
    bool,
    typer.Option("--allow-missing", help="Convert although SRC lacks tensors of the model; they are listed."),
]
AllowExtra = Annotated[
    bool, typer.Option("--allow-extra", help="Leave out tensors that the model does not have; they are listed.")
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Copy tensors that hold NaN or infinity; they are listed.")
]
NoDigest = Annotated[
    bool,
    typer.Option("--no-digest", help="Leave tensor digests out of the manifest: faster; every file's CRC32 stays."),
]


class Layers(StrEnum):
    """The treatment of layers for multi-token prediction."""

    drop = "drop"
    keep = "keep"


Mtp = Annotated[
    Layers,
    typer.Option(help="Layers for multi-token prediction, which the model computes without: drop or keep them."),
]


KeepExtra = Annotated[
    bool | None,
    typer.Option(
        help="Keep what a multimodal checkpoint has beside its text model (Llama 4's vision encoder): an export is "
        "complete again. A SRC with the text model alone, such as a training run's, gets it from --model-from. "
        "Default: keep it only if SRC has titan's own names.",
        show_default=False,
    ),
]


class Trainer(StrEnum):
    """The trainer that wrote a checkpoint of torchtitan's layout."""

    titan = "titan"
    torchtitan = "torchtitan-0.2.2"
    torchtitan_yarn = "torchtitan-0.2.2-yarn"


TrainedBy = Annotated[
    Trainer | None,
    typer.Option(
        help="What trained a DCP of torchtitan's layout, where torchtitan v0.2.2 computes otherwise than the published "
        "model (DeepSeek, Llama 4): the output describes what was trained. -yarn: a DeepSeek with a training.seq_len "
        "above 4096.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Plan and check everything, print what it needs; write nothing.")
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace DST once the new one is complete; in a store, the old one is removed first."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
DEFAULT_WORKERS = 2  # converters.engine.copy's, which `titan --help` must not import; a test compares them
