"""The record of a format: names, containers, options, planning, writing, and the help of its commands.

A format is a container with a naming. Each is one constant in the file of its name, listed in registry.py; the
`titan convert` commands are made from these records, so this package imports numpy only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.common.errors import ConfigError
from converters.common.sizes import parse_shard_size
from converters.store.location import Location, Place

if TYPE_CHECKING:
    from converters.common.box import TensorInfo
    from converters.containers.target import Target
    from converters.families.base import Family, Naming
    from converters.layout.mesh_shape import MeshShape
    from converters.model.model_info import ModelInfo
    from converters.quantized.quantization import Scheme
    from converters.store.location import Location
    from converters.views.view import View


@dataclass(frozen=True, slots=True)
class OptionText:
    """The command-line option of a field of OutputOptions."""

    flag: str
    help: str
    refusal: str  # the hint if a format does not take it
    metavar: str | None = None
    kind: Any = str  # the type of the argument
    parse: Callable[[Any], Any] = lambda value: value  # argument → value of the field
    is_checkpoint: bool = False  # it names one

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.flag.removeprefix("--").replace("-", "_")


class Style(StrEnum):
    """The checkpointers of torchtune."""

    hf = "hf"
    meta = "meta"
    torchtune = "torchtune"


class Quantize(StrEnum):
    """The quantization of the weights to write."""

    fp8 = "fp8"
    fp8_ue8m0 = "fp8:ue8m0"
    mxfp4 = "mxfp4"
    mxfp4_torchao = "mxfp4:torchao"


def _parse_mesh(text: str) -> MeshShape:
    from converters.layout.mesh_shape import MeshShape

    return MeshShape.parse(text)


def _option(flag: str, help: str, *, refusal: str, **details: Any) -> Any:
    return field(default=None, metadata={"option": OptionText(flag, help, refusal, **details)})


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The options of an output. A format refuses fields that are not None and that it does not take."""

    # the mesh whose ranks will read the output: each chunk is one rank's
    mesh: MeshShape | None = _option(
        "--for-mesh",
        "Shard for this mesh, e.g. dp_shard=64,tp=8,pp=4. Default: row blocks for any mesh.",
        metavar="MESH",
        parse=_parse_mesh,
        refusal="it shards a DCP output for a mesh; other formats are not sharded",
    )
    shard_bytes: int | None = _option(
        "--shard-size",
        "Largest size of a file, such as 5GB or 500MB. Default: 5GB.",
        metavar="SIZE",
        parse=parse_shard_size,
        refusal="it splits an output into files; the number of files of this format is fixed",
    )
    # model-parallel shards of an original Meta release
    num_shards: int | None = _option(
        "--num-shards",
        "Write consolidated.00 … for 1, 2, 4, 8 or 16 ranks. Default: 1.",
        metavar="N",
        kind=int,
        refusal="it is the number of consolidated.NN.pth files of Meta's format",
    )
    style: str | None = _option(
        "--style",
        "The names that torchtune's checkpointer reads. Default: hf.",
        kind=Style,
        parse=str,
        refusal="it chooses between the checkpointers of torchtune",
    )
    device: str | None = _option(
        "--device",
        "Where torchtune trains: cpu, cuda, … Written into the recipe.",
        metavar="DEVICE",
        refusal="it goes into torchtune's recipe",
    )
    # chat file that torchtune's recipe trains on
    dataset: Path | None = _option(
        "--dataset",
        "Chats to train on (JSON or JSON Lines); copied into the folder.",
        metavar="FILE",
        kind=Path,
        refusal="it goes into torchtune's recipe",
    )

    fused_experts: bool | None = _option(
        "--fused-experts",
        "Write experts as gate_up_proj and down_proj of a layer, as transformers 5 holds them in memory; other tools "
        "expect one tensor per expert, which is the default.",
        kind=bool,
        refusal="it chooses between two forms of Hugging Face's format",
    )
    drop_expert_bias: bool | None = _option(
        "--drop-expert-bias",
        "Leave out the experts' balancing offsets although they are not zero: tokens are then routed differently.",
        kind=bool,
        refusal="this format keeps them",
    )

    quantize: str | None = _option(
        "--quantize",
        "Quantize linear layers and experts to float8 (e4m3) with a float32 scale for each block of 128 × 128, as "
        "DeepSeek V3 and Qwen 3 are published; fp8:ue8m0 with power-of-two scales, as DeepSeek V3.1. mxfp4: GPT-OSS's "
        "experts to 4 bits with a scale for each 32 values, as it is published; mxfp4:torchao with torchao's scales.",
        kind=Quantize,
        parse=str,
        refusal="only Hugging Face's and OpenAI's checkpoints are quantized; other formats hold the values",
    )
    # a quantized copy of the model
    scales_from: Place | None = _option(
        "--scales-from",
        "With --quantize: keep the scales of this quantized checkpoint where the values still fit, so that weights "
        "that came from it become the same bytes again.",
        metavar="FOLDER",
        kind=Location,
        is_checkpoint=True,
        refusal="it keeps the scales of quantized weights",
    )

    def given(self) -> set[str]:
        """Names of the fields that are not None."""
        return {f.name for f in fields(self) if getattr(self, f.name) is not None}


OPTIONS: Mapping[str, OptionText] = {f.name: f.metadata["option"] for f in fields(OutputOptions)}


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors to write and their model, from which an output is planned."""

    tensors: Mapping[str, TensorInfo]  # by target name, in order
    view: View  # has their values; its ledger maps them to native tensors
    family: Family
    info: ModelInfo
    dst: Location  # of the complete output; it is written elsewhere
    quantization: Scheme | None = None  # of the output
    coded: frozenset[str] = frozenset()  # of `tensors`: codes and scales
    streamed: bool = False  # files of the output can only be appended to (see Target)

    @property
    def unquantized(self) -> dict[str, TensorInfo]:
        return {name: info for name, info in self.tensors.items() if name not in self.coded}


def write_model_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    """Write what describes the model, and its tokenizer, for a format that has no files of its own for them."""
    from converters.common.names import ASSETS_FOLDER, MODEL_INFO
    from converters.model.model_info import write_model_info
    from converters.tokenizers.assets import write_assets

    info = contents.info
    write_model_info(folder, info)
    assets = write_assets(folder / ASSETS_FOLDER, info.assets, info.generation)
    return [MODEL_INFO, *(f"{ASSETS_FOLDER}/{name}" for name in assets)]


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """The help page of one `titan convert` command."""

    short: str  # on the page of `titan convert`
    text: str
    examples: tuple[str, ...]  # without `titan convert`


@dataclass(frozen=True, slots=True)
class Format:
    """A format that `titan convert` reads and writes."""

    name: str
    called: str  # in messages: "a DCP checkpoint"
    containers: tuple[str, ...]  # that a source may have; a source in the first one is taken for this format
    takes: tuple[str, ...]  # fields of OutputOptions that it takes, in the order of the help page
    naming: Callable[[Family, OutputOptions], Naming | None]  # None: native names
    plan: Callable[[Contents, OutputOptions], Target]
    # returns the names of what it wrote
    write_small_files: Callable[[Path, Contents, OutputOptions], list[str]] = write_model_files
    # how the name of a source's naming begins, or its container → a remark on such a source, or ""; empty: any
    names: Mapping[str, str] = field(default_factory=dict)
    from_dcp: CommandHelp | None = None  # of `dcp-to-NAME`; None for DCP itself
    to_dcp: CommandHelp | None = None  # of `NAME-to-dcp`
    file_suffixes: tuple[str, ...] = ()  # of a DST that is a single file
    quantizes: str | None = None  # `quantize` if none is asked for
    destination_help: str = "The folder to create."

    def completed(self, options: OutputOptions) -> OutputOptions:
        """The options with what this format always does."""
        return options if options.quantize else replace(options, quantize=self.quantizes)

    def check_options(self, options: OutputOptions) -> None:
        """Raise ConfigError, in the words of the command line, for an option that this format does not take."""
        if options.scales_from is not None and options.quantize is None and self.quantizes is None:
            raise ConfigError("--scales-from needs --quantize", tries=["--quantize fp8"])
        for name in sorted(options.given().difference(self.takes)):
            option = OPTIONS[name]
            raise ConfigError(f"{option.flag} is not supported by {self.called}", hint=option.refusal)
