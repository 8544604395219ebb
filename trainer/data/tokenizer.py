"""Tokenizers: `tokenizer.json`, `tokenizer.model` as tiktoken ranks or SentencePiece, and Moonshot's `tiktoken.model`.

Special tokens in a text are read as text unless the caller asks otherwise, so that no document can end itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from converters.assets import find_assets
from converters.errors import DataError
from converters.names import MOONSHOT_RANKS, TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.tokenizers import moonshot
from converters.tokenizers.agreement import Comparison, compare_tokenizers, disagreement
from converters.tokenizers.config_tokens import read_table, tokens_only_in_config
from converters.tokenizers.tiktoken_model import (
    BEGIN,
    RELEASED_VOCAB,
    looks_like_tiktoken,
    pattern_of,
    read_ranks,
    require_of_llama,
    special_tokens_after,
)
from trainer.data.tokenizer_ends import document_ends, is_legacy, prefix_of_model_file, prefix_of_post_processor

if TYPE_CHECKING:
    import tokenizers

# tiktoken's regex engine recurses on a run of white space and overflows its stack near a million
_LONG_WHITE_SPACE = re.compile(r"\s{25000}")
_LEAD = "\U000ffffd"  # a private-use character, which merges with nothing
_PROBE = "A text of 1234 words and then some more: naïve, straightforward,\n\tdef probe(x): return x ** 2  # no more"
_NUM_SPECIAL = 10  # that are named


class Tokenizer(Protocol):
    """Documents begin with `bos_id`, None where there is none, and end with the first of `eos_ids`.

    A prompt begins with `prefix_ids`, which may be others: see tokenizer_ends.py.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    vocab_size: int  # the largest id + 1

    @property
    def special_names(self) -> frozenset[str] | None: ...  # what `special` matches; None if other spellings match too
    @property
    def byte_values(self) -> Mapping[int, int]: ...  # ids of single bytes; a run decodes to text or U+FFFD as a whole

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        """Ids of the text; `special` also reads special tokens in it. Raises DataError for a lone surrogate."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        ...


def load_tokenizer(folder: Path | str, *, as_transformers: bool = False) -> Tokenizer:
    """The tokenizer of a prepared data folder, an HF folder, a checkpoint (its assets) or a Meta folder.

    A tokenizer.json decides, as in transformers and torchtitan. A tiktoken file beside it is read in its place where it
    gives the same ids, since that is faster; `tokenizer_note` says where it does not. Raises DataError where there is
    none or it is damaged.

    In training a tokenizer.json that says so cuts or pads what it reads, as in torchtitan, and words that one adds to a
    tiktoken file are text as special tokens are. `as_transformers` reads texts whole, and such words as tokens.
    """
    folder = Path(folder)
    assets = find_assets(folder)
    model, described = assets.get(TIKTOKEN_MODEL), assets.get(TOKENIZER_JSON)
    if model and looks_like_tiktoken(model):
        found = compare_tokenizers(described, model) if described else None
        if found is None or not found.problems:
            return _TiktokenTokenizer(model, found, assets, as_transformers=as_transformers)
    if described:
        return _JsonTokenizer(described, assets, as_transformers=as_transformers)
    if model:
        return _SentencePieceTokenizer(model, assets)
    if ranks := assets.get(MOONSHOT_RANKS):
        return _TiktokenTokenizer(ranks, None, assets, as_transformers=as_transformers)
    what = "has no" if folder.is_dir() else "is not a folder, so it has no"
    raise DataError(
        f"{folder} {what} {TIKTOKEN_MODEL} or {TOKENIZER_JSON}",
        hint="a prepared data folder, an HF folder and a checkpoint's assets hold one",
    )


def tokenizer_note(folder: Path | str) -> str:
    """Which of two tokenizers that give other ids is read; "" where there is one, or they agree."""
    if problem := disagreement(find_assets(Path(folder))):
        return (
            f"{folder}: {TOKENIZER_JSON} and {TIKTOKEN_MODEL} give other ids ({problem}); {TOKENIZER_JSON} is read, "
            f"as in transformers; Meta's and torchtune's code read {TIKTOKEN_MODEL}"
        )
    return ""


def tokenizes_differently(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give different ids for a text; their files and added tokens may differ."""
    return one.encode(_PROBE) != other.encode(_PROBE)


class _TiktokenTokenizer:
    """`described`: what a tokenizer.json of the same ids adds: special tokens, words, a prompt's prefix."""

    prefix_ids: tuple[int, ...]

    def __init__(self, model: Path, described: Comparison | None, assets: Mapping[str, Path], *, as_transformers: bool):
        import tiktoken

        ranks = read_ranks(model)
        missing = 256 - sum(bytes([value]) in ranks for value in range(256))
        if missing:
            raise DataError(f"{model}: {missing} of the 256 single bytes have no rank, so some text has no ids")
        words: set[str] = set()
        pattern, self._parts = pattern_of(len(ranks)), _without_long_white_space
        if model.name == MOONSHOT_RANKS:
            specials, self.prefix_ids = moonshot.special_tokens(assets, len(ranks)), ()
            pattern, self._parts = moonshot.PATTERN, moonshot.parts_of
        elif described:
            specials, words, self.prefix_ids = _described(described)
            if tokens_only_in_config(assets, specials, 0):  # else the whole table need not be read
                specials |= tokens_only_in_config(assets, *read_table(assets[TOKENIZER_JSON]))
        else:
            require_of_llama(model, len(ranks))
            specials = _specials_after(len(ranks))
            self.prefix_ids = prefix_of_model_file(assets, specials[BEGIN])
        inside = [name for name, id in specials.items() if id < len(ranks)]
        if inside:
            raise DataError(f"{TOKENIZER_JSON}: special tokens {inside} have ids of ordinary tokens in {model}")
        # Built from the ranks we read: tiktoken's own loader caches files by path and would serve a stale one
        self._encoding = tiktoken.Encoding(str(model), pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.vocab_size = self._encoding.max_token_value + 1
        self.byte_values: dict[int, int] = {}
        self._words = words if as_transformers else set()
        self.special_names = frozenset(specials) - self._words
        self.bos_id, self.eos_ids = document_ends(assets, self.vocab_size)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        _refuse_lone_surrogates(text)
        allowed: Literal["all"] | set[str] = "all" if special else self._words
        ids: list[int] = []
        for part in self._parts(text):
            ids += self._encoding.encode(part, allowed_special=allowed, disallowed_special=())
        return _framed(self, ids, bos=bos, eos=eos)

    def decode(self, ids: Sequence[int]) -> str:
        _refuse_foreign_ids(ids, self.vocab_size)
        try:
            return self._encoding.decode(ids)
        except KeyError as id:  # between the ranks and a special token far behind them
            raise DataError(f"token id {id} is not used by this tokenizer") from None


class _JsonTokenizer:
    def __init__(self, path: Path, assets: Mapping[str, Path], *, as_transformers: bool):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer: {error}") from None
        added, num_in_model = self._tokenizer.get_added_tokens_decoder(), self._tokenizer.get_vocab_size(False)
        next_id = max([num_in_model, *(id + 1 for id in added)])
        self._tokenizer.add_special_tokens([*tokens_only_in_config(assets, self._tokenizer.get_vocab(), next_id)])
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.byte_values = _byte_values(self._tokenizer)
        self.special_names = _special_names(self._tokenizer)
        self.prefix_ids = prefix_of_post_processor(self._tokenizer.post_processor)
        self.bos_id, self.eos_ids = document_ends(assets, self.vocab_size)
        if as_transformers:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        _refuse_lone_surrogates(text)
        self._tokenizer.encode_special_tokens = not special
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return _framed(self, ids, bos=bos, eos=eos)

    def decode(self, ids: Sequence[int]) -> str:
        _refuse_foreign_ids(ids, self.vocab_size)
        for id in ids:
            if self._tokenizer.id_to_token(id) is None:  # which the library leaves out
                raise DataError(f"token id {id} is not used by this tokenizer")
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class _SentencePieceTokenizer:
    def __init__(self, path: Path, assets: Mapping[str, Path]):
        import sentencepiece

        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path}: neither a tiktoken nor a SentencePiece file: {error}") from None
        self.vocab_size = len(self._pieces)
        self.byte_values: dict[int, int] = {}
        control = [id for id in range(self.vocab_size) if self._pieces.is_control(id)]
        self._control = {self._pieces.id_to_piece(id): id for id in control}
        self._is_legacy = is_legacy(assets)
        self.special_names = frozenset(self._control)
        begin = self._pieces.bos_id()  # -1 for none
        self.prefix_ids = prefix_of_model_file(assets, begin if begin >= 0 else None)
        self.bos_id, self.eos_ids = document_ends(assets, self.vocab_size)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        _refuse_lone_surrogates(text)
        if not (special and self._control):  # to the library they are text
            return _framed(self, self._pieces.encode(text), bos=bos, eos=eos)
        ids: list[int] = []
        for place, part in enumerate(re.split(f"({'|'.join(map(re.escape, self._control))})", text)):
            if place % 2:
                ids.append(self._control[part])
            elif place and part and not self._is_legacy:
                ids += self._pieces.encode(_LEAD + part)[len(self._pieces.encode(_LEAD)) :]
            else:
                ids += self._pieces.encode(part)
        return _framed(self, ids, bos=bos, eos=eos)

    def decode(self, ids: Sequence[int]) -> str:
        _refuse_foreign_ids(ids, self.vocab_size)
        text, run = "", list[int]()
        for id in map(int, ids):
            if self._pieces.is_control(id):  # which the library leaves out
                text += self._pieces.decode(run) + self._pieces.id_to_piece(id)
                run = []
            else:
                run.append(id)
        tail: str = self._pieces.decode(run)
        return text + tail


def _special_names(tokenizer: "tokenizers.Tokenizer") -> frozenset[str] | None:
    """Of a tokenizer.json; None where text is changed before one is looked for, or not every place counts."""
    special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    changes = tokenizer.normalizer is not None
    exact = not any(token.single_word or (changes and token.normalized) for token in special)
    return frozenset(token.content for token in special) if exact else None


def _byte_values(tokenizer: "tokenizers.Tokenizer") -> dict[int, int]:
    """Those of a tokenizer.json whose decoder has ByteFallback, as Llama 2's."""
    found = {tokenizer.token_to_id(f"<0x{value:02X}>"): value for value in range(256)}
    ids = {id: value for id, value in found.items() if id is not None}
    letter = tokenizer.token_to_id("<0x41>")
    return ids if None not in found and letter is not None and tokenizer.decode([letter]) == "A" else {}


def _framed(tokenizer: Tokenizer, ids: list[int], *, bos: bool, eos: bool) -> list[int]:
    start = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    end = [tokenizer.eos_ids[0]] if eos and tokenizer.eos_ids else []
    return start + ids + end


def _specials_after(num_ranks: int) -> dict[str, int]:
    """Those of a tokenizer.model that comes alone: of Meta's releases all of their code, else the ten named ones."""
    vocab_size = RELEASED_VOCAB.get(num_ranks, num_ranks + _NUM_SPECIAL)
    names = special_tokens_after(num_ranks, vocab_size=vocab_size)
    return {name: num_ranks + i for i, name in enumerate(names)}


def _described(found: Comparison) -> tuple[dict[str, int], set[str], tuple[int, ...]]:
    """What a tokenizer.json adds to a tiktoken file: tokens, those of them that are not special, a prompt's prefix."""
    try:
        specials = {str(token["content"]): int(token["id"]) for token in found.added_tokens}
        words = {str(token["content"]) for token in found.added_tokens if token.get("special") is False}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{TOKENIZER_JSON}: no readable list of added_tokens ({type(error).__name__}: {error})"
        ) from None
    return specials, words, prefix_of_post_processor(found.post_processor)


def _without_long_white_space(text: str) -> Iterator[str]:
    start = 0
    for run in _LONG_WHITE_SPACE.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


def _refuse_lone_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the text has a lone surrogate at character {error.start}, which no UTF-8 can hold") from None


def _refuse_foreign_ids(ids: Sequence[int], vocab_size: int) -> None:
    foreign = sorted({int(id) for id in ids if not 0 <= id < vocab_size})
    if foreign:
        raise DataError(f"token ids {foreign[:10]} are outside of the tokenizer's vocabulary of {vocab_size}")
