"""Train on text directly: a token index is made of it on first use and reused afterwards."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from converters.common.errors import DataError
from converters.common.names import RUN_LOCK, TEMPORARY_PREFIX
from converters.store.commit import staged
from converters.store.file_lock import lock_file
from converters.store.json_file import write_json
from converters.tokenizers.assets import find_assets
from converters.tokenizers.reader import READER_VERSION, implied_class
from converters.tokenizers.tokenizer import has_tokenizer, tokenizer_note
from trainer.data.document_text import TRAIN_OPTION, special_text_note
from trainer.data.index import INDEX_JSON, MAX_DIGESTED_BYTES, TRAIN, VERSION, TokenIndex, digest_of, open_index
from trainer.data.prepare import carry_tokenizer
from trainer.data.sources import Document
from trainer.data.write_index import NOTHING_HELD_OUT, encode_documents, summarize


@dataclass(frozen=True, slots=True)
class Preparation:
    """The preparation of text: the tokenizer, the folder of the indexes, and how to run the work on one rank."""

    tokenizer: Path
    folder: Path
    once: Callable[[Callable[[], Any]], Any]  # runs work on one rank; all get its result or error
    say: Callable[[str], None] = print
    special_tokens: bool = False  # those written in a document are tokens, not text


@dataclass(frozen=True, slots=True)
class WholeText:
    """A token index without a held-out part, which returns all tokens for any split."""

    index: TokenIndex

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def unigram_entropy(self) -> float | None:
        return self.index.unigram_entropy

    @property
    def tokenizer_digests(self) -> frozenset[str]:
        return self.index.tokenizer_digests

    def tokens(self, split: str) -> np.ndarray:
        return self.index.tokens(TRAIN)

    def offsets(self, split: str) -> np.ndarray:
        return self.index.offsets(TRAIN)


def index_text(
    name: str,
    identity: Callable[[], Any],
    documents: Callable[[], Iterable[Document]],
    preparation: Preparation,
    *,
    most_tokens: int | None = None,
) -> WholeText:
    """The index of a text: the one made earlier, if sources, tokenizer and length are the same; else made now.

    `identity` returns plain values that identify the documents. Called by all ranks; one does the work.
    """
    folder = preparation.once(lambda: _settle(name, identity(), documents, preparation, most_tokens))
    return WholeText(open_index(folder))


def identity_of(files: Sequence[Path]) -> list[Any]:
    """Names and contents of files, as plain values; of more than 1 GiB the sizes and times instead of the contents."""
    stats = [path.stat() for path in files]
    if sum(stat.st_size for stat in stats) <= MAX_DIGESTED_BYTES:
        return [[path.name, digest_of(path)] for path in files]
    return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in zip(files, stats, strict=True)]


def _settle(
    name: str,
    identity: Any,
    documents: Callable[[], Iterable[Document]],
    preparation: Preparation,
    most_tokens: int | None,
) -> Path:
    refuse_no_tokenizer(name, preparation.tokenizer)
    assets = sorted((asset, digest_of(path)) for asset, path in find_assets(preparation.tokenizer).items())
    # a config.json that is not copied may imply the class
    parts = [VERSION, identity, assets, most_tokens, READER_VERSION, implied_class(find_assets(preparation.tokenizer))]
    parts += ["special tokens"] if preparation.special_tokens else []
    key = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())
    folder = preparation.folder / key
    try:
        preparation.folder.mkdir(parents=True, exist_ok=True)
        with (preparation.folder / RUN_LOCK).open("a") as lock:
            lock_file(lock.fileno(), wait=True)  # of two runs that begin at once, one makes the index
            if not _is_whole(folder):
                for left_over in preparation.folder.glob(f"{TEMPORARY_PREFIX}*"):  # of a run that was killed
                    shutil.rmtree(left_over, ignore_errors=True)
                if two := tokenizer_note(preparation.tokenizer):
                    preparation.say(two)
                preparation.say(f"making tokens of {name}; they stay in {folder}")
                _write(folder, name, documents(), preparation, most_tokens)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}", hint="nothing is left of it") from error
    return folder


def _is_whole(place: Path) -> bool:
    try:
        open_index(place)
    except DataError:
        return False
    return True


def _write(
    place: Path, name: str, documents: Iterable[Document], preparation: Preparation, most_tokens: int | None
) -> None:
    special = preparation.special_tokens
    with staged(place, overwrite=True, marks=(INDEX_JSON,)) as folder:
        used = carry_tokenizer(folder, preparation.tokenizer)
        encoded = encode_documents(
            folder, documents, used, NOTHING_HELD_OUT, special_tokens=special, most_tokens=most_tokens
        )
        write_json(folder / INDEX_JSON, summarize(folder, used, encoded, source=name, split=NOTHING_HELD_OUT))
    if text := special_text_note(encoded.special_as_text, TRAIN_OPTION):
        preparation.say(text)


def refuse_no_tokenizer(name: str, folder: Path) -> None:
    if not has_tokenizer(folder):
        raise DataError(
            f"{name} is text, and model.hf_assets_path = {str(folder)!r} holds no tokenizer to read it with",
            hint="an HF folder of the model holds one; `titan data prepare` trains one if it is not given any",
            tries=["--model.hf_assets_path FOLDER", "titan data prepare FILES… --out data"],
        )
