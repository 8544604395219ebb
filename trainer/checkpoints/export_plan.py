"""The exports that a config requests: their folders and files, and why they could not be written. Torch-free."""

from collections.abc import Mapping
from pathlib import Path

from converters.common.box import TensorInfo
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import EDITABLE, MANIFEST
from converters.containers.registry import replaceable
from converters.containers.target import Target
from converters.conversion.needs import needed_bytes
from converters.families.registry import get_family
from converters.formats.base import Contents, OutputOptions
from converters.formats.registry import get_format
from converters.model.model_info import ModelInfo
from converters.naming.foreign_view import foreign_view
from converters.store.local_files import names_in, stamp
from converters.store.location import locate
from converters.store.manifest import check_sizes, list_files
from converters.store.outputs import outputs_at
from converters.views.view import View
from trainer.config.sections import Checkpoint
from trainer.models.initial_weights import InitialWeights

EXPORT_FOLDERS: Mapping[str, str] = {"hf": "export-hf", "torchtune": "export-torchtune"}


def export_folders(dump_folder: Path, settings: Checkpoint) -> dict[str, Path]:
    """Format → folder."""
    wanted = {"hf": settings.last_save_in_hf, "torchtune": settings.last_save_in_torchtune}
    return {kind: dump_folder / EXPORT_FOLDERS[kind] for kind, is_wanted in wanted.items() if is_wanted}


def look_at_exports(folders: Mapping[str, Path], info: ModelInfo, *, dtype: str) -> tuple[int, list[str]]:
    """Their bytes, and the FQNs that they have no name for. Raises if one could not be written, but for room."""
    num_bytes, without_place = 0, list[str]()
    for kind, folder in folders.items():
        refuse_others(folder)
        target, view = plan_export(info, folder, kind, dtype=dtype)
        num_bytes += needed_bytes(target, list(info.assets.values()))
        without_place += view.ledger.dropped
    return num_bytes, without_place


def plan_export(info: ModelInfo, folder: Path, kind: str, *, dtype: str) -> tuple[Target, View]:
    """The files of an export, and the view with its names.

    Raises if the format does not support the model, or a needed file is missing.
    """
    output, options = get_format(kind), OutputOptions()
    family = get_family(info.family)
    naming = output.naming(family, options)
    assert naming is not None
    view = foreign_view(InitialWeights(info, seed=0), info, naming)  # for names and shapes
    tensors = {name: TensorInfo(dtype, tensor.shape) for name, tensor in view.tensors.items()}
    return output.plan(Contents(tensors, view, family, info, locate(folder)), options), view


def refuse_others(folder: Path) -> None:
    """Raise CheckpointError unless `folder` may be replaced: absent, empty, or an unchanged export of titan.

    Unchanged means that it has exactly the files of its manifest, and that its editable files are not newer than the
    manifest, which is written last.
    """
    outputs_at(locate(folder)).check(locate(folder), overwrite=True, marks=replaceable())
    if not names_in(folder):
        return
    problems = _not_titans(folder)
    if problems:
        raise CheckpointError(
            f"{folder} would be replaced by the export after the last step, but was changed since titan wrote it:"
            + list_offenders(problems),
            hint="nothing was changed",
            tries=[f"mv {folder} {folder}-kept", "--job.dump_folder OTHER_FOLDER"],
        )


def _not_titans(folder: Path) -> list[str]:
    """Why a folder is not an unchanged export of titan; [] if it is."""
    try:
        manifest = check_sizes(folder)
    except CheckpointError as error:  # without its hints, which do not apply here
        return [error.message]
    if manifest is None:
        return [f"it has no {MANIFEST}"]
    if manifest.accepted:
        return [f"it was changed after titan wrote it ({MANIFEST} was rewritten by titan verify --accept)"]
    (_, written, _), names = stamp(folder / MANIFEST), list_files(folder)
    added = [f"{name}: not written by titan" for name in names if name not in (*manifest.files, *EDITABLE)]
    edited = [name for name in names if name in EDITABLE and stamp(folder / name)[1] > written]
    return added + [f"{name}: edited" for name in edited]
