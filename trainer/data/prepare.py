"""Make a token index from text: train or take a tokenizer, encode, split, measure, and commit in one rename."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from converters.assets import find_assets
from converters.commit import staged
from converters.errors import DataError
from converters.json_file import write_json
from trainer.data.index import (
    HELD_OUT,
    INDEX_JSON,
    SPLITS,
    TRAIN,
    VERSION,
    describe_files,
    fingerprint_of,
)
from trainer.data.sources import Document, find_files, read_documents, standard_library
from trainer.data.token_file import TokenFile
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.data.train_tokenizer import train_ranks, write_tokenizer

STANDARD_LIBRARY_BYTES = 8 << 20  # enough to learn from, and a few seconds to encode
_TOKENIZER_SAMPLE_CHARACTERS = 32 << 20  # merges of so small a vocabulary settle long before
_FEWEST_HELD_OUT_DOCUMENTS = 4


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What was made; index.json says the same. Entropies are in nats per token, of the held-out part."""

    out: str
    tokenizer: str  # `trained`, or the folder it was taken from
    vocab_size: int
    secs: float
    source: str
    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    held_out_by: str  # `document`: whole documents; `tail`: the end of every document
    text_bytes: int
    bytes_per_token: float
    unigram_cross_entropy: float  # of a model that knows only how often each token comes in the training part
    unigram_entropy: float  # of one that knows how often each token comes in the held-out part itself


def prepare(
    sources: Sequence[Path],
    out: Path,
    *,
    vocab_size: int = 2048,
    tokenizer: Path | None = None,
    held_out: float = 0.02,
    max_bytes: int | None = None,
    text_key: str = "text",
    overwrite: bool = False,
) -> PrepareReport:
    """Turn the sources (none: the Python standard library) into a token index at `out`.

    Raises before any work where `out` exists, and with file and line for text that cannot be read; whatever happens,
    `out` is a whole index or is not there.
    """
    started = time.monotonic()
    if not 0 < held_out < 1:
        raise DataError(f"the held-out share is {held_out}; it must lie between 0 and 1")
    if max_bytes is not None and max_bytes < 1:
        raise DataError(f"--max-bytes is {max_bytes}; it must be at least 1")
    with _writing_told(out), staged(out, overwrite=overwrite, marks=(INDEX_JSON,)) as folder:
        if sources:
            files, source = find_files(sources), ", ".join(map(str, sources))
        else:
            root, files = standard_library(max_bytes=max_bytes or STANDARD_LIBRARY_BYTES)
            source, max_bytes = f"Python standard library, {root}", None

        def documents() -> Iterable[Document]:
            return read_documents(files, text_key=text_key, max_bytes=max_bytes)

        used = _settle_tokenizer(folder, documents, vocab_size=vocab_size, existing=tokenizer)
        split = _choose_split(documents(), held_out)
        summary = _summarize(folder, used, _encode_all(folder, documents(), used, split), source=source, split=split)
        write_json(folder / INDEX_JSON, summary)
    return PrepareReport(
        out=str(out),
        tokenizer=str(tokenizer or "trained"),
        vocab_size=used.vocab_size,
        secs=round(time.monotonic() - started, 2),
        **summary["text"],
        **summary["unigram"],
    )


@contextmanager
def _writing_told(out: Path) -> Iterator[None]:
    """What cannot be read is told where it is read; any other failure of the system here is one of writing."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}", hint="nothing is left of it") from error


def _settle_tokenizer(
    folder: Path, documents: Callable[[], Iterable[Document]], *, vocab_size: int, existing: Path | None
) -> Tokenizer:
    if existing is None:
        if next(iter(documents()), None) is None:
            raise DataError("there is no text: every document is empty")
        write_tokenizer(folder, train_ranks(_sample(documents()), vocab_size=vocab_size))
        return load_tokenizer(folder)
    used = load_tokenizer(existing)
    if used.bos_id is None or not used.eos_ids:
        raise DataError(f"{existing}: the tokenizer names no begin or end token, so documents could not be told apart")
    for name, path in find_assets(existing).items():
        shutil.copyfile(path, folder / name)
    return used


def _sample(documents: Iterable[Document]) -> Iterable[str]:
    left = _TOKENIZER_SAMPLE_CHARACTERS
    for document in documents:
        yield document.text
        left -= len(document.text)
        if left < 0:
            return


@dataclass(frozen=True, slots=True)
class _Split:
    """What is held out: whole documents by a hash of their text, so that equal ones stay together, or every tail."""

    share: float
    by: str

    def holds_out(self, document: Document) -> bool:
        return self.by == "document" and xxhash.xxh3_64_intdigest(document.text.encode()) < self.share * 2**64

    def tail_of(self, text: str) -> int:
        """Where the held-out tail begins; the text's length where documents are held out whole."""
        return len(text) - round(len(text) * self.share) if self.by == "tail" else len(text)


def _choose_split(documents: Iterable[Document], share: float) -> _Split:
    """Whole documents, unless that would hold out hardly any or all of them."""
    by_document = _Split(share, "document")
    num_documents = num_held_out = 0
    for document in documents:
        num_documents += 1
        num_held_out += by_document.holds_out(document)
    if not num_documents:
        raise DataError("there is no text: every document is empty")
    enough = _FEWEST_HELD_OUT_DOCUMENTS <= num_held_out < num_documents
    return by_document if enough else _Split(share, "tail")


def _encode_all(
    folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, split: _Split
) -> dict[str, TokenFile]:
    files = {name: TokenFile(folder, name, tokenizer) for name in SPLITS}
    try:
        for document in documents:
            if split.holds_out(document):
                files[HELD_OUT].add(document.text)
                continue
            cut = split.tail_of(document.text)
            if cut > 0:
                files[TRAIN].add(document.text[:cut])
            if cut < len(document.text):
                files[HELD_OUT].add(document.text[cut:])
    finally:
        for file in files.values():
            file.close()
    empty = [name for name, file in files.items() if not file.num_tokens]
    if empty:
        raise DataError(f"the text is too short: nothing is left for the {empty[0]} part")
    return files


def _summarize(
    folder: Path, tokenizer: Tokenizer, files: dict[str, TokenFile], *, source: str, split: _Split
) -> dict[str, Any]:
    """The content of index.json."""
    train, held_out = files[TRAIN], files[HELD_OUT]
    text_bytes = train.text_bytes + held_out.text_bytes
    tokens = train.num_tokens + held_out.num_tokens
    summary = {
        "version": VERSION,
        "vocab_size": tokenizer.vocab_size,
        "text": {
            "source": source,
            "documents": train.num_documents + (held_out.num_documents if split.by == "document" else 0),
            "tokens": tokens,
            "held_out_documents": held_out.num_documents,
            "held_out_tokens": held_out.num_tokens,
            "held_out_by": split.by,
            "text_bytes": text_bytes,
            "bytes_per_token": round(text_bytes / tokens, 3),
        },
        "unigram": {
            "unigram_cross_entropy": unigram_nats(held_out.histogram, model=train.histogram + 1),
            "unigram_entropy": unigram_nats(held_out.histogram, model=held_out.histogram),
        },
        "files": describe_files(folder),
    }
    return summary | {"fingerprint": fingerprint_of(summary)}


def unigram_nats(counts: np.ndarray, *, model: np.ndarray) -> float:
    """Nats per token of tokens that occur `counts` often, for a model that gives each the share it has in `model`.

    With the counts themselves it is their entropy. A model that has met no such token needs an infinity: add one.
    """
    occurring = counts > 0
    shares = model[occurring] / model.sum()
    return float(-(counts[occurring] * np.log(shares)).sum() / counts.sum())
