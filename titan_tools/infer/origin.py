"""Which weights and tokenizer a run has, so that a later one can tell whether they are the same; paths do not count."""

from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path

from converters.assets import find_assets
from converters.catalog import Box
from converters.manifest import read_manifest
from converters.names import TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.view import View
from converters.weights import NativeWeights

_SAMPLED = 512  # elements at each end of a tensor
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """`weights` and `tokenizer` are equal where those are; `checkpoint` says to a person where they lay."""

    checkpoint: Path
    weights: str
    tokenizer: str


def origin_of(weights: NativeWeights, *, tokenizer: Path) -> Origin:
    """The origin of weights that are open and of the tokenizer in a folder. Takes tenths of a second for any size."""
    return Origin(weights.catalog.root.absolute(), _weights_identity(weights), _tokenizer_identity(tokenizer))


def _weights_identity(weights: NativeWeights) -> str:
    """By the manifest's digests; else by a sample, since models of one shape do not differ in names and sizes.

    Both are of values under native names: the same in any format.
    """
    manifest, used, stored = read_manifest(weights.catalog.root), weights.source.ledger.used, weights.catalog.tensors
    files = {chunk.file for name in used.values() for chunk in stored[name].chunks}
    if manifest is not None and files <= manifest.files.keys():  # else it is that of something beside these weights
        digests = {fqn: manifest.tensors[name].digest for fqn, name in used.items() if name in manifest.tensors}
        if len(digests) == len(used) and all(digests.values()):
            told = "".join(f"{fqn} {digests[fqn]}\n" for fqn in sorted(digests))
            return f"digests {blake2b(told.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"
    return f"sampled {_sample(weights.source)}"


def _sample(source: View) -> str:
    """Of each tensor: name, dtype, shape, and a few elements of its first and of its last row."""
    told = blake2b(digest_size=_DIGEST_BYTES)
    for fqn in sorted(source.tensors):
        info = source.tensors[fqn]
        told.update(f"{fqn} {info.dtype} {list(info.shape)}\n".encode())
        if not info.shape or not prod(info.shape):
            continue
        *rows, width = info.shape
        num = min(_SAMPLED, width)
        sizes = (*(1 for _ in rows), num)
        for offsets in ((*(0 for _ in rows), 0), (*(size - 1 for size in rows), width - num)):
            told.update(source.read(fqn, Box(offsets, sizes)).tobytes())
    return told.hexdigest()


def _tokenizer_identity(folder: Path) -> str:
    """Of the files that say which text is which token; who adds which token to a prompt shows in its tokens."""
    assets, told = find_assets(folder), blake2b(digest_size=_DIGEST_BYTES)
    for name in (TOKENIZER_JSON, TIKTOKEN_MODEL):
        if name in assets:
            told.update(assets[name].read_bytes())
    return told.hexdigest()
