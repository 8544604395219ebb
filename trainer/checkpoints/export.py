"""Export the last step's checkpoint for transformers or torchtune, as `titan convert` does."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from converters.catalog import TensorInfo
from converters.commit import check_destination, require_space
from converters.containers.target import Target
from converters.convert import convert
from converters.errors import CheckpointError, list_offenders
from converters.families.registry import get_family
from converters.fold import fold_texts
from converters.foreign_view import foreign_view
from converters.formats.base import Contents, OutputOptions
from converters.formats.registry import get_format
from converters.manifest import check_sizes, list_files
from converters.model_info import ModelInfo
from converters.names import EDITABLE, MANIFEST
from converters.needs import needed_bytes
from converters.view import View
from trainer.agree import on_each, on_first
from trainer.config.sections import Checkpoint
from trainer.models.initial_weights import InitialWeights
from trainer.observability.log import note

EXPORT_FOLDERS: Mapping[str, str] = {"hf": "export-hf", "torchtune": "export-torchtune"}


class Exports:
    """The exports that a config requests. All ranks make the same calls; rank 0 works, the others wait."""

    def __init__(self, dump_folder: Path, settings: Checkpoint, info: ModelInfo, *, group: dist.ProcessGroup):
        wanted = {"hf": settings.last_save_in_hf, "torchtune": settings.last_save_in_torchtune}
        self._folders = {kind: dump_folder / EXPORT_FOLDERS[kind] for kind, is_wanted in wanted.items() if is_wanted}
        self._dtype, self._info, self._group = settings.export_dtype, info, group

    def get_ready(self, buffers: Mapping[str, Tensor], *, beside_bytes: int = 0) -> None:
        """Raise now what exporting would raise after the last step: no tokenizer, no room, an existing folder.

        `buffers`: those of this rank, loaded; where an export has no name for one, it must be zero. `beside_bytes` is
        other space that the same disk must have.
        """
        without_place = on_first(self._group, lambda: self._look(beside_bytes))
        lost = on_each(self._group, lambda: [fqn for fqn in without_place if fqn in buffers and buffers[fqn].any()])
        if names := sorted({fqn for of_rank in lost for fqn in of_rank}):
            raise CheckpointError(
                "checkpoint.last_save_in_hf: Hugging Face's models have no place for these, and they are not zero:"
                + list_offenders(fold_texts(names)),
                hint="after the run, titan convert dcp-to-hf --drop-expert-bias exports it without them",
                tries=["--checkpoint.no_last_save_in_hf"],
            )

    def _look(self, beside_bytes: int) -> list[str]:
        """Raises what needs no weights, and returns the FQNs that an export has no name for: they must be zero."""
        num_bytes, without_place = beside_bytes, list[str]()
        for kind, folder in self._folders.items():
            refuse_others(folder)
            target, view = plan_export(self._info, folder, kind, dtype=self._dtype)
            num_bytes += needed_bytes(target, list(self._info.assets.values()))
            without_place += view.ledger.dropped
        for folder in self._folders.values():
            require_space(folder, num_bytes)
        return without_place

    def make(self, checkpoint: Path, *, is_new: bool) -> None:
        """Write the exports of a committed checkpoint, each atomically.

        `is_new` says that this run has trained, so existing exports are replaced; otherwise they stay.
        """
        for kind, folder in self._folders.items():
            on_first(self._group, partial(self._make, checkpoint, folder, kind, is_new=is_new))

    def _make(self, checkpoint: Path, folder: Path, kind: str, *, is_new: bool) -> None:
        if folder.exists() and not is_new:
            note(f"{folder} exists already")
            return
        refuse_others(folder)
        report = convert(checkpoint, folder, to=kind, dtype=self._dtype, overwrite=True)
        note(f"exported {checkpoint.name} to {folder}: {report.num_tensors} tensors of {', '.join(report.dtypes)}")
        for remark in report.remarks:
            note(f"  {remark}")


def plan_export(info: ModelInfo, folder: Path, kind: str, *, dtype: str) -> tuple[Target, View]:
    """The files of an export, and the view with its names.

    Raises where the format does not support the model, or a needed file is missing.
    """
    output, options = get_format(kind), OutputOptions()
    family = get_family(info.family)
    naming = output.naming(family, options)
    assert naming is not None
    view = foreign_view(InitialWeights(info, seed=0), info, naming)  # for names and shapes
    tensors = {name: TensorInfo(dtype, tensor.shape) for name, tensor in view.tensors.items()}
    return output.plan(Contents(tensors, view, family, info, folder), options), view


def refuse_others(folder: Path) -> None:
    """Raise CheckpointError unless `folder` may be replaced: absent, empty, or an unchanged export of titan.

    Unchanged means that it has exactly the files of its manifest, and that its editable files are not newer than the
    manifest, which is written last.
    """
    check_destination(folder, overwrite=True)
    if not folder.exists() or not any(folder.iterdir()):
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
    """Why a folder is not an unchanged export of titan; [] where it is."""
    try:
        manifest = check_sizes(folder)
    except CheckpointError as error:  # without its hints, which do not apply here
        return [error.message]
    if manifest is None:
        return [f"it has no {MANIFEST}"]
    if manifest.accepted:
        return [f"it was changed after titan wrote it ({MANIFEST} was rewritten by titan verify --accept)"]
    written, names = (folder / MANIFEST).stat().st_mtime_ns, list_files(folder)
    added = [f"{name}: not written by titan" for name in names if name not in (*manifest.files, *EDITABLE)]
    edited = [name for name in names if name in EDITABLE and (folder / name).stat().st_mtime_ns > written]
    return added + [f"{name}: edited" for name in edited]
