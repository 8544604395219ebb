"""Make a tokenizer.model (tiktoken ranks) of a byte-level tokenizer.json, if one gives the same ids.

A tokenizer.model has only ranks. How text is split and what the special tokens are is part of Meta's code, so a
tokenizer.json that does either differently has no tokenizer.model.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, UnsupportedError, list_offenders
from converters.store.local_files import is_file, stamp, write_text
from converters.tokenizers.tiktoken_model import BYTE_LETTERS, LLAMA3_PATTERN, pattern_of, special_tokens_after
from converters.tokenizers.tokenizer_json import read_tokenizer_json

_BYTE_OF = {letter: byte for byte, letter in BYTE_LETTERS.items()}
_RESERVED = "reserved_special_token_"
_OFF = {
    "dropout": (None, 0, 0.0),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
}


def ranks_of_tokenizer_json(path: Path, *, vocab_size: int | None) -> Mapping[bytes, int]:
    """Token bytes → rank, in order. Raises UnsupportedError with every reason why tiktoken would give other ids.

    `vocab_size`: rows of the model's embedding, which Meta's code fills with special tokens; None for a reader with a
    list of special tokens.
    """
    return _translate(path, vocab_size, stamp(path) if is_file(path) else None)


@lru_cache(maxsize=1)  # seconds for 128,000 tokens, and a conversion needs it for planning and for writing
def _translate(path: Path, vocab_size: int | None, stamp: tuple[int, ...] | None) -> Mapping[bytes, int]:
    content, merges = read_tokenizer_json(path)
    try:
        problems = split_differences(content)
        if not problems:
            ranks, problems = _ranks(content)
            if vocab_size is not None:
                problems += special_token_differences(content["added_tokens"], len(ranks), vocab_size=vocab_size)
        if not problems:
            problems = merge_differences(merges, ranks, whole=bool(content["model"].get("ignore_merges")))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is not a tokenizer.json: {type(error).__name__}: {error}") from None
    if problems:
        raise UnsupportedError(f"{path}: no tokenizer.model gives its ids:" + list_offenders(problems, most=5))
    return ranks


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Write a tokenizer.model: a line of base64 and rank for each token."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    write_text(path, "".join(lines))


def split_differences(content: Mapping[str, Any]) -> list[str]:
    """Differences from how Llama 3 splits text before merging; or 4, which is recognised by its number of tokens."""
    model, normalizer, pre_tokenizer = content["model"], content.get("normalizer"), content.get("pre_tokenizer")
    if model["type"] != "BPE":
        return [f"its model is {model['type']}, not BPE"]
    problems = [f"{key} = {model[key]!r}" for key, off in _OFF.items() if model.get(key) not in off]
    if normalizer is not None:
        problems.append(f"it normalizes text ({normalizer['type']}) before it splits it")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    letters = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    pattern = pattern_of(len(model["vocab"].keys() - {token["content"] for token in content["added_tokens"]}))
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    if not (len(steps) == 2 and steps[0] == split and letters.items() <= (steps[1] or {}).items()):
        problems.append(f"it does not split text by Llama {3 if pattern == LLAMA3_PATTERN else 4}'s pattern")
    return problems


def _ranks(content: Mapping[str, Any]) -> tuple[dict[bytes, int], list[str]]:
    added = {token["content"] for token in content["added_tokens"]}
    ordinary = sorted((id, text) for text, id in content["model"]["vocab"].items() if text not in added)
    strange = [text for _, text in ordinary if not text or not _BYTE_OF.keys() >= set(text)]
    if strange:
        return {}, [f"tokens that are not bytes: {', '.join(map(repr, strange[:5]))}"]
    ranks = {bytes(_BYTE_OF[letter] for letter in text): id for id, text in ordinary}
    problems = []
    if list(ranks.values()) != list(range(len(ranks))):
        problems.append("the ids of its ordinary tokens are not consecutive from 0")
    if missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        problems.append(f"{missing} of the 256 single bytes are not tokens")
    return ranks, problems


def special_token_differences(added: Sequence[Mapping[str, Any]], num_ranks: int, *, vocab_size: int) -> list[str]:
    """Special tokens with other ids in Meta's code. Names of reserved ones do not matter."""
    end = max([vocab_size, *(token["id"] + 1 for token in added)])
    places = {token: num_ranks + i for i, token in enumerate(special_tokens_after(num_ranks, vocab_size=end))}
    return [
        f"special token {text!r} has id {id}, Meta's code gives it {places.get(text, 'none')}"
        for text, id in ((token["content"], token["id"]) for token in added)
        if id < num_ranks or (places.get(text) != id and _RESERVED not in text)
    ]


def merge_differences(merges: Iterable[Any], ranks: Mapping[bytes, int], *, whole: bool) -> list[str]:
    """Differences between merging by the listed pairs and merging by rank.

    tiktoken merges the neighbors whose token has the lowest rank. Two neighbors that span a token were formed as if it
    stood alone, because nothing outside was merged with them: so a token has only one last pair. The lists agree if
    each token's last pair is listed, and pairs are in the order of their tokens. `whole`: a piece of text that is a
    token is not merged, as in tiktoken.
    """
    listed: set[int] = set()
    newest = strange = 0
    for merge in merges:
        left, right = _pair(merge)
        rank = ranks.get(left + right)
        if rank is None or left not in ranks or right not in ranks:
            strange += 1
        elif rank < newest:
            return ["its merges are not in the order of their tokens"]
        else:
            newest = rank
            listed.add(_number(left, right, ranks))
    if strange:
        return [f"{strange} merges do not result in a token"]
    problems = []
    for token in ranks:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        if whole and all(_number(a, b, ranks) in listed for a, b in splits if a in ranks and b in ranks):
            continue
        last = _last_pair(token, ranks) if splits else None
        if splits and (_number(*last, ranks) not in listed if last else not whole):
            problems.append(f"token {ranks[token]} ({token!r}) is merged differently")
    return problems


def _number(left: bytes, right: bytes, ranks: Mapping[bytes, int]) -> int:
    """A pair as one number, because there are hundreds of thousands."""
    return ranks[left] * len(ranks) + ranks[right]


def _pair(merge: str | Sequence[str]) -> tuple[bytes, bytes]:
    """The pair of a merge: a list, or in older versions of tokenizers a text with a space, which no byte letter is."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return bytes(_BYTE_OF[letter] for letter in left), bytes(_BYTE_OF[letter] for letter in right)


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that tiktoken merges last into a token; None if its merging ends with more parts."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
        lowest = min(joined)
        if lowest == len(ranks):
            return None
        at = joined.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
