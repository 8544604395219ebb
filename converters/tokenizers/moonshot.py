"""Moonshot's tiktoken.model (Kimi K2, Moonlight): how it splits text, and the ids of its special tokens.

The file has ranks alone, as Meta's tokenizer.model. All else is in a Python class beside it, the same in all of these
models, which titan knows by its name and does not run.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from converters.common.errors import CheckpointError, UnsupportedError
from converters.common.names import MOONSHOT_RANKS, TOKENIZER_CONFIG, TOKENIZER_JSON
from converters.store.json_file import read_json

_CLASS = re.compile(r"(.*--)?tokenization_(kimi|moonshot)\.TikTokenTokenizer")
# Letters that begin a word, and those that follow. Han characters are in words of their own: && is the intersection of
# two sets, in tiktoken's regex engine and in Oniguruma
_FIRST, _NEXT = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# GPT-4o's (o200k_base), but for the Han characters, and no slash after punctuation
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_FIRST}*{_NEXT}+{_AFTER}",
        f"{_BEFORE}{_FIRST}+{_NEXT}*{_AFTER}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_NUM_SPECIAL = 256
_MOST_AT_ONCE, _LONGEST_RUN = 400_000, 25_000  # characters; of white space, or of others
_LONG_RUN = re.compile(rf"\s{{{_LONGEST_RUN}}}(?=\s)|\S{{{_LONGEST_RUN}}}(?=\S)")


def special_tokens(assets: Mapping[str, Path], num_ranks: int) -> dict[str, int]:
    """The ids of the special tokens, which follow the ranks; tokenizer_config.json names some of the 256.

    Raises UnsupportedError if the tokenizer is of another class.
    """
    path = assets[MOONSHOT_RANKS]
    config = read_json(assets[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in assets else {}
    mapped = config.get("auto_map")
    named = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else None
    cls = next((name for name in named if name), None) if isinstance(named, list) else named
    if not isinstance(cls, str) or not _CLASS.fullmatch(cls):
        raise UnsupportedError(
            f"{path}: the class that says how to split text is not one of Moonshot's (tokenization_kimi,"
            f" tokenization_moonshot): {TOKENIZER_CONFIG} names {cls!r} in auto_map",
            hint=f"titan runs no code of a model; a {TOKENIZER_JSON} of the same ids in the folder is read instead",
        )
    try:
        declared = {int(id): str(token["content"]) for id, token in (config.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{TOKENIZER_CONFIG}: no readable added_tokens_decoder"
        raise CheckpointError(f"{what} ({type(error).__name__}: {error})") from None
    ids = range(num_ranks, num_ranks + _NUM_SPECIAL)
    if odd := [f"{text!r} {id}" for id, text in declared.items() if id not in ids]:
        raise CheckpointError(
            f"{assets[TOKENIZER_CONFIG]}: added_tokens_decoder has ids beside the {_NUM_SPECIAL} after the"
            f" {num_ranks:,} ranks of {MOONSHOT_RANKS}: {', '.join(odd[:5])}",
            hint="is one of the two files of another model?",
        )
    return {declared.get(id, f"<|reserved_token_{id}|>"): id for id in ids}


def parts_of(text: str) -> Iterator[str]:
    """The pieces that are encoded by themselves: Moonshot's class cuts what tiktoken's regex engine cannot take."""
    for start in range(0, len(text), _MOST_AT_ONCE):
        piece = text[start : start + _MOST_AT_ONCE]
        begin = 0
        for run in _LONG_RUN.finditer(piece):
            yield piece[begin : run.end()]
            begin = run.end()
        yield piece[begin:]
