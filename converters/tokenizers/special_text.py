"""Find special tokens that are written in a text."""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


def special_tokens_in(text: str, names: frozenset[str]) -> list[str]:
    """The special tokens written in a text, in order; the longest if one begins with another."""
    return _pattern_of_names(names).findall(text) if names else []


def is_only_special(text: str, names: frozenset[str]) -> bool:
    """Whether a text consists of special tokens, with or without white space between them."""
    return bool(names) and not _pattern_of_names(names).sub("", text).strip() and bool(text.strip())


@lru_cache(maxsize=8)
def _pattern_of_names(names: frozenset[str]) -> re.Pattern[str]:
    """Matches any of the names."""
    return re.compile("|".join(map(re.escape, _longest_first(names))))


class SpecialText:
    """Finds what `special` of a tokenizer would read as special tokens. It changes nothing, so threads can share it."""

    def __init__(self, tokenizer: "Tokenizer"):
        special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._normalizer = tokenizer.normalizer if changes_text(tokenizer) else None
        normalized = [token for token in special if self._normalizer is not None and token.normalized]
        self._exact = _pattern((token, token.content) for token in special if token not in normalized)
        # these are looked for in normalized text, by their normalized contents
        spellings = {token.content: self._normalized(token.content) for token in normalized}
        self._in_normalized = _pattern((token, spellings[token.content]) for token in normalized)
        self._content_of = {spelling: content for content, spelling in spellings.items()}

    def find(self, text: str) -> frozenset[str]:
        """The special tokens that are written in a text."""
        found = set(self._exact.findall(text)) if self._exact else set()
        if self._in_normalized:
            found |= {self._content_of[name] for name in self._in_normalized.findall(self._normalized(text))}
        return frozenset(found)

    def _normalized(self, text: str) -> str:
        assert self._normalizer is not None
        normalized: str = self._normalizer.normalize_str(text)
        return normalized


def changes_text(tokenizer: "Tokenizer") -> bool:
    """Whether a tokenizer has a normalizer that may change a text."""
    normalizer = tokenizer.normalizer
    return normalizer is not None and json.loads(normalizer.__getstate__()) != {"type": "Sequence", "normalizers": []}


def _pattern(tokens: Iterable[tuple["AddedToken", str]]) -> re.Pattern[str] | None:
    by_text = {text: token for token, text in tokens if text}
    words = [
        rf"(?<!\w){re.escape(text)}(?!\w)" if by_text[text].single_word else re.escape(text)
        for text in _longest_first(by_text)
    ]
    return re.compile("|".join(words)) if words else None


def _longest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (-len(name), name))
