"""Incremental decoding of one sequence: text is emitted once no later token can change it, up to a stop string.

A token's text depends on its neighbors: a character may take several tokens, and SentencePiece drops a space at the
beginning. So a few tokens are decoded together with those before them, never the whole sequence.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile

from titan_tools.infer.text.vocabulary import Vocabulary

_LONGEST_PART = 3  # bytes of an incomplete character, each at most one U+FFFD
_MOST_OPEN = 16  # tokens that are decoded together


class TextStream:
    """`text` is the text so far; after `finish` it is complete.

    It is the decoded text of all tokens, special ones included, but for stop tokens; cut before the first stop string.
    After the tokens `after` (a prompt) it is what the new tokens add to the decoded text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_ids: Collection[int],
        stop_strings: tuple[str, ...] = (),
        *,
        after: Sequence[int] = (),
    ):
        self.vocabulary, self.stop_ids, self.stop_strings = vocabulary, stop_ids, stop_strings
        self.stopped = False  # by a stop string
        self._stop_ends = {stop.encode("utf-8", "surrogatepass")[-1] for stop in stop_strings}
        self._emitted: list[str] = []
        self._held_back = ""  # text of closed tokens that may begin a stop string
        # Tokens are closed once no later token can change their text; a few of them stay as context
        self._context: list[int] = []
        self._context_length = 0  # characters
        self._open: list[int] = []
        self._open_emitted = 0  # characters of the open tokens' text
        num_bytes = sum(1 for _ in takewhile(vocabulary.byte_values.__contains__, reversed(after)))
        if not self._set_context(after[: len(after) - num_bytes]):
            self._context, self._context_length = list(after), len(vocabulary.decode(list(after)))

    @property
    def text(self) -> str:
        return "".join(self._emitted)

    def add(self, token: int) -> str:
        """Add the next token; the text that has become final."""
        if self.stopped or token in self.stop_ids:
            return ""
        self._open.append(token)
        byte = self.vocabulary.byte_values.get(token)
        if byte is not None and byte not in self._stop_ends:
            return ""
        text = self._open_text()
        fresh = self._held_back + text[self._open_emitted :]
        if byte is not None:  # a run of byte tokens is text or not as a whole; but it may complete a stop string
            return self._cut(fresh)
        num_open_chars = 0 if self.vocabulary.byte_values else min(_trailing_replacements(text), _LONGEST_PART)
        final = fresh[: len(fresh) - num_open_chars]
        emitted = self._cut(final)
        if self.stopped:
            return emitted
        emitted = self._emit(final[: len(final) - self._num_held(final)])
        self._open_emitted += max(len(emitted) - len(self._held_back), 0)
        self._held_back = self._held_back[len(emitted) :]
        if num_open_chars == 0:
            self._close(text)
        elif len(self._open) > _MOST_OPEN:
            self._close_first(text)
        return emitted

    def put(self, tokens: Sequence[int]) -> None:
        """Add all tokens at once, whose text `finish` returns; without stop strings."""
        self._open += [token for token in tokens if token not in self.stop_ids]

    def finish(self) -> str:
        """The rest of the text, once no token follows."""
        if self.stopped:
            return ""
        fresh = self._held_back + self._open_text()[self._open_emitted :]
        self._held_back, self._context, self._context_length, self._open, self._open_emitted = "", [], 0, [], 0
        return self._cut(fresh) or ("" if self.stopped else self._emit(fresh))

    def _open_text(self) -> str:
        return self.vocabulary.decode(self._context + self._open)[self._context_length :]

    def _cut(self, fresh: str) -> str:
        """Stop before the first stop string in `fresh`, if there is one."""
        ends = [fresh.index(stop) for stop in self.stop_strings if stop in fresh]
        self.stopped = bool(ends)
        return self._emit(fresh[: min(ends)]) if ends else ""

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text

    def _num_held(self, text: str) -> int:
        """Number of characters at the end of `text` that may begin a stop string."""
        return max(
            (n for stop in self.stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )

    def _close(self, text: str) -> None:
        """Close all open tokens, whose text is `text`, unless there is no text at all yet."""
        if self._context_length + len(text) and self._set_context(self._context + self._open):
            self._held_back += text[self._open_emitted :]
            self._open, self._open_emitted = [], 0

    def _set_context(self, tokens: Sequence[int]) -> bool:
        """Keep as few of the last closed tokens as decode to any text, so that no token is decoded as the first one.

        False if all of them decode to nothing.
        """
        for start in reversed(range(len(tokens))):
            if length := len(self.vocabulary.decode(list(tokens[start:]))):
                self._context, self._context_length = list(tokens[start:]), length
                return True
        return False

    def _close_first(self, text: str) -> None:
        """Close the first half of the open tokens, in a long row of bytes that are not valid text.

        Enough tokens follow them to complete any character, so their text does not change any more.
        """
        decode, half = self.vocabulary.decode, len(self._open) // 2
        first, rest = self._context + self._open[:half], self._open[half:]
        closed = decode(first)[self._context_length :]
        context = first[-half:]
        length = len(decode(context))
        if closed + decode(context + rest)[length:] != text:
            return  # a character spans both halves; try again with the next token
        self._context, self._context_length, self._open = context, length, rest
        self._held_back += closed[self._open_emitted :]
        self._open_emitted = max(self._open_emitted - len(closed), 0)


def _trailing_replacements(text: str) -> int:
    return len(text) - len(text.rstrip("\ufffd"))
