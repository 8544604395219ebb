"""Identity of a checkpoint's weights and tokenizer: equal for equal content, in any folder and format."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path

from converters.common.box import Box
from converters.common.errors import ConfigError, list_offenders
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.families.registry import get_family
from converters.naming.namings import fused_with
from converters.source.weights import NativeWeights
from converters.store.digest import TensorDigest, digest_of_sum
from converters.store.location import Location
from converters.store.manifest import TensorSum
from converters.tokenizers.assets import find_assets
from converters.views.view import View

_SAMPLED = 512  # elements at each end of a tensor
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """`weights` and `tokenizer` identify the content; `checkpoint` is where it was read from."""

    checkpoint: Location
    weights: str
    tokenizer: str


def origin_of(weights: NativeWeights, *, tokenizer: Path) -> Origin:
    """The origin of open weights and of the tokenizer in a folder. Takes tenths of a second for any model size."""
    return Origin(weights.catalog.location.absolute(), _weights_identity(weights), _tokenizer_identity(tokenizer))


def _weights_identity(weights: NativeWeights) -> str:
    """From the manifest's digests, else from a sample of the values: fine-tuned models share all names and sizes.

    Both use native names and values, so they do not depend on the format.
    """
    manifest, used, stored = weights.catalog.manifest, weights.source.ledger.used, weights.catalog.tensors
    names = {name for names in used.values() for name in names}
    scales = weights.source.ledger.scales
    files = {chunk.file for name in names for chunk in stored[name].chunks}
    if manifest is not None and files <= manifest.files.keys():  # else the manifest describes other files
        listed = {name: manifest.tensors[name] for name in names - scales if name in manifest.tensors}
        native = weights.quantized.dtype if weights.quantized else ""
        is_known = all(entry.digest and entry.digest_dtype in ("", native) for entry in listed.values())
        if len(listed) == len(names - scales) and is_known:
            digests = _native_digests(weights, listed)
            lines = "".join(f"{fqn} {digests[fqn]}\n" for fqn in sorted(digests))
            return f"digests {blake2b(lines.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"
    return f"sampled {_sample(weights.source, weights.tensors)}"


def _native_digests(weights: NativeWeights, listed: Mapping[str, TensorSum]) -> dict[str, str]:
    """Digests by native name; for tensors that a naming of the family fuses a sample, because halves have none."""
    source, family = weights.source, get_family(weights.info.family)
    digests = {}
    for fqn, names in source.ledger.used.items():
        info = source.tensors[fqn]
        if fused_with(fqn, family):
            digests[fqn] = _sample(source, [fqn])
            continue
        if names:
            total = sum(listed[name].sum_of_rows for name in names if name not in source.ledger.scales)
        else:  # zeros that the checkpoint does not have, and others do
            zeros = TensorDigest(info.dtype, info.shape)
            zeros.update(Box.whole(info.shape), source.read(fqn, Box.whole(info.shape)))
            total = zeros.partial
        digests[fqn] = digest_of_sum(total, info.dtype, info.shape)
    return digests


def _sample(source: View, fqns: Iterable[str]) -> str:
    """Digest of each tensor's name, dtype, shape, and a few elements of its first and of its last row."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for fqn in sorted(fqns):
        info = source.tensors[fqn]
        digest.update(f"{fqn} {info.dtype} {list(info.shape)}\n".encode())
        if not info.shape or not prod(info.shape):
            continue
        *rows, width = info.shape
        num = min(_SAMPLED, width)
        sizes = (*(1 for _ in rows), num)
        for offsets in ((*(0 for _ in rows), 0), (*(size - 1 for size in rows), width - num)):
            digest.update(source.read(fqn, Box(offsets, sizes)).tobytes())
    return digest.hexdigest()


def _tokenizer_identity(folder: Path) -> str:
    """Digest of the vocabulary files; tokens added to a prompt show in the prompt's tokens."""
    assets, digest = find_assets(folder), blake2b(digest_size=_DIGEST_BYTES)
    for name in (TOKENIZER_JSON, TIKTOKEN_MODEL):
        if name in assets:
            digest.update(assets[name].read_bytes())
    return digest.hexdigest()


def check_same_inputs(inputs: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Raise ConfigError if ranks have read different content, with every rank's path of the first such input.

    `inputs`: for each rank, name of an input → (identity, path).
    """
    for name, (identity, _) in inputs[0].items():
        differs = [rank_inputs[name][0] != identity for rank_inputs in inputs]
        if any(differs):
            paths = [
                f"rank {rank}: {inputs[rank][name][1]}" + (" (different)" if differs[rank] else "")
                for rank in range(len(inputs))
            ]
            raise ConfigError(
                f"ranks do not read the same {name}:" + list_offenders(paths, most=64),
                hint="every machine needs a copy of the same files, and nothing may change them during the start",
            )
