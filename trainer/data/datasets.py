"""The kinds of data that `training.dataset` and `validation.dataset` can name."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from converters.errors import DataError, UnsupportedError
from trainer.data.index import open_index


class TokenSource(Protocol):
    """Token ids in one long row per split (`train`, `held_out`), random access; `fingerprint` changes when any does."""

    fingerprint: str
    vocab_size: int  # every id is below it
    unigram_entropy: float | None  # of the held-out ids, nats per token; None where nobody measured it

    def tokens(self, split: str) -> np.ndarray: ...


_OPENERS: dict[str, Callable[[str], TokenSource]] = {"tokens": open_index}


def register_dataset(name: str, open_source: Callable[[str], TokenSource]) -> None:
    """Make a kind of data known under its name; for a module named in `experimental.custom_import`."""
    _OPENERS[name] = open_source


def open_dataset(name: str, path: str | None, *, vocab_size: int) -> TokenSource:
    """Open the data of a `dataset` and `dataset_path` pair for a model with `vocab_size` embedding rows."""
    if name not in _OPENERS:
        raise UnsupportedError(
            f"dataset = {name!r}: data of this kind is not covered; there is {', '.join(_OPENERS)}",
            hint="C4's .json.gz files, .jsonl and .txt are read by `titan data prepare`",
            tries=['titan data prepare FILES… --out data, then dataset = "tokens" and dataset_path = "data"'],
        )
    if not path:
        raise DataError(f"dataset = {name!r} needs dataset_path", tries=["--training.dataset_path data"])
    source = _OPENERS[name](path)
    if source.vocab_size > vocab_size:
        raise DataError(
            f"{path}: token ids go up to {source.vocab_size - 1}, but the model has {vocab_size} embedding rows",
            hint="prepare the data with a vocabulary that fits, or train a larger flavor",
            tries=[f"titan data prepare … --vocab-size {vocab_size}"],
        )
    return source
