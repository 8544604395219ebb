"""The global order of samples of one source, or of several mixed by weight, with random access.

A sample is a window of seq_len + 1 tokens at a fixed offset, or a pack of documents. Each source has an endless order,
shuffled by Grain in every epoch. A mixture assigns indexes to its sources by arithmetic, as Grain's `MapDataset.mix`
does, but with exact weights: after any number of samples each source has had its share, up to one sample per source.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import xxhash

from converters.common.errors import ConfigError, DataError
from converters.common.extensions import ExtensionError, check_protocol, where_defined
from trainer.data.index import HELD_OUT
from trainer.data.packing import BestFit, refuse_wrong_offsets
from trainer.data.position import Cut
from trainer.data.sample import NO_DOCUMENTS, DocumentRules, Sample, packed_sample, window_sample


class TokenSource(Protocol):
    """Token ids, one array per split (`train`, `held_out`); `fingerprint` changes when any id does.

    A source may also have `offsets(split)`, int64 [documents + 1]: where each document begins in `tokens`, and the end
    of the last. Masks by documents need it.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...  # every id is below it
    @property
    def unigram_entropy(self) -> float | None: ...  # of the held-out ids, nats per token; None if not measured

    def tokens(self, split: str) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Weighted:
    """A source of a mixture with its weight; weights need not sum to 1."""

    name: str
    source: TokenSource
    weight: float


def refuse_no_source(source: Any, what: str, *, made_by: Any) -> None:
    """Raise ExtensionError if what a registered dataset's function returned is not a TokenSource."""
    check_protocol(source, TokenSource, what, made_by=made_by)
    if not isinstance(source.vocab_size, int):
        raise ExtensionError(f"{where_defined(source)}: `vocab_size` of {what} is {source.vocab_size!r}, not an int")


def tokens_of(source: TokenSource, split: str) -> np.ndarray:
    """The token ids of a split. Raises ExtensionError if a registered dataset returns something else."""
    tokens: np.ndarray = source.tokens(split)
    is_array = isinstance(tokens, np.ndarray)
    if not (is_array and tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer)):
        found = f"an array of {tokens.dtype} of shape {tokens.shape}" if is_array else f"a {type(tokens).__name__}"
        raise ExtensionError(
            f"{where_defined(source.tokens)}: `tokens` returned {found}, not a numpy array of integers of one dimension"
        )
    return tokens


def refuse_no_held_out(source: TokenSource, split: str) -> None:
    """Raise DataError if validation would read an index without a held-out part."""
    if split == HELD_OUT and not len(tokens_of(source, split)):
        raise DataError(
            "the token index has no held-out part to validate on",
            hint="it was made with `titan data prepare --held-out 0`",
            tries=["titan data prepare … --held-out 0.02 --overwrite", "--validation.no_enable"],
        )


def document_offsets(source: TokenSource, split: str) -> np.ndarray:
    """The places where a source's documents begin, and the end of the last. Raises DataError if it does not say so."""
    offsets = getattr(source, "offsets", None)
    if offsets is None:
        raise DataError(
            "the data does not say where its documents begin, which training.document_mask = offsets needs",
            hint="a registered dataset says it by a method offsets(split)",
            tries=["--training.document_mask none", "--training.document_mask eos"],
        )
    values: np.ndarray = offsets(split)
    refuse_wrong_offsets(values, len(tokens_of(source, split)))
    return values


class SourceSamples:
    """The samples of one source, in the order of `seed`."""

    def __init__(
        self,
        source: TokenSource,
        split: str,
        *,
        seq_len: int,
        seed: int,
        number: int = 0,
        documents: DocumentRules = NO_DOCUMENTS,
    ):
        """`number` is the source's number in a mixture, so that sources of one size are shuffled differently."""
        self._tokens = tokens_of(source, split)
        refuse_no_held_out(source, split)
        self._vocab_size, self._split, self._seq_len = source.vocab_size, split, seq_len
        self._source_fingerprint, self.cut = source.fingerprint, Cut(documents.packing, seq_len)
        self._documents = documents
        self._offsets = document_offsets(source, split) if documents.needs_offsets else None
        self._packs: BestFit | None = None
        self.num_samples = max(0, (len(self._tokens) - 1) // seq_len)
        if documents.packing == "best_fit":
            assert self._offsets is not None
            self._packs = BestFit(self._offsets, seq_len)
            self.num_samples = len(self._packs)
        self._seed, self._number = seed, number

    @cached_property
    def _order(self) -> Sequence[int]:
        return _shuffled(self.num_samples, self._seed, self._number)

    def shuffle(self) -> None:
        """Make the order now: it takes a second to import Grain."""
        _ = self._order

    def fingerprint_of(self, cut: Cut) -> str:
        """The fingerprint of this source's samples, if they are cut so."""
        packed = "" if cut.packing == "concatenated" else f"/{cut.packing}"
        return f"{self._source_fingerprint}/{self._split}{packed}/{cut.seq_len}"

    def __str__(self) -> str:
        size = f"{len(self._tokens)} tokens, which is {self.num_samples} samples of {self._seq_len}"
        return f"the {self._split} part has {size}"

    def at(self, place: int) -> Sample:
        """The sample at a place of the order. Raises DataError for a token id that the source denied."""
        number = self._order[place]
        if self._packs is not None:
            return packed_sample([self._ids(*piece) for piece in self._packs.pieces(number)], self._seq_len)
        start = number * self._seq_len
        stop = start + self._seq_len + 1
        return window_sample(self._ids(start, stop), self._begins_in(start, stop), self._documents)

    def _ids(self, start: int, stop: int) -> np.ndarray:
        ids = self._tokens[start:stop]
        largest = int(ids.max())
        if largest >= self._vocab_size:
            place = start + int(ids.argmax())
            raise DataError(
                f"token {place} of the {self._split} part has id {largest}, but the vocabulary has {self._vocab_size}"
            )
        return ids

    def _begins_in(self, start: int, stop: int) -> np.ndarray | None:
        """The places in a window where a document begins."""
        if self._offsets is None:
            return None
        first, last = np.searchsorted(self._offsets, (start, stop))
        return self._offsets[first:last] - start


def refuse_too_few(samples: "SourceSamples | MixedSamples", batch_size: int) -> None:
    """Raise DataError if a source has not even the samples of one batch. A mixture repeats its sources."""
    if samples.num_samples < batch_size and isinstance(samples, SourceSamples):
        raise DataError(
            f"{samples}: too few for one batch of {batch_size}",
            hint="prepare more text, or use a smaller batch or seq_len",
        )


def refuse_too_many_steps(steps: int, num_batches: int, *, name: str, batch_size: int) -> None:
    """Raise ConfigError if a validation asks for more batches than a source's held-out part has."""
    if steps > num_batches:
        raise ConfigError(
            f"validation.steps = {steps}, but the held-out part of {name} has {num_batches} batches of {batch_size}"
            " samples",
            tries=[f"--validation.steps {num_batches}", "--validation.steps -1, for all there are"],
        )


class MixedSamples:
    """The samples of several sources, each as often as its weight says."""

    def __init__(
        self,
        mixture: Sequence[Weighted],
        split: str,
        *,
        seq_len: int,
        seed: int,
        documents: DocumentRules = NO_DOCUMENTS,
    ):
        parts = [
            SourceSamples(part.source, split, seq_len=seq_len, seed=seed, number=number, documents=documents)
            for number, part in enumerate(mixture)
        ]
        pairs = zip(mixture, parts, strict=True)
        empty = [f"{part.name}: {samples}" for part, samples in pairs if not samples.num_samples]
        if empty:
            raise DataError("; ".join(empty), hint="each source of a mixture needs at least one whole sample")
        self._parts, self._shares = parts, whole_shares([part.weight for part in mixture])
        self._split, self.cut = split, Cut(documents.packing, seq_len)
        self.num_samples = sum(part.num_samples for part in parts)

    def fingerprint_of(self, cut: Cut) -> str:
        """The fingerprint of the mixture, if the samples of each source are cut so."""
        pairs = zip(self._shares, self._parts, strict=True)
        named = "\n".join(f"{share} {part.fingerprint_of(cut)}" for share, part in pairs)
        return f"{xxhash.xxh3_128_hexdigest(named.encode())}/{self._split}/{cut.seq_len}"

    def __str__(self) -> str:
        return f"the sources have {self.num_samples} samples"

    def shuffle(self) -> None:
        """Make the orders of all sources now."""
        for part in self._parts:
            part.shuffle()

    def at(self, place: int) -> Sample:
        part, place_in_part = place_in_mixture(place, self._shares)
        return self._parts[part].at(place_in_part)


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of the weights, as these are written: 0.7 and 0.3 are 7 and 3."""
    exact = [Fraction(repr(weight)) for weight in weights]
    denominator = math.lcm(*(share.denominator for share in exact))
    shares = [int(share * denominator) for share in exact]
    return tuple(share // math.gcd(*shares) for share in shares)


def place_in_mixture(place: int, shares: Sequence[int]) -> tuple[int, int]:
    """The source of an index, and the index within that source.

    The first source takes ⌈n·share/all⌉ of the first n places, the next its part of those that are left, and so on.
    """
    left = sum(shares)
    for number, share in enumerate(shares):
        others, others_after = place * (left - share) // left, (place + 1) * (left - share) // left
        if others == others_after:
            return number, place - others
        place, left = others, left - share
    raise AssertionError(shares)


def _shuffled(num_samples: int, seed: int, number: int) -> Sequence[int]:
    """An endless order of the samples, with another permutation for every epoch."""
    grain = _import_grain()
    key = seed.to_bytes(16, "little") + (number.to_bytes(4, "little") if number else b"")
    folded = xxhash.xxh32_intdigest(key)  # Grain takes 32 bits, and adds the epoch to them
    order: Sequence[int] = grain.MapDataset.range(num_samples).shuffle(seed=folded).repeat()
    return order


def _import_grain() -> Any:
    """Import Grain without its warning about JAX's profiler, which is not used here."""
    import absl.logging  # noqa: F401  its logger must be made by absl itself before it is asked for by name

    logger = logging.getLogger("absl")

    def is_relevant(record: logging.LogRecord) -> bool:
        return "jax profiler" not in record.getMessage()

    logger.addFilter(is_relevant)
    try:
        import grain
    finally:
        logger.removeFilter(is_relevant)
    return grain
