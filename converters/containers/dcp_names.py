"""Names of the files of a DCP checkpoint. `.metadata` (names.DCP_METADATA) lists what is in the others."""

import re
from collections.abc import Collection, Iterable

from converters.common.names import DCP_METADATA

DATA_SUFFIX = ".distcp"
RANK_FILE = "__{rank}_0.distcp"  # tensors of a rank; torch's own name of the first file that a rank writes
RANK_BLOB_FILE = "__{rank}_1.distcp"  # plain values apart from the tensors: every rank reads them all
BLOB_FILE = "__blobs_0.distcp"  # small, so that ranks which need a step counter do not open each other's data files
SMALL_TENSOR_FILE = "__small_0.distcp"  # step counters, RNG states: every rank reads them whole
EXTRA_FILE = "__extra_0.distcp"  # what a multimodal checkpoint has beside the text model
RANK_METADATA = re.compile(r"__(0|[1-9]\d*)\.metadata")  # one per rank, if they did not coordinate
RANK_DATA = re.compile(r"__(0|[1-9]\d*)_\d+\.distcp")


def metadata_files(names: Collection[str]) -> tuple[str, ...]:
    """The files that list what a checkpoint has, among the names of its folder; without any it is incomplete."""
    return (DCP_METADATA,) if DCP_METADATA in names else tuple(rank_metadata_files(names))


def rank_metadata_files(names: Iterable[str]) -> list[str]:
    """The per-rank metadata files among the names of a folder, in rank order."""
    ranks = {name: int(match[1]) for name in names if (match := RANK_METADATA.fullmatch(name))}
    return sorted(ranks, key=ranks.__getitem__)
