"""Open an original Meta release as a catalog: `consolidated.00.pth` of a single-shard model."""

from pathlib import Path

from converters.catalog import Catalog
from converters.errors import CheckpointError, UnsupportedError
from converters.formats import torch_file
from converters.names import META_PARAMS, META_SHARD


def read_catalog(path: Path) -> Catalog:
    """The catalog of a folder with `consolidated.00.pth`. Several shards are refused: joining them is not covered."""
    shards = sorted(p.name for p in path.glob("consolidated.*.pth"))
    if shards != [META_SHARD.format(index=0)]:
        if META_SHARD.format(index=0) not in shards:
            raise CheckpointError(
                f"{path}: {META_SHARD.format(index=0)} is missing", hint=f"found: {', '.join(shards)}"
            )
        raise UnsupportedError(
            f"{path}: {len(shards)} shards ({shards[0]} … {shards[-1]}); only single-shard releases are covered",
            hint="the 8B, 3B and 1B releases have one shard; for larger ones start from the Hugging Face folder",
        )
    if not (path / META_PARAMS).exists():
        raise CheckpointError(f"{path}: {META_PARAMS} is missing", hint="an original release has it beside the weights")
    catalog = torch_file.read_catalog(path / shards[0])
    catalog.container = "meta"
    return catalog
