"""Batches from a token index, the same global batches for any data-parallel degree, with a state of four values.

A sample is a window of seq_len + 1 tokens at a fixed place. The global order of samples is one endless row (each epoch
shuffled anew by Grain); a step takes the next global_batch_size of it, and each rank its slice of those. So a position
is one number, `consumed_samples`, that means the same for every layout and every batch size.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash

from converters.errors import DataError
from trainer.data.batch import Batch
from trainer.data.datasets import TokenSource

_STATE_VERSION = 1


class TokenLoader:
    """One rank's batches [global_batch_size / dp_degree, seq_len]. With a seed: shuffled, endless, resumable.

    With seed None, for validation: one pass of whole batches, the same with every `iter`, in a fixed order that mixes
    the documents, so that the first few batches stand for all.
    Raises DataError where the split is too small for one batch, or holds a token id that it says it does not.
    """

    def __init__(
        self,
        index: TokenSource,
        split: str,
        *,
        seq_len: int,
        global_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        seed: int | None,
    ):
        assert global_batch_size % dp_degree == 0, (global_batch_size, dp_degree)
        assert 0 <= dp_rank < dp_degree, (dp_rank, dp_degree)
        self._tokens = index.tokens(split)
        self._vocab_size = index.vocab_size
        self._fingerprint = f"{index.fingerprint}/{split}/{seq_len}"
        self._split, self._seq_len, self._seed = split, seq_len, seed
        self._global_batch_size = global_batch_size
        self._per_rank = global_batch_size // dp_degree
        self._first = dp_rank * self._per_rank
        self._consumed = 0
        self.num_samples = max(0, (len(self._tokens) - 1) // seq_len)
        self.num_batches = self.num_samples // global_batch_size  # whole ones, in one pass
        if self.num_batches == 0:
            raise DataError(
                f"the {split} part has {len(self._tokens)} tokens, which is {self.num_samples} samples of {seq_len}: "
                f"too few for one batch of {global_batch_size}",
                hint="prepare more text, or take a smaller batch or seq_len",
            )
        self._order = _shuffled(self.num_samples, seed or 0)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the present position on; the next one is read in a background thread while one is in use."""
        if self._seed is None:
            self._consumed = 0
        with ThreadPoolExecutor(1, "data") as thread:
            start = self._consumed
            ahead = thread.submit(self._read, start)
            while self._seed is not None or self._consumed < self.num_batches * self._global_batch_size:
                if start != self._consumed:  # load_state_dict came in between
                    start = self._consumed
                    ahead = thread.submit(self._read, start)
                batch = ahead.result()
                start += self._global_batch_size
                self._consumed = start
                ahead = thread.submit(self._read, start)
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data, counting every batch handed out; equal on all ranks."""
        return {
            "version": _STATE_VERSION,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "consumed_samples": self._consumed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of any dp degree and batch size stood. Raises DataError for other data or seed."""
        expected = self.state_dict()
        if set(state) != set(expected) or state["version"] != _STATE_VERSION:
            raise DataError(f"the checkpoint's data position is not one that this titan wrote: {dict(state)}")
        _refuse_other_data(str(state["fingerprint"]), self._fingerprint)
        if state["seed"] != self._seed:
            raise DataError(
                f"the run was begun with seed {state['seed']}, and is to be resumed with seed {self._seed}",
                hint="another seed is another order of the data: samples would be repeated or left out",
                tries=[f"--debug.seed {state['seed']}", "--checkpoint.exclude_from_loading dataloader"],
            )
        consumed = state["consumed_samples"]
        if type(consumed) is not int or consumed < 0:
            raise DataError(f"the checkpoint's data position is damaged: consumed_samples is {consumed!r}")
        self._consumed = consumed

    def _read(self, start: int) -> Batch | None:
        """This rank's slice of the global batch that starts at place `start` of the order; None past the end."""
        first = start + self._first
        if self._seed is None and start + self._global_batch_size > self.num_samples:
            return None
        windows = [self._window(self._order[place]) for place in range(first, first + self._per_rank)]
        ids = torch.from_numpy(np.stack(windows).astype(np.int64))
        return Batch(tokens=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())

    def _window(self, sample: int) -> np.ndarray:
        start = sample * self._seq_len
        window = self._tokens[start : start + self._seq_len + 1]
        largest = int(window.max())
        if largest >= self._vocab_size:
            place = start + int(window.argmax())
            raise DataError(
                f"token {place} of the {self._split} part has id {largest}, but the vocabulary has {self._vocab_size}"
            )
        return window


def _shuffled(num_samples: int, seed: int) -> Sequence[int]:
    """An endless order of the samples: every epoch a permutation of its own, any place of it found at once."""
    grain = _import_grain()
    folded = xxhash.xxh32_intdigest(seed.to_bytes(16, "little"))  # Grain takes 32 bits, and adds the epoch to them
    return grain.MapDataset.range(num_samples).shuffle(seed=folded).repeat()


def _import_grain():
    """Grain, without its warning that JAX's profiler is not there: nobody here waits for it."""
    import absl.logging  # noqa: F401  its logger must be made by absl itself before it is asked for by name

    logger = logging.getLogger("absl")

    def is_news(record: logging.LogRecord) -> bool:
        return "jax profiler" not in record.getMessage()

    logger.addFilter(is_news)
    try:
        import grain
    finally:
        logger.removeFilter(is_news)
    return grain


def _refuse_other_data(theirs: str, ours: str) -> None:
    if theirs == ours:
        return
    if theirs.rpartition("/")[0] == ours.rpartition("/")[0]:
        was, now = theirs.rpartition("/")[2], ours.rpartition("/")[2]
        raise DataError(
            f"the run was begun with seq_len {was}, and is to be resumed with {now}",
            hint="samples are cut by seq_len, so the position in the old samples says nothing about the new ones",
            tries=[f"--training.seq_len {was}", "--checkpoint.exclude_from_loading dataloader"],
        )
    raise DataError(
        f"the data is not that of the checkpoint: fingerprint {ours} now, {theirs} then",
        hint="the text, the tokenizer or the index changed; going on would repeat or leave out samples",
        tries=["--checkpoint.exclude_from_loading dataloader"],
    )
