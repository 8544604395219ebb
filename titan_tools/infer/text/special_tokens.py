"""Special tokens that a text writes, found by their names: without the tokenizer, which takes far longer."""

import re
from functools import lru_cache


def written(text: str, names: frozenset[str]) -> list[str]:
    """The special tokens in a text, in their order; the longest where several begin alike."""
    return _pattern(names).findall(text) if names else []


def is_nothing_else(text: str, names: frozenset[str]) -> bool:
    """Whether a text is special tokens, with or without white space between them, and nothing else."""
    return bool(names) and not _pattern(names).sub("", text).strip() and bool(text.strip())


@lru_cache(maxsize=8)
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first)))
