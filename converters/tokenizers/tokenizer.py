"""The tokenizer of a folder: text to ids and back, and the tokens around documents and prompts.

Special tokens in a text are read as text unless the caller asks otherwise, so that no document can end itself.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from converters.common.errors import DataError
from converters.common.names import HF_GENERATION_CONFIG, TIKTOKEN_MODEL, TOKENIZER_CONFIG, TOKENIZER_JSON
from converters.store.hub_names import download_command
from converters.store.json_file import read_json
from converters.store.local_files import is_folder
from converters.tokenizers.agreement import disagreement
from converters.tokenizers.assets import find_assets
from converters.tokenizers.special_text import SpecialText, changes_text, special_tokens_in
from converters.tokenizers.tiktoken_model import looks_like_tiktoken

if TYPE_CHECKING:
    import tokenizers

    from converters.tokenizers.reader import FolderTokenizer

_PROBE = "A text of 1234 words and then some more: naïve, straightforward,\n\tdef probe(x): return x ** 2  # no more"


@dataclass(frozen=True, slots=True)
class DocumentEnds:
    """The ids that documents begin (None: with none) and end with, and one line that says who names them.

    A document begins with the tokenizer's bos_token, unless it has `add_bos_token: false`, and ends with its eos_token.
    If the tokenizer does not say, generation_config.json does.
    """

    begin: int | None
    end: int | None
    described: str


class Tokenizer(Protocol):
    """A prompt is between `prefix_ids` and `suffix_ids`, a document between `ends`: these may be other tokens."""

    ends: DocumentEnds
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    vocab_size: int  # the largest id + 1
    base_size: int  # the same without added tokens, of which a model need not have a row
    special_ids: frozenset[int]

    @property
    def special_names(self) -> frozenset[str] | None: ...  # what `special` matches; None if other spellings match too
    @property
    def byte_values(self) -> Mapping[int, int]: ...  # ids of single bytes; a run decodes to text or U+FFFD as a whole

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        """Ids of the text; `special` also reads special tokens in it. Raises DataError for a lone surrogate."""
        ...

    def checked(self, ids: list[int]) -> list[int]:
        """The ids, before the model reads them. Raises DataError if it has no row for one."""
        ...

    def special_in(self, text: str) -> frozenset[str]:
        """The special tokens written in a text, which `special` reads as tokens. Any thread may call it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        ...


def load_tokenizer(folder: Path | str, *, num_rows: int | None = None) -> Tokenizer:
    """The tokenizer of a prepared data folder, an HF folder, a checkpoint (its assets) or a Meta folder.

    Its ids are those of transformers' AutoTokenizer, see reader.py. `num_rows`: of the model's embedding. Raises
    DataError if there is none or it is damaged, UnsupportedError for a kind that is not read.
    """
    from converters.tokenizers.reader import is_metas, read_folder_tokenizer, vocabulary_file

    folder = Path(folder)
    assets = find_assets(folder)
    path = vocabulary_file(assets)
    if path is None:
        what = "has no" if is_folder(folder) else "is not a folder, so it has no"
        raise DataError(
            f"{folder} {what} {TIKTOKEN_MODEL} or {TOKENIZER_JSON}",
            hint="a prepared data folder, an HF folder and a checkpoint's assets hold one",
            tries=[] if is_folder(folder) else download_command(folder, assets="tokenizer"),
        )
    if is_metas(assets) and not looks_like_tiktoken(path):
        return _SentencePieceTokenizer(path, assets)
    return _FolderTokenizer(read_folder_tokenizer(assets), assets, num_rows)


def document_ends(assets: Mapping[str, Path]) -> DocumentEnds:
    """The tokens that documents begin and end with. Reads no merges, so that every rank can call it."""
    from converters.tokenizers.reader import is_metas, read_folder_tokenizer

    if is_metas(assets) and not looks_like_tiktoken(assets[TIKTOKEN_MODEL]):
        return _SentencePieceTokenizer(assets[TIKTOKEN_MODEL], assets).ends
    return _FolderTokenizer(read_folder_tokenizer(assets, with_merges=False), assets).ends


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    from converters.tokenizers.reader import vocabulary_file

    return vocabulary_file(find_assets(folder)) is not None


def tokenizer_note(folder: Path | str) -> str:
    """A note on which of two tokenizers that give other ids is read; "" if there is one, or they agree."""
    if problem := disagreement(find_assets(Path(folder))):
        return (
            f"{folder}: {TOKENIZER_JSON} and {TIKTOKEN_MODEL} give other ids ({problem}); {TOKENIZER_JSON} is read, "
            f"as in transformers; Meta's and torchtune's code read {TIKTOKEN_MODEL}"
        )
    return ""


def tokenizes_differently(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give different ids for a text; their files and added tokens may differ."""
    return one.encode(_PROBE) != other.encode(_PROBE)


class _FolderTokenizer:
    def __init__(self, folder: "FolderTokenizer", assets: Mapping[str, Path], num_rows: int | None = None):
        from converters.tokenizers.reader import library_errors

        self._tokenizer, self._pieces_of, self._where = folder.tokenizer, folder.pieces_of, folder.where
        self._library_errors = library_errors
        self._splits_special = folder.settings.get("split_special_tokens") is True
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.base_size = max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        self._num_rows = self.vocab_size if num_rows is None else num_rows
        self.byte_values = _byte_values(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.special_names = frozenset[str]() if self._splits_special else _special_names(self._tokenizer)
        self._special_text = None if self._splits_special else SpecialText(self._tokenizer)
        with library_errors(folder.where):
            self.prefix_ids, self.suffix_ids = _around_text(self._tokenizer.post_processor)
        named = {key: (folder.named.get(key), folder.id_of(key)) for key in ("bos_token", "eos_token")}
        settings = read_json(assets[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in assets else {}
        self.ends = _document_ends(named, assets, settings, self.vocab_size)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        _refuse_lone_surrogates(text)
        self._tokenizer.encode_special_tokens = self._splits_special or not special
        ids: list[int] = []
        with self._library_errors(self._where):
            for piece in self._pieces_of(text) if self._pieces_of else (text,):
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return _framed(self.ends, ids, bos=bos, eos=eos)

    def checked(self, ids: list[int]) -> list[int]:
        if beyond := sorted({id for id in ids if id >= self._num_rows}):
            names = ", ".join(f"{self._tokenizer.id_to_token(id)} ({id})" for id in beyond)
            raise DataError(
                f"the model's embedding has {self._num_rows:,} rows, and none for tokens of the text: {names}",
                hint="they were added to the tokenizer, and the model was not resized for them",
            )
        return ids

    def special_in(self, text: str) -> frozenset[str]:
        return self._special_text.find(text) if self._special_text else frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        _refuse_foreign_ids(ids, self.vocab_size)
        for id in ids:
            if self._tokenizer.id_to_token(id) is None:  # which the library leaves out
                raise DataError(f"token id {id} is not used by this tokenizer")
        with self._library_errors(self._where):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class _SentencePieceTokenizer:
    """A SentencePiece file alone, as in Meta's releases, by its own library.

    A tokenizer.json does not give its ids for each such file: it cannot break ties between equal scores, nor normalize
    as SentencePiece does. Text behind a special token begins with a space, as in Meta's code.
    """

    def __init__(self, path: Path, assets: Mapping[str, Path]):
        import re

        import sentencepiece

        try:
            self._pieces: sentencepiece.SentencePieceProcessor = sentencepiece.SentencePieceProcessor(
                model_file=str(path)
            )
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path}: neither a tiktoken nor a SentencePiece file: {error}") from None
        self.vocab_size = self.base_size = len(self._pieces)
        self.byte_values: dict[int, int] = {}
        control = [id for id in range(self.vocab_size) if self._pieces.is_control(id)]
        self._control = {self._pieces.id_to_piece(id): id for id in control}
        self._special = re.compile(f"({'|'.join(map(re.escape, self._control))})")
        self.special_names, self.special_ids = frozenset(self._control), frozenset(control)
        ids = {"bos_token": self._pieces.bos_id(), "eos_token": self._pieces.eos_id()}  # -1 for none
        named = {k: (self._pieces.id_to_piece(id), id) if id >= 0 else (None, None) for k, id in ids.items()}
        self.prefix_ids: tuple[int, ...] = (ids["bos_token"],) if ids["bos_token"] >= 0 else ()
        self.suffix_ids: tuple[int, ...] = ()
        self.ends = _document_ends(named, assets, {}, self.vocab_size)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        _refuse_lone_surrogates(text)
        parts = self._special.split(text) if special and self._control else [text]  # to the library they are text
        ids: list[int] = []
        for place, part in enumerate(parts):
            ids += [self._control[part]] if place % 2 else self._pieces.encode(part)
        return _framed(self.ends, ids, bos=bos, eos=eos)

    def checked(self, ids: list[int]) -> list[int]:
        return ids  # of pieces, which are no added tokens

    def special_in(self, text: str) -> frozenset[str]:
        return frozenset(special_tokens_in(text, self.special_names))

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


def _document_ends(
    named: Mapping[str, tuple[str | None, int | None]],
    assets: Mapping[str, Path],
    settings: Mapping[str, Any],
    vocab_size: int,
) -> DocumentEnds:
    generation = read_json(assets[HF_GENERATION_CONFIG]) if HF_GENERATION_CONFIG in assets else {}
    says_none = settings.get("add_bos_token") is False

    def end_of(role: str) -> tuple[int | None, str]:
        text, id = named[role]
        if role == "bos_token" and says_none:
            return None, "nothing (add_bos_token is false)"
        if id is not None:
            return id, f"{text} ({id}), the tokenizer's {role}"
        stated = generation.get(f"{role}_id")
        first = (stated[0] if stated else None) if isinstance(stated, list) else stated
        if first is None or (role in settings and not settings[role] and role == "bos_token"):
            return None, f"nothing (there is no {role})"
        if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first < vocab_size:
            raise DataError(
                f"{assets[HF_GENERATION_CONFIG]}: {role}_id {first!r:.60} is no id of the tokenizer's {vocab_size:,} "
                "tokens, and the tokenizer names none",
                hint=f"name the {role} in tokenizer_config.json, or correct {HF_GENERATION_CONFIG}",
            )
        return first, f"{first}, the {role}_id of {HF_GENERATION_CONFIG}"

    (begin, begin_text), (end, end_text) = end_of("bos_token"), end_of("eos_token")
    return DocumentEnds(begin, end, f"documents begin with {begin_text}, and end with {end_text}")


def _around_text(post_processor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer.json's post_processor puts before and behind a text."""
    if post_processor is None:
        return (), ()
    from tokenizers import Tokenizer

    # Ask the library, with a vocabulary of one word
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder"))
    word = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    described = json.loads(post_processor.__getstate__())
    frame = {"version": "1.0", "added_tokens": [], **parts, "post_processor": described, "model": word}
    text = Tokenizer.from_str(json.dumps(frame)).encode("a")
    first = text.special_tokens_mask.index(0)
    return tuple(text.ids[:first]), tuple(text.ids[first + 1 :])


def _special_names(tokenizer: "tokenizers.Tokenizer") -> frozenset[str] | None:
    """None if text is changed before a special token is looked for, or not every place counts."""
    special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    changes = changes_text(tokenizer)
    exact = not any(token.single_word or (changes and token.normalized) for token in special)
    return frozenset(token.content for token in special) if exact else None


def _byte_values(tokenizer: "tokenizers.Tokenizer") -> dict[int, int]:
    """The byte tokens of a tokenizer whose decoder has ByteFallback, as Llama 2's: id → value."""
    byte_tokens = {tokenizer.token_to_id(f"<0x{value:02X}>"): value for value in range(256)}
    ids = {id: value for id, value in byte_tokens.items() if id is not None}
    letter = tokenizer.token_to_id("<0x41>")
    return ids if None not in byte_tokens and letter is not None and tokenizer.decode([letter]) == "A" else {}


def _framed(ends: DocumentEnds, ids: list[int], *, bos: bool, eos: bool) -> list[int]:
    start = [ends.begin] if bos and ends.begin is not None else []
    end = [ends.end] if eos and ends.end is not None else []
    return start + ids + end


def _refuse_lone_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the text has a lone surrogate at character {error.start}, which no UTF-8 can hold") from None


def _refuse_foreign_ids(ids: Sequence[int], vocab_size: int) -> None:
    foreign = sorted({int(id) for id in ids if not 0 <= id < vocab_size})
    if foreign:
        raise DataError(f"token ids {foreign[:10]} are outside of the tokenizer's vocabulary of {vocab_size}")
