"""One of the fixed number of streams of a streamed text: its tokens in order, from any position."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from converters.common.errors import DataError

Encode = Callable[[str], list[int]]  # of a document, its begin and end token included


class FilesOfText(Protocol):
    """Documents in numbered files, each readable from any document on."""

    @property
    def name(self) -> str: ...
    @property
    def num_files(self) -> int: ...
    def texts(self, file: int, *, skip: int = 0) -> Iterator[str]: ...


class Position(NamedTuple):
    """The next token of a stream: file, document and offset, and the number of samples before it."""

    epoch: int = 0
    turn: int = 0  # of the stream's files in this epoch
    document: int = 0  # of that file
    token: int = 0  # of that document, begin and end tokens counted
    samples: int = 0


class VirtualStream:
    """Stream `number` of `count`: endless, every epoch with the files in another order.

    If there are enough files each stream has its own, else each reads all of them and takes every count-th document.
    """

    def __init__(self, text: FilesOfText, encode: Encode, number: int, count: int, *, seed: int, position: Position):
        self._text, self._encode, self._seed = text, encode, seed
        self._number, self._count = number, count
        self._pending: deque[tuple[Position, np.ndarray]] = deque()  # tokens that are left, and where they begin
        self._documents = self._read(position)
        self.position = position

    def open(self) -> None:
        """Fetch the first document. Far inside a file that takes seconds, so streams are opened side by side."""
        self._pending.append(next(self._documents))

    def take(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """The next seq_len tokens and the one after them, which stays; and the places where a document begins."""
        while sum(len(ids) for _, ids in self._pending) <= seq_len:
            self._pending.append(next(self._documents))
        window = np.concatenate([ids for _, ids in self._pending])[: seq_len + 1]
        ends = np.cumsum([len(ids) for _, ids in self._pending])
        num_left = seq_len
        while len(self._pending[0][1]) <= num_left:
            num_left -= len(self._pending.popleft()[1])
        start, ids = self._pending[0]
        if num_left:
            start = start._replace(token=start.token + num_left)
            self._pending[0] = start, ids[num_left:]
        self.position = start._replace(samples=self.position.samples + 1)
        return window, ends[ends <= seq_len]

    def _read(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Documents from a position on, each with the position of its first token here. Raises if there is none."""
        while True:
            is_whole_epoch, was_empty = start._replace(samples=0) == Position(epoch=start.epoch), True
            files = self._files(start.epoch)
            for turn in range(start.turn, len(files)):
                for position, ids in self._documents_of(files[turn], start._replace(turn=turn)):
                    was_empty = False
                    yield position, ids
                start = Position(epoch=start.epoch)
            if is_whole_epoch and was_empty:
                raise DataError(
                    f"{self._text.name}: stream {self._number} of {self._count} has no document",
                    hint="there are fewer documents than streams",
                    tries=["--training.dataset_streams FEWER", "titan data prepare FILES… --out data"],
                )
            start = Position(epoch=start.epoch + 1)

    def _documents_of(self, file: int, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        dealt = self._text.num_files < self._count
        for number, text in enumerate(self._text.texts(file, skip=start.document), start=start.document):
            if not text or (dealt and number % self._count != self._number):
                continue
            ids = np.array(self._encode(text), np.int64)
            first = start.token if number == start.document else 0
            if first < len(ids):
                yield start._replace(document=number, token=first), ids[first:]

    def _files(self, epoch: int) -> Sequence[int]:
        order = sorted(range(self._text.num_files), key=lambda file: _mixed(self._seed, epoch, file))
        return order if len(order) < self._count else order[self._number :: self._count]


def _mixed(seed: int, epoch: int, file: int) -> tuple[int, int]:
    return xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{file}".encode()), file
