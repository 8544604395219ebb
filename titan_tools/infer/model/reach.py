"""Which tokens a layer attends to, and where its cache has their keys."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from converters.families.blocks import GroupedQuery, Latent

MOST_MARKS = 2  # copies of a row's windows, from which it can be continued: see KVCache


@dataclass(frozen=True, slots=True)
class Reach:
    """A row's `size` slots of a layer's cache: the key of position p is in slot p % size.

    With a window a query sees the last `size` tokens, else those of its chunk of `size` tokens: a layer that attends to
    all tokens has one chunk, as long as the row. In both a new token sees the first slots, up to `last_slot`; their
    order does not matter, since keys are rotated already.
    """

    size: int
    is_window: bool = False

    def last_slot(self, positions: Tensor) -> Tensor:
        """The last slot that the tokens at `positions` see, once their own keys are there."""
        return positions.clamp(max=self.size - 1) if self.is_window else positions % self.size

    def num_seen(self, position: int) -> int:
        """Tokens that the one at `position` sees, itself included."""
        return min(position + 1, self.size) if self.is_window else position % self.size + 1

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Split positions `start` to `end` - 1 at the ends of chunks: the first position seen, the first, the end."""
        if self.is_window:
            yield max(0, start - self.size + 1), start, end
            return
        while start < end:
            first = start - start % self.size
            yield first, start, min(end, first + self.size)
            start = first + self.size

    def holds(self, num: int, *, written: int) -> bool:
        """Whether what token `num` sees before itself is there, after the first `written` positions were written."""
        if self.is_window:
            return written <= max(self.size, num + 1)
        first = num - num % self.size
        return num == first or written <= first + self.size

    def chunk_start(self, num: int) -> int:
        """The last position up to `num` where nothing before it is seen."""
        return 0 if self.is_window else num - num % self.size


def reach_of(attention: Latent | GroupedQuery, room: int) -> Reach:
    """The reach of a layer in rows of `room` tokens."""
    if isinstance(attention, GroupedQuery):
        if attention.window is not None and attention.window < room:
            return Reach(attention.window, is_window=True)
        if attention.chunk is not None and attention.chunk < room:
            return Reach(attention.chunk)
    return Reach(room)
