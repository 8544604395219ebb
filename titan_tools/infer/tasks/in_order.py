"""Values that are made in any order, given out in the order of their keys."""

from collections.abc import Iterator, Sequence
from typing import Any

from titan_tools.infer.tasks.results_lines import Key


class InOrder:
    """Takes values in any order and gives them out in that of `keys`, each as soon as those before it are there."""

    def __init__(self, keys: Sequence[Key]):
        self._keys, self._held, self._next = keys, {}, 0

    def put(self, key: Key, value: Any) -> Iterator[Any]:
        """Take a value; all that may leave now."""
        self._held[key] = value
        while self._next < len(self._keys) and self._keys[self._next] in self._held:
            yield self._held.pop(self._keys[self._next])
            self._next += 1
