"""Are the copies that a checkpoint holds of a tensor equal to it? Each of Meta's shards has every norm."""

from dataclasses import replace

from converters.catalog import Catalog
from converters.compare import BLOCK_BYTES
from converters.dtypes import itemsize
from converters.engine.read import CatalogReader
from converters.errors import CheckpointError, list_offenders
from converters.layout import row_blocks


def require_equal_copies(reader: CatalogReader) -> None:
    """Raise CheckpointError with every copy whose bits are not those of its tensor. Reads both, block by block."""
    problems = []
    for fqn, copies in reader.catalog.copies.items():
        entry = reader.catalog.tensors[fqn]
        for chunk in copies:
            alone = Catalog(reader.catalog.root, reader.catalog.container, {fqn: replace(entry, chunks=(chunk,))})
            with CatalogReader(alone) as copy:
                blocks = row_blocks(chunk.box, itemsize(entry.dtype), BLOCK_BYTES)
                if any(reader.read(fqn, box).tobytes() != copy.read(fqn, box).tobytes() for box in blocks):
                    problems.append(f"{fqn}: {chunk.file}")
    if problems:
        raise CheckpointError(
            f"{reader.catalog.root}: shards hold other values of what they all must hold alike:"
            + list_offenders(problems),
            hint="each is compared with the first shard that has it; one is damaged, or of another model",
        )
