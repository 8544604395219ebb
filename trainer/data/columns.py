"""Readers that need pyarrow: text columns of parquet files, and zstd files."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from converters.common.errors import DataError, UnsupportedError

_ROWS_AT_ONCE = 1024  # of one column: some MiB of text


def parquet_values(path: Path, column: str) -> Iterator[tuple[str, bytes | None]]:
    """`file:row` and the bytes of the text in that row, counted from 1; None if there is none.

    Raises DataError for a file that is damaged or cut off, or has no such column of text.
    """
    _import_pyarrow(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            _refuse_other_column(path, file.schema_arrow, column)
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
                values = batch.column(0).cast(pa.large_binary()).to_pylist()  # as bytes: one bad text is not the file
                for value in values:
                    number += 1
                    yield f"{path}:{number}", value
    except (pa.ArrowException, OSError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read after row {number}: {what}", hint="is the file whole?") from None


def decompressed(path: Path) -> BinaryIO:
    """A zstd file opened for reading what is in it; OSError if it is damaged."""
    _import_pyarrow(path)
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


def _refuse_other_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names or not _is_text(schema.field(column).type):
        there = ", ".join(f"{field.name!r} ({field.type})" for field in list(schema)[:10]) or "none"
        raise DataError(
            f"{path}: no column of text called {column!r}; there are {there}",
            tries=["titan data prepare … --text-key COLUMN"],
        )


def _is_text(kind: Any) -> bool:
    """Whether values of an Arrow type are text: also encoded (categories), as bytes, and if there is none at all."""
    import pyarrow as pa

    text = {pa.string(), pa.large_string(), pa.string_view()}
    if isinstance(kind, pa.BaseExtensionType):  # bytes with another meaning, such as a geometry, are no text
        return kind.storage_type in text
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return kind in text | {pa.binary(), pa.large_binary(), pa.binary_view(), pa.null()}


def _import_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            f"{path}: reading it takes pyarrow, which is not installed", tries=["pip install 'titan-tools[data]'"]
        ) from None
