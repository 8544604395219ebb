"""Export the last step's checkpoint for transformers or torchtune, as `titan convert` does."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from converters.common.errors import CheckpointError, list_offenders
from converters.common.fold import fold_texts
from converters.conversion.records import Request, Run
from converters.convert import convert
from converters.formats.registry import get_format
from converters.model.model_info import ModelInfo
from converters.store.local_files import exists
from converters.store.location import Location, locate
from converters.store.outputs import require_space
from trainer.checkpoints.export_plan import export_folders, look_at_exports, refuse_others
from trainer.config.sections import Checkpoint
from trainer.observability.log import note
from trainer.ranks.agree import on_each, on_first


class Exports:
    """The exports that a config requests. All ranks make the same calls; rank 0 works, the others wait."""

    def __init__(self, dump_folder: Path, settings: Checkpoint, info: ModelInfo, *, group: dist.ProcessGroup):
        self._folders = export_folders(dump_folder, settings)
        self._dtype, self._info, self._group = settings.export_dtype, info, group

    def get_ready(self, buffers: Mapping[str, Tensor], *, beside_bytes: int = 0) -> None:
        """Raise now what exporting would raise after the last step: no tokenizer, no room, an existing folder.

        `buffers`: those of this rank, loaded; if an export has no name for one, it must be zero. `beside_bytes` is
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
        num_bytes, without_place = look_at_exports(self._folders, self._info, dtype=self._dtype)
        for folder in self._folders.values():
            require_space(locate(folder), num_bytes + beside_bytes)
        return without_place

    def make(self, checkpoint: Location, *, is_new: bool) -> None:
        """Write the exports of a committed checkpoint, each atomically.

        `is_new` says that this run has trained, so existing exports are replaced; otherwise they stay.
        """
        for kind, folder in self._folders.items():
            on_first(self._group, partial(self._make, checkpoint, folder, kind, is_new=is_new))

    def _make(self, checkpoint: Location, folder: Path, kind: str, *, is_new: bool) -> None:
        if exists(folder) and not is_new:
            note(f"{folder} exists already")
            return
        refuse_others(folder)
        report = convert(Request(checkpoint, folder, get_format(kind), dtype=self._dtype), Run(overwrite=True))
        note(f"exported {checkpoint.name} to {folder}: {report.num_tensors} tensors of {', '.join(report.dtypes)}")
        for remark in report.remarks:
            note(f"  {remark}")
