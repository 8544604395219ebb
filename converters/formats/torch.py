"""A torch.save file of the weights under native names: model.pt in a folder that says what it is, or one lone file."""

from pathlib import Path

from converters.assets import write_assets
from converters.containers.target import Target
from converters.containers.torch_write import plan_torch
from converters.families.base import Family, Naming
from converters.formats.base import Contents, Output, OutputOptions
from converters.model_info import write_model_info
from converters.names import ASSETS_FOLDER, MODEL_INFO, TORCH_MODEL

SUFFIXES = frozenset({".pt", ".pth", ".bin"})


def _naming(family: Family, options: OutputOptions) -> Naming | None:
    return None  # native


def _plan(contents: Contents, options: OutputOptions) -> Target:
    name = contents.dst.name if contents.dst.suffix in SUFFIXES else TORCH_MODEL
    return plan_torch(contents.tensors, file=name)


def _write_small_files(folder: Path, contents: Contents, options: OutputOptions) -> list[str]:
    info = contents.info
    write_model_info(folder, info)
    assets = write_assets(folder / ASSETS_FOLDER, info.assets, info.generation)
    return [MODEL_INFO, *(f"{ASSETS_FOLDER}/{name}" for name in assets)]


TORCH = Output(
    name="torch",
    called="a torch file",
    takes=frozenset(),
    naming=_naming,
    plan=_plan,
    write_small_files=_write_small_files,
    file_suffixes=SUFFIXES,
)
