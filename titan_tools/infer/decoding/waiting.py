"""What waits for a free row, and when it pays to let it begin: several prompts go through the model in one pass."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.text.prompts import Prompt

# New tokens of a pass above which others beside them save nothing: up to there a pass takes as long as reading weights.
_FULL_PASS_TOKENS = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True, slots=True)
class Item:
    """One sample of a prompt, of which about `num_new` tokens are to be computed before its first one is known."""

    prompt: Prompt
    sample: int
    num_new: int


class Waiting:
    """Samples of prompts in their order; no more of them are asked for than rows are free."""

    def __init__(self, prompts: Iterable[Prompt], samples: int, engine: Engine):
        self._engine = engine
        self._coming = self._items(prompts, samples)
        self._ahead: deque[Item] = deque()
        self._num_missed = 0  # tokens that free rows could have made while something waited

    def first(self) -> Item | None:
        return next(iter(self._look(1)), None)

    def pop(self) -> Item:
        return self._ahead.popleft()

    def pays(self, num_free: int) -> bool:
        """Whether something is to begin in one of the free rows now.

        A pass over few tokens takes about as long as a decode step of all rows. So who comes alone waits for others
        until its row has missed as many tokens as such a step makes: the wait costs no more than it may save.
        """
        ahead = self._look(num_free)
        if not ahead:
            return False
        enough = _FULL_PASS_TOKENS[self._engine.model.device.type]
        return (
            ahead[0].num_new == 0
            or num_free == self._engine.rows
            or self._num_missed >= self._engine.rows
            or sum(item.num_new for item in ahead) >= enough
        )

    def has_begun(self) -> None:
        """Once one has begun the others follow, as many as have a row."""
        self._num_missed = self._engine.rows

    def has_stepped(self, num_free: int) -> None:
        """All rows but `num_free` have got one more token."""
        self._num_missed = self._num_missed + num_free if self._look(num_free) else 0

    def _look(self, num: int) -> list[Item]:
        while len(self._ahead) < num and (item := next(self._coming, None)):
            self._ahead.append(item)
        return [item for _, item in zip(range(num), self._ahead, strict=False)]

    def _items(self, prompts: Iterable[Prompt], samples: int) -> Iterator[Item]:
        for prompt in prompts:
            num_new = len(prompt.tokens) - max(self._engine.num_held(prompt.tokens))
            for sample in range(samples):
                yield Item(prompt, sample, 0 if sample else num_new)
