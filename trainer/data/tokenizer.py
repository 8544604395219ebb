"""Text to token ids and back. Llama's own form (`tokenizer.model`, tiktoken ranks) first, else `tokenizer.json`.

Special tokens that stand in a text are text, unless the caller asks for them: no document can end itself.
"""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from converters.errors import DataError, UnsupportedError
from converters.names import (
    ASSETS_FOLDER,
    HF_GENERATION_CONFIG,
    TIKTOKEN_MODEL,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
)
from trainer.data.llama3_text import BOS, EOS, PATTERN, special_tokens_after

# tiktoken's regex engine recurses on a run of white space and overflows its stack near a million
_LONG_WHITE_SPACE = re.compile(r"\s{25000}")


class Tokenizer(Protocol):
    """Generation stops at any of `eos_ids`, documents end with the first; `bos_id` is None where there is none."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    vocab_size: int  # the largest id + 1

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        """Ids of the text; `special` also reads special tokens written in it. Raises DataError for a lone surrogate."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a prepared data folder, an HF folder, a checkpoint (its assets) or a Meta folder.

    Raises DataError where there is none or it is damaged, UnsupportedError for SentencePiece.
    """
    folder = Path(folder)
    for home in (folder, folder / ASSETS_FOLDER):
        model, described = home / TIKTOKEN_MODEL, home / TOKENIZER_JSON
        if model.is_file() and _looks_like_ranks(model):
            return _TiktokenTokenizer(model, described if described.is_file() else None)
        if described.is_file():
            return _JsonTokenizer(described)
        if model.is_file():
            raise UnsupportedError(
                f"{model} is not a tiktoken file (SentencePiece?), and no {TOKENIZER_JSON} lies beside it"
            )
    what = "has no" if folder.is_dir() else "is not a folder, so it has no"
    raise DataError(
        f"{folder} {what} {TIKTOKEN_MODEL} or {TOKENIZER_JSON}",
        hint="a prepared data folder, an HF folder and a checkpoint's assets hold one",
    )


class _TiktokenTokenizer:
    def __init__(self, model: Path, described: Path | None):
        import tiktoken

        ranks = read_ranks(model)
        specials = _added_tokens(described) if described else special_tokens_after(len(ranks))
        inside = [name for name, id in specials.items() if id < len(ranks)]
        if inside:
            raise DataError(f"{described}: special tokens {inside} have ids of ordinary tokens in {model.name}")
        # Built from the ranks we read: tiktoken's own loader caches files by path and would serve a stale one
        self._encoding = tiktoken.Encoding(str(model), pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.vocab_size = max(len(ranks), *(id + 1 for id in specials.values()), 0)
        self.bos_id, self.eos_ids = _ends(model.parent, specials)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        _refuse_lone_surrogates(text)
        ids = [self.bos_id] if bos and self.bos_id is not None else []
        for part in _without_long_white_space(text):
            ids += (
                self._encoding.encode(part, allowed_special="all") if special else self._encoding.encode_ordinary(part)
            )
        return ids + ([self.eos_ids[0]] if eos and self.eos_ids else [])

    def decode(self, ids: Sequence[int]) -> str:
        _refuse_foreign_ids(ids, self.vocab_size)
        try:
            return self._encoding.decode(ids)
        except KeyError as id:  # between the ranks and a special token far behind them
            raise DataError(f"token id {id} stands for nothing in this tokenizer") from None


class _JsonTokenizer:
    def __init__(self, path: Path):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer: {error}") from None
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        specials = {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}
        self.bos_id, self.eos_ids = _ends(path.parent, specials)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        _refuse_lone_surrogates(text)
        self._tokenizer.encode_special_tokens = not special
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        start = [self.bos_id] if bos and self.bos_id is not None else []
        return start + ids + ([self.eos_ids[0]] if eos and self.eos_ids else [])

    def decode(self, ids: Sequence[int]) -> str:
        _refuse_foreign_ids(ids, self.vocab_size)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def read_ranks(path: Path) -> dict[bytes, int]:
    """The lines `<base64 bytes> <rank>` of a tiktoken file. Raises DataError with the line that is wrong."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(f"{path}:{number}: not `<base64 bytes> <rank>`") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{path}: ranks must run from 0 without a gap, each once")
    missing = 256 - sum(bytes([value]) in ranks for value in range(256))
    if missing:
        raise DataError(f"{path}: {missing} of the 256 single bytes have no rank, so some text could not be encoded")
    return ranks


def _looks_like_ranks(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(4096).split()
    return len(first) == 2 and first[1].isdigit()


def _added_tokens(path: Path) -> dict[str, int]:
    try:
        added = json.loads(path.read_text("utf-8"))["added_tokens"]
        return {str(token["content"]): int(token["id"]) for token in added}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no readable list of added_tokens ({type(error).__name__}: {error})") from None


def _ends(folder: Path, specials: dict[str, int]) -> tuple[int | None, tuple[int, ...]]:
    """Ids of the begin and end tokens: generation_config.json's, else tokenizer_config.json's, else Llama 3's names."""
    generation, config = _json_object(folder / HF_GENERATION_CONFIG), _json_object(folder / TOKENIZER_CONFIG)
    bos = generation.get("bos_token_id", specials.get(_content(config.get("bos_token", BOS))))
    eos = generation.get("eos_token_id", specials.get(_content(config.get("eos_token", EOS))))
    eos_ids = eos if isinstance(eos, list) else [eos]
    return bos, tuple(id for id in eos_ids if id is not None)


def _content(token: Any) -> Any:
    """tokenizer_config.json writes a special token as its text, or as an object around it."""
    return token.get("content") if isinstance(token, dict) else token


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


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
