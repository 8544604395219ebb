"""Compare a tokenizer.json with the tokenizer.model of the same checkpoint: tiktoken ranks, or SentencePiece.

transformers, torchtitan and titan read the tokenizer.json if there is one, Meta's and torchtune's code the
tokenizer.model. What determines ids is compared: vocabulary, merges, and how text is split before merging.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.store.json_file import read_json
from converters.store.local_files import stamp
from converters.tokenizers.sentencepiece_model import BPE_TYPE, SentencePiece, merges_of, read_sentencepiece
from converters.tokenizers.tiktoken_from_json import merge_differences, special_token_differences, split_differences
from converters.tokenizers.tiktoken_model import BYTE_LETTERS, looks_like_tiktoken, read_ranks

_SPACE = "\u2581"
_PREPENDS = {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": _SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
]}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """Why the two give different ids, if they do; and the added tokens of the JSON."""

    problems: tuple[str, ...]
    added_tokens: Sequence[Any] = ()


def compare_tokenizers(described: Path, model: Path) -> Comparison:
    """Compare a tokenizer.json with a tokenizer.model; the result for two files is cached.

    Raises CheckpointError if either is damaged.
    """
    return _compare(described, model, stamp(described), stamp(model))


def disagreement(assets: Mapping[str, Path], *, meta_vocab_size: int | None = None) -> str:
    """Why a checkpoint's two tokenizers give different ids; "" if they do not, or if it has only one.

    `meta_vocab_size`: rows of the embedding, if Meta's code, which numbers the special tokens itself, reads the
    tokenizer.model.
    """
    described, model = assets.get(TOKENIZER_JSON), assets.get(TIKTOKEN_MODEL)
    if described is None or model is None:
        return ""
    compared = compare_tokenizers(described, model)
    problems: Sequence[str] = compared.problems
    if not problems and meta_vocab_size is not None and looks_like_tiktoken(model):
        problems = special_token_differences(compared.added_tokens, len(read_ranks(model)), vocab_size=meta_vocab_size)
    return "; ".join(problems[:3])


@lru_cache(maxsize=4)
def _compare(described: Path, model: Path, *stamps: tuple[int, ...]) -> Comparison:
    content = read_json(described)
    try:
        if looks_like_tiktoken(model):
            problems = _against_ranks(content, read_ranks(model))
        elif (pieces := read_sentencepiece(model)) is not None:
            problems = _against_pieces(content, pieces)
        else:
            problems = ["tokenizer.model is neither tiktoken nor SentencePiece"]
        return Comparison(tuple(problems), content["added_tokens"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{described} is not a tokenizer.json: {type(error).__name__}: {error}") from None


def _against_ranks(content: Mapping[str, Any], ranks: Mapping[bytes, int]) -> list[str]:
    if problems := split_differences(content):
        return problems
    theirs = {token.decode("latin-1").translate(BYTE_LETTERS): rank for token, rank in ranks.items()}
    if problem := _other_vocabulary(_ordinary(content), theirs):
        return [problem]
    merges, whole = content["model"]["merges"], bool(content["model"].get("ignore_merges"))
    if whole and _are_all_splits(merges, theirs):
        return []
    return merge_differences(merges, ranks, whole=whole)


def _ordinary(content: Mapping[str, Any]) -> dict[str, int]:
    added = {token["content"] for token in content["added_tokens"]}
    return {text: id for text, id in content["model"]["vocab"].items() if text not in added}


def _other_vocabulary(found: Mapping[str, int], expected: Mapping[str, int]) -> str:
    """The difference of a tokenizer.json's vocabulary from that of a tokenizer.model; "" if there is none."""
    if found == expected:
        return ""
    odd = sorted(text for text in found.keys() | expected.keys() if found.get(text) != expected.get(text))
    first = odd[0]
    ids = f"{found.get(first, 'no id')} in tokenizer.json, {expected.get(first, 'no id')} in tokenizer.model"
    return f"{len(odd):,} tokens have different ids, such as {first!r:.40}: {ids}"


def _are_all_splits(merges: Sequence[Any], ranks: Mapping[str, int]) -> bool:
    """Whether the merges are every split of every token into two tokens, in the order of the tokens' ranks.

    Then they are those of tiktoken (see merge_differences). This takes a third of a second for 128,000.
    """
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    results = [ranks.get(left + right, -1) for left, right in pairs]
    if -1 in results or any(a > b for a, b in zip(results, results[1:], strict=False)) or len(set(pairs)) != len(pairs):
        return False
    if not all(left in ranks and right in ranks for left, right in pairs):
        return False
    # Each listed pair is such a split, and none is repeated, so it is enough to count the splits
    tokens = ranks.keys()
    splits = sum([token[:i] in tokens and token[i:] in tokens for token in tokens for i in range(1, len(token))])
    return splits == len(pairs)


def _against_pieces(content: Mapping[str, Any], model: SentencePiece) -> list[str]:
    described = content["model"]
    if model.model_type != BPE_TYPE or described["type"] != "BPE":
        return [f"its model is {described['type']}, and not both are BPE"]
    problems = []
    cutter, normalizer = content.get("pre_tokenizer"), content.get("normalizer")
    is_metaspace = normalizer is None and (cutter or {}).get("type") == "Metaspace"
    metaspace_prepends = is_metaspace and (cutter or {}).get("prepend_scheme", "always") in ("always", "first")
    if not model.plain or not ((normalizer == _PREPENDS and cutter is None) or metaspace_prepends):
        problems.append("it normalizes or splits text differently")
    if not described.get("byte_fallback"):
        problems.append("it does not encode unknown characters as bytes")
    piece_ids = {text: id for id, (text, _, _) in enumerate(model.pieces)}
    if problem := _other_vocabulary({t: id for t, id in described["vocab"].items() if id < len(piece_ids)}, piece_ids):
        return [*problems, problem]
    score_of = {text: score for text, score, _ in model.pieces}
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in described["merges"]]
    if set(merges) != set(merges_of(model)):
        return [*problems, "its merges are not those of tokenizer.model"]
    scores = [score_of[left + right] for left, right in merges]
    if any(a < b for a, b in zip(scores, scores[1:], strict=False)):
        problems.append("its merges are not in the order of tokenizer.model's scores")
    return problems
