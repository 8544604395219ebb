"""Special tokens that are written in documents: they are text, which is reported, or tokens."""

from collections.abc import Callable, Mapping
from threading import Lock

from converters.tokenizers.tokenizer import Tokenizer

TRAIN_OPTION = "training.special_tokens = true"
_MOST = 3  # tokens that are named


def special_text_note(by_token: Mapping[str, int], option: str) -> str:
    """In how many documents special tokens are read as text, and the option that reads them as tokens; "" for none."""
    if not by_token:
        return ""
    first = sorted(by_token, key=lambda token: (-by_token[token], token))[:_MOST]
    documents = [f"{by_token[token]:,}" for token in first]
    documents[0] += " document" if by_token[first[0]] == 1 else " documents"
    named = ", ".join(f"{token} in {number}" for token, number in zip(first, documents, strict=True))
    more = f", and {len(by_token) - _MOST} more" if len(by_token) > _MOST else ""
    return f"special tokens written in documents are read as text: {named}{more}; {option} reads them as tokens"


def document_encoder(
    tokenizer: Tokenizer, *, special_tokens: bool, say: Callable[[str], None]
) -> Callable[[str], list[int]]:
    """A function from a document to its ids, begin and end included, which threads can share.

    It reports the first document in which a special token is read as text.
    """
    if special_tokens:
        return lambda text: tokenizer.encode(text, bos=True, eos=True, special=True)
    lock, is_said = Lock(), False

    def encode(text: str) -> list[int]:
        nonlocal is_said
        if not is_said and (names := tokenizer.special_in(text)):
            with lock:
                is_first, is_said = not is_said, True
            if is_first:
                what = f"a document holds {min(names)}: special tokens are read as text"
                say(f"{what}; {TRAIN_OPTION} reads them as tokens")
        return tokenizer.encode(text, bos=True, eos=True)

    return encode


def before_special_token(tokenizer: Tokenizer, text: str, cut: int) -> int:
    """The place to cut a text instead of within a special token: before it."""
    names = tokenizer.special_in(text)
    starts = (text.find(name, max(0, cut - len(name) + 1), cut + len(name) - 1) for name in names)
    return min((start for start in starts if start >= 0), default=cut)
