"""A token index: text turned into memory-mapped token ids, with document offsets, a held-out part and a fingerprint.

index.json                  what is in it, and the digests of the other files
train_tokens.npy            token ids one after another, uint16 or uint32; each document framed by its begin and end
train_offsets.npy           int64 [documents + 1]: where each document starts
held_out_tokens.npy, held_out_offsets.npy
tokenizer.model, tokenizer.json, tokenizer_config.json, generation_config.json
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from converters.common.errors import DataError
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_JSON
from converters.common.sizes import GIB
from converters.tokenizers.assets import CARRIED

VERSION = 1
INDEX_JSON = "index.json"
TRAIN, HELD_OUT = "train", "held_out"
SPLITS = (TRAIN, HELD_OUT)
MAX_DIGESTED_BYTES = GIB  # digests of more take too long at the start: sizes are compared instead


def tokens_file(split: str) -> str:
    return f"{split}_tokens.npy"


def offsets_file(split: str) -> str:
    return f"{split}_offsets.npy"


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """An opened index. `summary` is index.json: sizes, sources, entropies."""

    folder: Path
    fingerprint: str
    vocab_size: int
    summary: Mapping[str, Any]

    @property
    def unigram_entropy(self) -> float | None:
        """Loss in nats per token, on the held-out part, of a model that knows only how frequent tokens are."""
        entropy: float | None = self.summary.get("unigram", {}).get("unigram_entropy")
        return entropy

    @property
    def tokenizer_digests(self) -> frozenset[str]:
        """Digests of the files that say which text an id stands for; one of the files is enough."""
        files = self.summary["files"]
        return frozenset(files[name]["xxh3_128"] for name in (TIKTOKEN_MODEL, TOKENIZER_JSON) if name in files)

    def tokens(self, split: str) -> np.ndarray:
        """All token ids of a split, memory-mapped."""
        return _map(self.folder / tokens_file(split))

    def offsets(self, split: str) -> np.ndarray:
        """Start of each document in `tokens`, and the end of the last."""
        return _map(self.folder / offsets_file(split))


def open_index(folder: Path | str) -> TokenIndex:
    """Open and check an index. Raises DataError if it is missing, damaged, or was changed after it was made.

    Files up to 1 GiB are read through and compared with their digests; of larger ones only the size is compared.
    """
    folder = Path(folder)
    summary = _read_summary(folder)
    try:
        fingerprint, vocab_size, files = summary["fingerprint"], summary["vocab_size"], summary["files"]
        expected = fingerprint_of(summary)
        changed = [name for name, file in files.items() if _differs(folder / name, file["bytes"], file["xxh3_128"])]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / INDEX_JSON} is not the index of `titan data prepare`: {error!r}") from None
    if fingerprint != expected:
        raise DataError(f"{folder / INDEX_JSON} was changed by hand: its fingerprint is not that of its content")
    if changed:
        raise DataError(
            f"{folder}: {', '.join(changed)} missing or changed since the index was made",
            hint="make it again from the text; files of an index are never edited",
            tries=["titan data prepare … --overwrite"],
        )
    return TokenIndex(folder, fingerprint, vocab_size, summary)


def read_vocab_size(folder: Path) -> int:
    """Number of ids of the tokenizer that an index was made with. Raises DataError if index.json does not say it."""
    summary = _read_summary(folder)
    vocab_size = summary.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise DataError(f"{folder / INDEX_JSON} is not the index of `titan data prepare`: it has no vocab_size")
    return vocab_size


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and digest of every file of an index but index.json itself."""
    data = [name for split in SPLITS for name in (tokens_file(split), offsets_file(split))]
    names = data + [name for name in CARRIED if (folder / name).is_file()]
    return {name: {"bytes": (folder / name).stat().st_size, "xxh3_128": digest_of(folder / name)} for name in names}


def fingerprint_of(summary: Mapping[str, Any]) -> str:
    """One hash of everything that decides which numbers a run sees: the format, the vocabulary and every file."""
    decisive = [
        summary["version"],
        summary["vocab_size"],
        sorted((n, f["xxh3_128"]) for n, f in summary["files"].items()),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(decisive).encode())


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_JSON
    if not path.is_file():
        what = "holds no token index (no index.json)" if folder.is_dir() else "is no folder, so no token index"
        raise DataError(f"{folder} {what}", tries=[f"titan data prepare --out {folder}"])
    try:
        summary: dict[str, Any] = json.loads(path.read_text("utf-8"))
        version = summary["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the index of `titan data prepare`: {error!r}") from None
    if version != VERSION:
        raise DataError(f"{path} has version {version!r}; this titan reads version {VERSION}")
    return summary


def _differs(path: Path, num_bytes: int, digest: str) -> bool:
    if not path.is_file() or path.stat().st_size != num_bytes:
        return True
    return num_bytes <= MAX_DIGESTED_BYTES and digest_of(path) != digest


def digest_of(path: Path) -> str:
    """The xxh3_128 of a file's content, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
    return digest.hexdigest()


def _map(path: Path) -> np.ndarray:
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array
