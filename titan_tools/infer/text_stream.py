"""The text of one sequence while its tokens arrive: only what no later token can change, up to a stop string."""

from collections.abc import Collection

from titan_tools.infer.vocabulary import Vocabulary


class TextStream:
    """`text` is what was said so far; after `finish` it is the whole."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Collection[int], stop_strings: tuple[str, ...] = ()):
        self.vocabulary, self.stop_ids, self.stop_strings = vocabulary, stop_ids, stop_strings
        self.text = ""
        self.stopped = False  # by a stop string
        self._tokens: list[int] = []

    def add(self, token: int) -> str:
        """Take the next token; the text that is sure now and was not before."""
        if token not in self.stop_ids:
            self._tokens.append(token)
        whole = self.vocabulary.decode(self._tokens)
        ends = [whole.index(stop) for stop in self.stop_strings if stop in whole]
        if ends:
            self.stopped = True
            return self._say(whole[: min(ends)])
        held = max((n for stop in self.stop_strings for n in range(len(stop)) if whole.endswith(stop[:n])), default=0)
        sure = whole[: len(whole) - held].rstrip("\ufffd")
        return self._say(sure)

    def finish(self) -> str:
        """No token follows: what was held back."""
        return "" if self.stopped else self._say(self.vocabulary.decode(self._tokens))

    def _say(self, text: str) -> str:
        said, self.text = self.text, max(text, self.text, key=len)
        return self.text[len(said) :]
