"""Which layers of a stage are captured, and which of them the others copy. Indices count from a stage's first layer."""

from dataclasses import dataclass

# Layers that may differ from those in the middle: at either end the embedding or the loss is their neighbour.
_NUM_HEAD = _NUM_TAIL = 1


@dataclass(frozen=True, slots=True)
class Depth:
    """The layers of one stage: their numbers in the captured model and in the wanted one.

    Every `period` layers repeat; captured and wanted ones start and end at the same point of a period.
    """

    captured: range
    wanted: range
    period: int = 1
    is_whole: bool = False  # each layer is its own template

    @property
    def surplus(self) -> int:
        """How many layers are to be added."""
        return len(self.wanted) - len(self.captured)

    @property
    def _tail(self) -> int:
        """Where the layers begin that are like none in the middle."""
        return len(self.captured) - _NUM_TAIL - (len(self.captured) - _NUM_HEAD - _NUM_TAIL) % self.period

    def template(self, index: int) -> int:
        """The captured layer that a wanted one copies."""
        if index < _NUM_HEAD or self.is_whole:
            return index
        if index >= self._tail + self.surplus:
            return index - self.surplus
        return _NUM_HEAD + (index - _NUM_HEAD) % self.period

    def spans(self, first: int, last: int) -> bool:
        """Whether captured layers from `first` to `last` stand for all, those at the very ends apart."""
        return self.is_whole or first <= _NUM_HEAD and last >= self._tail - 1

    def anchored(self, index: int) -> int | None:
        """The wanted layer that a captured one at an end, or next to it, is. None: it is in the middle."""
        if index <= _NUM_HEAD or self.is_whole:
            return index
        return index + self.surplus if index >= self._tail - 1 else None


def captured_layers(num_layers: int, period: int = 1) -> int:
    """How many layers stand for `num_layers`: both ends and two periods, the number that agrees modulo the period."""
    fewest = _NUM_HEAD + 2 * period + _NUM_TAIL
    return min(num_layers, fewest + (num_layers - fewest) % period)
