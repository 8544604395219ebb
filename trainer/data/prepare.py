"""Make a token index from text: train or load a tokenizer, encode, split, measure, and commit with one rename."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from math import nextafter
from pathlib import Path

from converters.common.errors import DataError, list_offenders
from converters.store.commit import staged
from converters.store.json_file import write_json
from converters.tokenizers.assets import find_assets, write_assets
from converters.tokenizers.tokenizer import Tokenizer, load_tokenizer
from trainer.data.index import INDEX_JSON
from trainer.data.sources import Document, Skipped, each_once, find_files, read_documents, standard_library
from trainer.data.train_tokenizer import train_ranks, write_tokenizer
from trainer.data.write_index import NOTHING_HELD_OUT, Split, encode_documents, mark_of, summarize

STANDARD_LIBRARY_BYTES = 8 << 20  # enough to learn from, and a few seconds to encode
_TOKENIZER_SAMPLE_CHARACTERS = 32 << 20  # merges of so small a vocabulary settle long before
_FEWEST_HELD_OUT_DOCUMENTS = 4
_MOST_COUNTED_DOCUMENTS = 64  # that are held out if a share of the hashes gives too few


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The index that was made; index.json says the same. Entropies are in nats per token, of the held-out part."""

    out: str
    tokenizer: str  # `trained`, or the folder it was taken from
    vocab_size: int
    secs: float
    source: str
    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    held_out_by: str  # `document`: whole documents; `tail`: the end of every document; `nothing`
    text_bytes: int
    bytes_per_token: float
    special_tokens: bool  # whether those written in documents are tokens
    special_tokens_as_text: dict[str, int]  # special token that is read as text → number of documents
    skipped: int  # documents that could not be read and were left out, because skip_bad says so
    skipped_because: tuple[str, ...]  # what was wrong with the first few
    left_out: dict[str, int]  # files in folders that are not read: ending, `hidden` or `links to folders` → how many
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
    special_tokens: bool = False,
    skip_bad: bool = False,
    overwrite: bool = False,
) -> PrepareReport:
    """Turn the sources (none: the Python standard library) into a token index at `out`.

    Raises before any work if `out` exists, and with file and line for text that cannot be read, which `skip_bad`
    skips and counts instead. `out` is always a complete index or does not exist.
    """
    started = time.monotonic()
    if not 0 <= held_out < 1:
        raise DataError(f"the held-out share is {held_out}; it must be between 0 and 1 (0: nothing is held out)")
    if max_bytes is not None and max_bytes < 1:
        raise DataError(f"--max-bytes is {max_bytes}; it must be at least 1")
    left_out: Counter[str] = Counter()
    with _writing_told(out), staged(out, overwrite=overwrite, marks=(INDEX_JSON,)) as folder:
        if sources:
            files, source = find_files(sources, left_out=left_out), ", ".join(map(str, each_once(sources)))
        else:
            root, files = standard_library(max_bytes=max_bytes or STANDARD_LIBRARY_BYTES)
            source, max_bytes = f"Python standard library, {root}", None

        skipped = Skipped()

        def documents() -> Iterable[Document]:
            nonlocal skipped
            skipped = Skipped()  # the text is read more than once, each time with the same result
            return read_documents(files, text_key=text_key, max_bytes=max_bytes, skipped=skipped if skip_bad else None)

        if next(iter(documents()), None) is None:
            raise _no_text(skipped)
        used = _settle_tokenizer(folder, documents, vocab_size=vocab_size, existing=tokenizer)
        split = _choose_split(documents(), held_out)
        encoded = encode_documents(folder, documents(), used, split, special_tokens=special_tokens)
        summary = summarize(folder, used, encoded, source=source, split=split, num_skipped=skipped.count)
        write_json(folder / INDEX_JSON, summary)
    return PrepareReport(
        out=str(out),
        tokenizer=str(tokenizer or "trained"),
        vocab_size=used.vocab_size,
        secs=round(time.monotonic() - started, 2),
        skipped_because=tuple(skipped.first),
        left_out={kind: number for kind, number in left_out.most_common() if number},
        **summary["text"],
        **summary["unigram"],
    )


@contextmanager
def _writing_told(out: Path) -> Iterator[None]:
    """Report OSError as a failed write; failed reads are reported where they happen."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}", hint="nothing is left of it") from error


def _settle_tokenizer(
    folder: Path, documents: Callable[[], Iterable[Document]], *, vocab_size: int, existing: Path | None
) -> Tokenizer:
    if existing is None:
        write_tokenizer(folder, train_ranks(_sample(documents()), vocab_size=vocab_size))
        return load_tokenizer(folder)
    return carry_tokenizer(folder, existing)


def carry_tokenizer(folder: Path, existing: Path) -> Tokenizer:
    """Open a tokenizer and copy its files into an index."""
    used = load_tokenizer(existing)
    if used.ends.begin is None and used.ends.end is None:
        raise DataError(f"{existing}: the tokenizer names no begin or end token, so documents could not be separated")
    write_assets(folder, find_assets(existing), {})
    return used


def _sample(documents: Iterable[Document]) -> Iterable[str]:
    left = _TOKENIZER_SAMPLE_CHARACTERS
    for document in documents:
        if document.ids is not None:
            raise DataError(
                f"{document.where} holds token ids, which no tokenizer can be trained on",
                tries=["--tokenizer FOLDER, of the tokenizer that made them"],
            )
        yield document.text
        left -= len(document.text)
        if left < 0:
            return


def _no_text(skipped: Skipped) -> DataError:
    if not skipped.count:
        return DataError("there is no text: every document is empty")
    return DataError(
        f"there is no text: no document could be read, and {skipped.count:,} were skipped, such as:"
        + list_offenders(skipped.first)
    )


def _choose_split(documents: Iterable[Document], share: float) -> Split:
    """Whole documents, unless that would hold out hardly any or all of them; then tails, unless those are empty.

    Then the share is counted in documents, at least one. Raises DataError if nothing would be left for a part.
    """
    if not share:
        return NOTHING_HELD_OUT
    by_document, tails = Split(share, "document"), Split(share, "tail")
    num_documents = num_held_out = longest = in_tails = largest = 0
    smallest: list[int] = []  # marks, negated: a heap
    for document in documents:
        mark = mark_of(document)
        num_documents += 1
        num_held_out += mark < share * 2**64
        largest = max(largest, mark)
        heappush(smallest, -mark)
        if len(smallest) > _MOST_COUNTED_DOCUMENTS:
            heappop(smallest)
        longest = max(longest, len(document.content))
        in_tails += len(document.content) - tails.tail_of(document.content)
    if _FEWEST_HELD_OUT_DOCUMENTS <= num_held_out < num_documents:
        return by_document
    if in_tails:
        return tails
    marks = sorted(-mark for mark in smallest)
    last = marks[min(max(1, round(share * num_documents)), len(marks)) - 1]
    if last == largest:  # one document, or equal ones
        what = f"the longest of its documents ({num_documents:,}) has {longest:,} characters or ids"
        raise DataError(
            f"the text is too short: {what}, of which a share of {share} is none, so nothing would be held out",
            tries=["--held-out 0.5", "--held-out 0, which holds nothing out"] if longest > 1 else ["--held-out 0"],
        )
    return Split(nextafter(last / 2**64, 1.0), "document")
