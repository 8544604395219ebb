"""Meta's original format: consolidated.00.pth and params.json, which torchtune opens too."""

from collections.abc import Mapping
from pathlib import Path

from converters.assets import write_assets
from converters.errors import UnsupportedError
from converters.families.base import Family, Naming
from converters.formats.target import Target
from converters.formats.torch_write import plan_torch
from converters.model_info import write_meta_params, write_model_info
from converters.names import META_PARAMS, META_SHARD, MODEL_INFO
from converters.outputs.base import Contents, Output, OutputOptions


def _naming(family: Family, options: OutputOptions) -> Naming:
    if "meta" not in family.namings:
        raise UnsupportedError(f"Meta's format has no {family.name} models")
    return family.namings["meta"]


def _plan(contents: Contents, options: OutputOptions) -> Target:
    contents.family.meta_params(contents.info.args)  # raises now where params.json cannot say it, not after the copy
    shared = second_names(contents.view.ledger.used)
    return plan_torch(contents.tensors, file=META_SHARD.format(index=0), shared=shared)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    info = contents.info
    written = write_assets(folder, info.assets, info.token_ids)
    write_meta_params(folder, info)
    write_model_info(folder, info)  # params.json cannot say the context length, nor that the output is tied
    return [META_PARAMS, MODEL_INFO, *written]


def second_names(used: Mapping[str, str]) -> dict[str, str]:
    """Target names whose source an earlier target name has too, with that name: the output of a tied model."""
    first: dict[str, str] = {}
    return {name: first[source] for name, source in used.items() if first.setdefault(source, name) != name}


META = Output(
    name="meta",
    called="an original Meta release",
    takes=frozenset(),
    naming=_naming,
    plan=_plan,
    write_small_files=_write_small_files,
)
