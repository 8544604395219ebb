"""The text of one sequence while its tokens arrive: only what no later token can change, up to a stop string.

A token's text depends on its neighbours: a letter may take several tokens, and SentencePiece drops a space at the very
beginning. So a few tokens are decoded together with those before them, never the whole sequence.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile

from titan_tools.infer.text.vocabulary import Vocabulary

_LONGEST_PART = 3  # bytes of an unfinished letter, each at most one U+FFFD
_MOST_OPEN = 16  # tokens that are decoded together


class TextStream:
    """`text` is what was said so far; after `finish` it is the whole.

    That is what the vocabulary decodes from all tokens, special ones included, but for stop tokens; cut before the
    first stop string. Behind the tokens `after` (a prompt) it is what they make the decoded text longer by.
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
        self._said: list[str] = []
        self._unsaid = ""  # text of closed tokens that may turn out to be a stop string
        # Tokens are closed once nothing that follows can change their text. A few of those stay as context.
        self._context: list[int] = []
        self._context_length = 0  # letters
        self._open: list[int] = []
        self._open_said = 0  # letters of the open tokens' text
        num_bytes = sum(1 for _ in takewhile(vocabulary.byte_values.__contains__, reversed(after)))
        if not self._set_context(after[: len(after) - num_bytes]):
            self._context, self._context_length = list(after), len(vocabulary.decode(list(after)))

    @property
    def text(self) -> str:
        return "".join(self._said)

    def add(self, token: int) -> str:
        """Take the next token; the text that is sure now and was not before."""
        if self.stopped or token in self.stop_ids:
            return ""
        self._open.append(token)
        byte = self.vocabulary.byte_values.get(token)
        if byte is not None and byte not in self._stop_ends:
            return ""
        text = self._open_text()
        fresh = self._unsaid + text[self._open_said :]
        if byte is not None:  # a run is as a whole text or not, so none of it is sure; but it may have ended the answer
            return self._cut(fresh)
        num_unsure = 0 if self.vocabulary.byte_values else min(_trailing_replacements(text), _LONGEST_PART)
        sure = fresh[: len(fresh) - num_unsure]
        said = self._cut(sure)
        if self.stopped:
            return said
        said = self._say(sure[: len(sure) - self._num_held(sure)])
        self._open_said += max(len(said) - len(self._unsaid), 0)
        self._unsaid = self._unsaid[len(said) :]
        if num_unsure == 0:
            self._close(text)
        elif len(self._open) > _MOST_OPEN:
            self._close_first(text)
        return said

    def put(self, tokens: Sequence[int]) -> None:
        """Take tokens at once whose text nobody asks for before `finish`; there are no stop strings then."""
        self._open += [token for token in tokens if token not in self.stop_ids]

    def finish(self) -> str:
        """No token follows: what was held back."""
        if self.stopped:
            return ""
        fresh = self._unsaid + self._open_text()[self._open_said :]
        self._unsaid, self._context, self._context_length, self._open, self._open_said = "", [], 0, [], 0
        return self._cut(fresh) or ("" if self.stopped else self._say(fresh))

    def _open_text(self) -> str:
        return self.vocabulary.decode(self._context + self._open)[self._context_length :]

    def _cut(self, fresh: str) -> str:
        """Stop before the first stop string in `fresh`, if there is one."""
        ends = [fresh.index(stop) for stop in self.stop_strings if stop in fresh]
        self.stopped = bool(ends)
        return self._say(fresh[: min(ends)]) if ends else ""

    def _say(self, text: str) -> str:
        if text:
            self._said.append(text)
        return text

    def _num_held(self, text: str) -> int:
        """Letters at the end of `text` that a stop string may begin with."""
        return max(
            (n for stop in self.stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )

    def _close(self, text: str) -> None:
        """All open tokens, whose text is `text`, unless there is no text yet at all."""
        if self._context_length + len(text) and self._set_context(self._context + self._open):
            self._unsaid += text[self._open_said :]
            self._open, self._open_said = [], 0

    def _set_context(self, tokens: Sequence[int]) -> bool:
        """Take as few of the last closed tokens as make any text: without, what is special to a beginning would return.

        False where all of them are too few.
        """
        for start in reversed(range(len(tokens))):
            if length := len(self.vocabulary.decode(list(tokens[start:]))):
                self._context, self._context_length = list(tokens[start:]), length
                return True
        return False

    def _close_first(self, text: str) -> None:
        """The first half of the open tokens, in a long row of bytes that are no text.

        Enough of them follow to finish any letter, so if the text goes on from theirs now, it will.
        """
        decode, half = self.vocabulary.decode, len(self._open) // 2
        first, rest = self._context + self._open[:half], self._open[half:]
        closed = decode(first)[self._context_length :]
        context = first[-half:]
        length = len(decode(context))
        if closed + decode(context + rest)[length:] != text:
            return  # a letter lies across; another half will do
        self._context, self._context_length, self._open = context, length, rest
        self._unsaid += closed[self._open_said :]
        self._open_said = max(self._open_said - len(closed), 0)


def _trailing_replacements(text: str) -> int:
    return len(text) - len(text.rstrip("\ufffd"))
