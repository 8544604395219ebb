"""Best-fit packing of documents into samples, planned for a whole split, so that every pack can be read by its number.

Best fit decreasing: pieces of documents from the longest to the shortest, each into the pack with the least room that
is enough for it (arXiv 2404.10830). Pieces of one length are alike, so packs of equal lengths are planned together: the
time depends on seq_len, not on the number of documents. Grain's BestFitPackIterDataset packs a stream: its packs depend
on what came before, hence on the rank, and its position is not a number.
"""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from converters.common.errors import DataError


class BestFit:
    """The packs of a split. A document of n tokens fills n - 1 places: its last token is only a target."""

    def __init__(self, offsets: np.ndarray, seq_len: int):
        """`offsets` int64 [documents + 1]. Of a document of more than seq_len places, what fills no pack is packed."""
        places = np.maximum(np.diff(offsets) - 1, 0)
        num_whole, rests = np.divmod(places, seq_len)
        self._offsets, self._seq_len, self._num_whole = offsets, seq_len, num_whole
        self._long = np.flatnonzero(num_whole)
        self._whole_before = np.concatenate(([0], num_whole[self._long].cumsum()))  # packs that one document fills
        counts = np.bincount(rests, minlength=seq_len)
        counts[0] = 0
        by_length = np.argsort(rests, kind="stable")
        self._by_length = by_length[len(by_length) - counts.sum() :]  # documents with a rest, shortest first
        self._groups = best_fit_decreasing(counts.tolist(), seq_len)
        self._packs_before = np.concatenate(([0], np.cumsum([number for number, _ in self._groups], dtype=np.int64)))
        self._first = self._first_documents(counts)

    def __len__(self) -> int:
        return int(self._whole_before[-1] + self._packs_before[-1])

    def pieces(self, pack: int) -> list[tuple[int, int]]:
        """Ranges of the split's tokens, one for each document of a pack; the last token of each is only a target."""
        if pack < self._whole_before[-1]:
            row = int(np.searchsorted(self._whole_before, pack, "right")) - 1
            start = int(self._offsets[self._long[row]]) + (pack - int(self._whole_before[row])) * self._seq_len
            return [(start, start + self._seq_len + 1)]
        pack -= int(self._whole_before[-1])
        group = int(np.searchsorted(self._packs_before, pack, "right")) - 1
        in_group = pack - int(self._packs_before[group])
        return [self._rest(self._by_length[first + in_group]) for first in self._first[group]]

    def _rest(self, document: int) -> tuple[int, int]:
        start = int(self._offsets[document]) + int(self._num_whole[document]) * self._seq_len
        return start, int(self._offsets[document + 1])

    def _first_documents(self, counts: np.ndarray) -> list[list[int]]:
        """For each group and each piece of its packs, where the documents of the group's packs begin in _by_length."""
        following = np.concatenate(([0], counts.cumsum()))[:-1].tolist()  # the next document of each length
        first: list[list[int]] = []
        for number, lengths in self._groups:
            first.append([])
            for length in lengths:
                first[-1].append(following[length])
                following[length] += number
        return first


def best_fit_decreasing(counts: list[int], size: int) -> list[tuple[int, list[int]]]:
    """Packs of `counts[n]` pieces of each length n ≤ size: (number of packs, the lengths in each of them)."""
    with_room: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)  # groups of open packs by their room
    rooms: list[int] = []  # in rising order

    def open_with(room: int, number: int, lengths: list[int]) -> None:
        if number and not with_room[room]:
            insort(rooms, room)
        if number:
            with_room[room].append((number, lengths))

    for length in range(min(size, len(counts) - 1), 0, -1):
        num_left = counts[length]
        while num_left:
            at = bisect_left(rooms, length)
            if at == len(rooms):  # new packs, each filled before the next
                room, number, lengths = size, num_left, list[int]()
            else:
                room = rooms[at]
                number, lengths = with_room[room].pop()
                if not with_room[room]:
                    del rooms[at]
            most = room // length  # after a piece, its pack is the one with the least room that is enough
            filled = min(number, num_left // most)
            open_with(room - most * length, filled, lengths + [length] * most)
            num_left -= filled * most
            if num_left and filled < number:
                open_with(room - num_left * length, 1, lengths + [length] * num_left)
                filled, num_left = filled + 1, 0
            if room != size:
                open_with(room, number - filled, lengths)
    return [group for room in sorted(with_room) for group in with_room[room]]


def refuse_wrong_offsets(offsets: np.ndarray, num_tokens: int) -> None:
    """Raise DataError unless documents cover the tokens in order."""
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) < 0).any():
        raise DataError(
            f"the document offsets of the data do not cover its tokens: they must rise from 0 to {num_tokens}"
        )
