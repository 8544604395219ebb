"""The options that the `titan convert` commands share: their types and their help, each once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """What `titan convert auto` can write."""

    dcp = "dcp"
    hf = "hf"
    meta = "meta"
    torch = "torch"
    torchtune = "torchtune"


class Style(StrEnum):
    """Which of torchtune's checkpointers shall read its weights."""

    hf = "hf"
    meta = "meta"
    torchtune = "torchtune"


Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="A checkpoint folder or file; it is never changed.", show_default=False)
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.", show_default=False)]
FileOrFolder = Annotated[
    Path,
    typer.Argument(
        metavar="DST", help="The .pt, .pth or .bin file to make; else a folder with model.pt.", show_default=False
    ),
]
FolderOfAny = Annotated[
    Path,
    typer.Argument(
        metavar="DST", help="The folder to make; --to torch also takes a .pt, .pth or .bin file.", show_default=False
    ),
]
Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder or file of any format.", show_default=False),
]
To = Annotated[Format, typer.Option(help="The format to write.", show_default=False)]
DType = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Cast to bfloat16, float16, float32, … Default: the source's own. "
        "What is float32 among weights of 16 bits stays.",
        show_default=False,
    ),
]
ForMesh = Annotated[
    str | None,
    typer.Option(
        metavar="MESH",
        help="Cut as this mesh reads it, e.g. dp_shard=64,tp=8,pp=4. Default: row blocks that suit any.",
        show_default=False,
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most bytes in a file, such as 5GB or 500MB. Default: 5GB.", show_default=False),
]
NumShards = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Write consolidated.00 … for 1, 2, 4, 8 or 16 ranks. Default: 1.", show_default=False
    ),
]
TorchtuneStyle = Annotated[
    Style | None, typer.Option(help="Whose names torchtune shall find. Default: hf.", show_default=False)
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", help="Where torchtune shall train: cpu, cuda, … Goes into the recipe.", show_default=False
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Chats to train on (JSON or JSON Lines); copied into the folder.", show_default=False
    ),
]
ModelFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Take config.json, params.json or titan_model.json and the tokenizer from here, "
        "where the checkpoint has none.",
        show_default=False,
    ),
]
Workers = Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Threads that copy; 16 MiB each.")]
AllowMissing = Annotated[
    bool,
    typer.Option("--allow-missing", help="Write what there is, where SRC lacks tensors of the model; they are listed."),
]
AllowExtra = Annotated[
    bool, typer.Option("--allow-extra", help="Leave out tensors that the model does not have; they are listed.")
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Copy tensors that hold NaN or infinity; they are listed.")
]
NoDigest = Annotated[
    bool, typer.Option("--no-digest", help="No tensor digests in the manifest: faster; every file's CRC32 stays.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a killed run of this very command ended.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Plan and check everything, tell what it needs; write nothing.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST once the new one is complete.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
DEFAULT_WORKERS = 2  # converters.engine.copy's, which `titan --help` must not load; a test holds them equal
