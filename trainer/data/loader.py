"""Batches from token indexes: the same global batches for any data-parallel degree, with a state of four values.

Samples have one endless global order; a step takes the next global_batch_size of them, and each rank its slice of
these. So the position is one number, `consumed_samples`, independent of layout and batch size.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from converters.common.errors import DataError
from trainer.data.batch import TokenBatch, batch_of
from trainer.data.position import STATE_VERSION, refuse_other_position
from trainer.data.sample import NO_DOCUMENTS, DocumentRules
from trainer.data.samples import MixedSamples, SourceSamples, TokenSource, Weighted, refuse_too_few


class TokenLoader:
    """One rank's batches [global_batch_size / dp_degree, seq_len]. With a seed: shuffled, endless, resumable.

    With seed None, for validation: one pass of complete batches, the same for every `iter`, in a fixed order that mixes
    the documents, so that the first few batches are representative. A mixture is endless, so it needs a seed.
    Raises DataError if the split is too small for one batch, or has a token id beyond its vocabulary.
    """

    def __init__(
        self,
        source: TokenSource | Sequence[Weighted],
        split: str,
        *,
        seq_len: int,
        global_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        seed: int | None,
        pin_memory: bool = False,
        documents: DocumentRules = NO_DOCUMENTS,
    ):
        assert global_batch_size % dp_degree == 0, (global_batch_size, dp_degree)
        assert 0 <= dp_rank < dp_degree, (dp_rank, dp_degree)
        self._samples: MixedSamples | SourceSamples
        if isinstance(source, Sequence):
            assert seed is not None, "a mixture is endless"
            self._samples = MixedSamples(source, split, seq_len=seq_len, seed=seed, documents=documents)
        else:
            self._samples = SourceSamples(source, split, seq_len=seq_len, seed=seed or 0, documents=documents)
        self._seed, self._pin_memory = seed, pin_memory
        self._global_batch_size = global_batch_size
        self._per_rank = global_batch_size // dp_degree
        self._first = dp_rank * self._per_rank
        self._consumed = 0
        self.num_samples = self._samples.num_samples
        self.num_batches = self.num_samples // global_batch_size  # complete ones, in one pass
        refuse_too_few(self._samples, global_batch_size)
        self._samples.shuffle()

    def __iter__(self) -> Iterator[TokenBatch]:
        """Batches from the current position; the next one is read in a background thread."""
        if self._seed is None:
            self._consumed = 0
        with ThreadPoolExecutor(1, "data") as thread:
            start = self._consumed
            ahead = thread.submit(self._read, start)
            while self._seed is not None or self._consumed < self.num_batches * self._global_batch_size:
                if start != self._consumed:  # load_state_dict was called
                    start = self._consumed
                    ahead = thread.submit(self._read, start)
                batch = ahead.result()
                start += self._global_batch_size
                self._consumed = start
                ahead = thread.submit(self._read, start)
                assert batch is not None, "only the read after the last batch finds none"
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, after the batches returned so far; equal on all ranks."""
        return {
            "version": STATE_VERSION,
            "fingerprint": self._samples.fingerprint_of(self._samples.cut),
            "seed": self._seed,
            "consumed_samples": self._consumed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loader of any dp degree and batch size stood. Raises DataError for other data or seed."""
        refuse_other_position(state, self.state_dict(), self._samples)
        consumed = state["consumed_samples"]
        if type(consumed) is not int or consumed < 0:
            raise DataError(f"the checkpoint's data position is damaged: consumed_samples is {consumed!r}")
        self._consumed = consumed

    def _read(self, start: int) -> TokenBatch | None:
        """This rank's slice of the global batch that starts at place `start` of the order; None past the end."""
        first = start + self._first
        if self._seed is None and start + self._global_batch_size > self.num_samples:
            return None
        samples = [self._samples.at(place) for place in range(first, first + self._per_rank)]
        return batch_of(samples, pin_memory=self._pin_memory)
