"""Batches from a streamed text: the same global batches for any data-parallel degree that divides the streams.

The text is divided over a fixed number of streams, and these over ranks in blocks. Each index of the global batch has
its own streams, which belong to the rank that reads this index for any degree; of these the one that has given the
fewest samples comes next. The state is the position of every stream.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from converters.common.errors import DataError
from trainer.data.batch import TokenBatch, batch_of
from trainer.data.position import RESTART_DATA, STATE_VERSION, STREAMS, refuse_other_position
from trainer.data.sample import NO_DOCUMENTS, DocumentRules, window_sample
from trainer.data.virtual_stream import Encode, FilesOfText, Position, VirtualStream

_OPENED_AT_ONCE = 16


class StreamLoader:
    """One rank's batches [global_batch_size / dp_degree, seq_len]: endless, resumable with any batch size and seq_len.

    `on_each` does a piece of work on every rank and gives all of them all results, or the first error: all ranks begin
    together, and each position is known to its owner alone.
    """

    def __init__(
        self,
        text: FilesOfText,
        encode: Encode,
        *,
        fingerprint: str,
        num_streams: int,
        seq_len: int,
        global_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        seed: int,
        on_each: Callable[[Callable[[], Any]], list[Any]],
        pin_memory: bool = False,
        documents: DocumentRules = NO_DOCUMENTS,
    ):
        assert num_streams % dp_degree == global_batch_size % dp_degree == 0, (num_streams, global_batch_size)
        self._text, self._encode = text, encode
        self._fingerprint = f"{fingerprint}/{num_streams}{STREAMS}"
        self._num_streams, self._seed, self._seq_len = num_streams, seed, seq_len
        self._on_each, self._pin_memory, self._documents = on_each, pin_memory, documents
        num_groups = math.gcd(global_batch_size, num_streams)  # of places in a batch, each with streams of its own
        self._places_per_group = global_batch_size // num_groups
        per_group = num_streams // num_groups
        own_groups = range(dp_rank * num_groups // dp_degree, (dp_rank + 1) * num_groups // dp_degree)
        self._groups = [range(group * per_group, (group + 1) * per_group) for group in own_groups]
        self._positions = {number: Position() for group in self._groups for number in group}
        self._num_loads = 0

    def __iter__(self) -> Iterator[TokenBatch]:
        """Batches from the present position on; the next one is read in a background thread while one is in use.

        All ranks begin, or all raise what one of them met: none waits for a rank that has nothing to read.
        """
        with ThreadPoolExecutor(1, "data") as thread:
            while True:
                streams = {number: self._open(number, position) for number, position in self._positions.items()}
                num_loads, ahead = self._num_loads, thread.submit(self._begin, streams)
                self._on_each(partial(_wait_for, ahead))
                while num_loads == self._num_loads:  # else load_state_dict came in between
                    batch, self._positions = ahead.result()
                    ahead = thread.submit(self._read, streams)
                    yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, after the batches returned so far. Called by all ranks; equal on all."""
        known: dict[int, Position] = {}
        for own in self._on_each(lambda: self._positions):
            known |= own
        return {
            "version": STATE_VERSION,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "positions": [list(known[number]) for number in range(self._num_streams)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where loaders of any dp degree, batch size and seq_len stood. Raises DataError for other data."""
        expected = {"version": 0, "fingerprint": self._fingerprint, "seed": self._seed, "positions": []}
        refuse_other_position(state, expected)
        positions = state["positions"]
        if not _are_positions(positions, self._num_streams):
            raise DataError(f"the checkpoint's data position is damaged: {str(positions):.200}", tries=[RESTART_DATA])
        self._positions = {number: Position(*positions[number]) for number in self._positions}
        self._num_loads += 1

    def _open(self, number: int, position: Position) -> VirtualStream:
        return VirtualStream(self._text, self._encode, number, self._num_streams, seed=self._seed, position=position)

    def _begin(self, streams: Mapping[int, VirtualStream]) -> tuple[TokenBatch, dict[int, Position]]:
        with ThreadPoolExecutor(min(len(streams), _OPENED_AT_ONCE)) as threads:
            list(threads.map(VirtualStream.open, streams.values()))
        return self._read(streams)

    def _read(self, streams: Mapping[int, VirtualStream]) -> tuple[TokenBatch, dict[int, Position]]:
        """This rank's next batch, and the positions of its streams after it."""
        samples = []
        for group in self._groups:
            for _ in range(self._places_per_group):
                stream = min((streams[number] for number in group), key=lambda stream: stream.position.samples)
                samples.append(window_sample(*stream.take(self._seq_len), self._documents))
        positions = {number: stream.position for number, stream in streams.items()}
        return batch_of(samples, pin_memory=self._pin_memory), positions


def _wait_for(future: Future[Any]) -> None:
    future.result()


def _are_positions(positions: Any, count: int) -> bool:
    return (
        isinstance(positions, list | tuple)
        and len(positions) == count
        and all(
            isinstance(position, list | tuple)
            and len(position) == len(Position._fields)
            and all(type(number) is int and number >= 0 for number in position)
            for position in positions
        )
    )
