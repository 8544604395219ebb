"""Encode documents into the files of a token index, and measure them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from converters.common.errors import DataError
from converters.tokenizers.tokenizer import Tokenizer
from trainer.data.document_text import before_special_token
from trainer.data.index import HELD_OUT, SPLITS, TRAIN, VERSION, describe_files, fingerprint_of
from trainer.data.sources import Document
from trainer.data.token_file import TokenFile


@dataclass(frozen=True, slots=True)
class Split:
    """The held-out part: nothing, documents by their hash, so that equal ones stay together, or the tail of each."""

    share: float
    by: str  # `document` or `tail`

    def holds_out(self, document: Document) -> bool:
        if self.by != "document" or not self.share:
            return False
        return mark_of(document) < self.share * 2**64

    def tail_of(self, content: str | np.ndarray) -> int:
        """The place where the held-out tail begins; the content's length if documents are held out whole."""
        return len(content) - round(len(content) * self.share) if self.by == "tail" else len(content)


def mark_of(document: Document) -> int:
    """A hash of the content, 64 bits: documents with the smallest are held out."""
    content = document.content
    hashed = content.encode() if isinstance(content, str) else np.ascontiguousarray(content).data
    return xxhash.xxh3_64_intdigest(hashed)


NOTHING_HELD_OUT = Split(0.0, "document")


@dataclass(frozen=True, slots=True)
class Encoded:
    """The files of both splits. `special_as_text`: special token that is read as text → number of documents."""

    files: dict[str, TokenFile]
    special_tokens: bool
    special_as_text: Counter[str]


def encode_documents(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    split: Split,
    *,
    special_tokens: bool = False,
    most_tokens: int | None = None,
) -> Encoded:
    """Write the token and offset files of both splits, up to the document with which there are `most_tokens`.

    `special_tokens`: those written in a document are tokens, not text. Raises DataError if a split that is wanted
    stays empty.
    """
    files = {name: TokenFile(folder, name, tokenizer, special_tokens=special_tokens) for name in SPLITS}
    special_as_text = Counter[str]()
    try:
        for document in documents:
            content, where = document.content, document.where
            if isinstance(content, str) and not special_tokens:
                special_as_text.update(tokenizer.special_in(content))
            if split.holds_out(document):
                files[HELD_OUT].add(content, where)
                continue
            cut = split.tail_of(content)
            if special_tokens and isinstance(content, str) and cut < len(content):
                cut = before_special_token(tokenizer, content, cut)
            if cut > 0:
                files[TRAIN].add(content[:cut], where)
            if cut < len(content):
                files[HELD_OUT].add(content[cut:], where)
            if most_tokens is not None and sum(file.num_tokens for file in files.values()) >= most_tokens:
                break
    finally:
        for file in files.values():
            file.close()
    if not any(file.num_tokens for file in files.values()):
        raise DataError("there is no text: every document is empty")
    empty = [name for name, file in files.items() if not file.num_tokens]
    if empty and split.share:
        total = sum(file.num_tokens for file in files.values())
        raise DataError(
            f"the text is too short: of its {total:,} tokens nothing is left for the {empty[0]} part",
            hint="another share to hold out, or more text",
        )
    return Encoded(files, special_tokens, special_as_text)


def summarize(
    folder: Path, tokenizer: Tokenizer, encoded: Encoded, *, source: str, split: Split, num_skipped: int = 0
) -> dict[str, Any]:
    """The content of index.json. If nothing is held out, the entropies are those of all there is."""
    train, held_out = encoded.files[TRAIN], encoded.files[HELD_OUT]
    text_bytes = train.text_bytes + held_out.text_bytes
    tokens = train.num_tokens + held_out.num_tokens
    measured = held_out if held_out.num_tokens else train
    summary = {
        "version": VERSION,
        "vocab_size": tokenizer.vocab_size,
        "text": {
            "source": source,
            "documents": train.num_documents + (held_out.num_documents if split.by == "document" else 0),
            "tokens": tokens,
            "held_out_documents": held_out.num_documents,
            "held_out_tokens": held_out.num_tokens,
            "held_out_by": split.by if split.share else "nothing",
            "text_bytes": text_bytes,
            "bytes_per_token": round(text_bytes / tokens, 3),
            "skipped": num_skipped,
            "special_tokens": encoded.special_tokens,
            "special_tokens_as_text": dict(sorted(encoded.special_as_text.items())),
        },
        "unigram": {
            "unigram_cross_entropy": unigram_nats(measured.histogram, model=train.histogram + 1),
            "unigram_entropy": unigram_nats(measured.histogram, model=measured.histogram),
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
