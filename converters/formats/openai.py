"""OpenAI's release of GPT-OSS: config.json with its own keys, safetensors with experts in mxfp4, dtypes.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from converters.common.errors import ConfigError, UnsupportedError
from converters.formats.base import CommandHelp, Contents, Format, OutputOptions

if TYPE_CHECKING:
    from converters.containers.target import Target
    from converters.families.base import Family, Naming

_NAMING = "openai"


def _naming(family: Family, options: OutputOptions) -> Naming:
    from converters.quantized.quantization import SPELLINGS

    if _NAMING not in family.namings or family.release is None:
        raise UnsupportedError(f"OpenAI's format has no {family.name} models")
    known = [text for text, scheme in SPELLINGS.items() if scheme.method in family.quantized_as]
    if options.quantize not in (None, *known):
        raise ConfigError(
            f"--quantize {options.quantize}: OpenAI's code reads experts in mxfp4", tries=[f"--quantize {known[0]}"]
        )
    return family.namings[_NAMING]


def _plan(contents: Contents, options: OutputOptions) -> Target:
    from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES, plan_safetensors

    assert contents.family.release is not None
    contents.family.release.write(contents.info.args)  # raises before the copy if it cannot describe the model
    return plan_safetensors(contents.tensors, shard_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    from converters.common.dtypes import DTYPES
    from converters.common.names import HF_CONFIG, OPENAI_DTYPES
    from converters.store.json_file import write_json
    from converters.tokenizers.assets import write_assets

    assert contents.family.release is not None
    written = write_assets(folder, contents.info.assets, contents.info.generation)
    write_json(folder / HF_CONFIG, contents.family.release.write(contents.info.args))
    kinds = {name: DTYPES[info.dtype].safetensors for name, info in contents.tensors.items()}
    kinds |= {name: "FP4" if name.endswith(".blocks") else "UE8" for name in contents.coded}
    write_json(folder / OPENAI_DTYPES, kinds)
    return [HF_CONFIG, OPENAI_DTYPES, *written]


OPENAI = Format(
    name="openai",
    called="OpenAI's release of GPT-OSS",
    containers=("safetensors",),
    names={"openai": ""},
    takes=("shard_bytes", "quantize", "scales_from", "drop_expert_bias"),
    naming=_naming,
    plan=_plan,
    write_small_files=_write_small_files,
    quantizes="mxfp4",
    to_dcp=CommandHelp(
        "OpenAI's release of GPT-OSS to DCP.",
        "Convert the folder `original` of a gpt-oss release to DCP, for `titan train` and torchtitan.",
        (
            "openai-to-dcp gpt-oss-20b/original gpt-oss-20b-dcp --model-from gpt-oss-20b",
            "openai-to-dcp gpt-oss-120b/original gpt-oss-120b-dcp --for-mesh dp_shard=64 --dry-run",
        ),
    ),
    from_dcp=CommandHelp(
        "DCP to OpenAI's release of GPT-OSS.",
        "Convert DCP to the files that OpenAI's own code reads; the experts are quantized to mxfp4.",
        (
            "dcp-to-openai outputs/checkpoint/step-1000 my-model",
            "dcp-to-openai gpt-oss-20b-dcp same-bytes --scales-from gpt-oss-20b/original",
        ),
    ),
)
