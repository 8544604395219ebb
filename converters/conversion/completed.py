"""Complete a text model with what a multimodal checkpoint has beside it, for an export of a training run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from converters.common.box import Box, TensorInfo, TensorSource
from converters.common.errors import ConfigError, list_offenders
from converters.engine.journal import files_identity
from converters.families.args import other_numbers
from converters.families.registry import get_family
from converters.integrity.source_check import check_tensors
from converters.model.multimodal import count_extras, find_files, require_extras
from converters.naming.native_view import Reading
from converters.source.open import open_checkpoint
from converters.source.weights import NativeWeights, native_weights
from converters.store.base import open_store
from converters.store.location import Place, locate
from converters.views.expressions import Expression, Source


@dataclass(frozen=True, slots=True)
class _Joined:
    """The TensorSource of a text model with tensors of another checkpoint, whose names differ from all of its own."""

    source: TensorSource
    other: NativeWeights

    @property
    def identity(self) -> str:
        """Text that identifies the other checkpoint, to resume only the same work."""
        return files_identity(self.other.catalog)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {**self.source.tensors, **{name: self.other.tensors[name] for name in self.other.extras}}

    def read(self, fqn: str, box: Box) -> np.ndarray[Any, Any]:
        """The values of a box in the tensor's own dtype."""
        return self.source.read(fqn, box) if fqn in self.source.tensors else self.other.read(fqn, box)


@contextmanager
def completed(weights: NativeWeights, folder: Place | None) -> Iterator[NativeWeights]:
    """The text model `weights` with the tensors, files and fields that the multimodal checkpoint in `folder` has.

    Weights that have such tensors are complete, and without a folder they stay as they are. Raises ConfigError if
    the folder holds another model, or nothing beside its text model, and CheckpointError where its tensors are not
    those of its manifest.
    """
    if folder is None or weights.extras or get_family(weights.info.family).multimodal is None:
        yield weights
        return
    store, file = open_store(locate(folder))
    store.close()
    if file:  # of any kind, also the config.json that describes a model
        raise ConfigError(f"--keep-extra: --model-from {folder} is a file", hint="give the folder of the checkpoint")
    with native_weights(open_checkpoint(folder), Reading(keep_extra=True)) as other:
        problems = other_numbers(weights.info.args, other.info.args)
        if problems or other.info.family != weights.info.family:
            raise ConfigError(
                f"--keep-extra: --model-from {folder} is another model:"
                + list_offenders(problems or [other.info.family])
            )
        yield _joined(weights, other, folder)


def _joined(weights: NativeWeights, other: NativeWeights, folder: Place) -> NativeWeights:
    family = get_family(other.info.family)
    require_extras(family, other.info.outer, other.extras, where=folder)
    assert family.multimodal is not None
    view, extras = weights.source, other.extras
    check_tensors(other.reader, (name for fqn in extras for name in other.source.ledger.used[fqn]))
    expressions: dict[str, Expression] = {**view.expressions, **{name: Source(name) for name in extras}}
    view.ledger.used |= {name: (name,) for name in extras}
    tensors = {**view.tensors, **{name: other.tensors[name] for name in extras}}
    source = replace(view, source=_Joined(view.source, other), tensors=tensors, expressions=expressions)
    files = find_files(other.catalog.root, family.multimodal)
    note = f"{count_extras(extras, other.catalog.tensors)} are taken from {folder}"
    info = weights.info
    info = replace(info, outer=other.info.outer, assets={**info.assets, **files}, notes=(*info.notes, note))
    return replace(weights, source=source, info=info, extras=extras, other_readers=(other.reader,))
