"""Text that the `datasets` library streams file by file, from the hub or from disk, as C4."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.common.errors import DataError, UnsupportedError
from trainer.data.sources import JSON_LINES, PARQUET, Document, find_files

C4_ON_THE_HUB = ("allenai/c4", "en")
_FILES_OF_SPLIT = {"train": "c4-train", "validation": "c4-validation"}  # how C4's own files are called


@dataclass(frozen=True, slots=True)
class StreamedText:
    """Files of documents; `identity` holds plain values that identify them."""

    name: str
    identity: Any
    num_files: int
    dataset: Any  # datasets.IterableDataset

    def texts(self, file: int, *, skip: int = 0) -> Iterator[str]:
        """The documents of a file in order, from number `skip` on. Raises DataError if they cannot be read."""
        number = skip
        try:
            part = self.dataset.shard(num_shards=self.num_files, index=file)
            for row in part.skip(skip) if skip else part:
                text = row["text"]
                if isinstance(text, bytes):  # a parquet column without the mark that its bytes are text
                    text = text.decode("utf-8")
                if not isinstance(text, str):
                    raise DataError(f"{self.name}, file {file}: document {number} has no text under 'text'")
                yield text
                number += 1
        except DataError:
            raise
        except Exception as error:  # the library's, its file systems' and its parsers' errors have no common base
            raise DataError(
                f"{self.name}, file {file}: cannot be read after {number} documents: {_one_line(error)}",
                hint="`titan data prepare` reports the line in a local file, and can skip such lines",
            ) from error

    def documents(self) -> Iterator[Document]:
        """All of them, file after file."""
        for file in range(self.num_files):
            for number, text in enumerate(self.texts(file), start=1):
                if text:
                    yield Document(text, f"{self.name}, file {file}, document {number}")


def stream_c4(split: str, path: str | None) -> StreamedText:
    """C4's `train` or `validation`, from the hub; or from a file or folder: a copy of C4, or any files in its format.

    Raises DataError if there is nothing to read, UnsupportedError if `datasets` is not installed.
    """
    datasets = _import_datasets()
    if path is None:
        repository, config = C4_ON_THE_HUB
        name, identity = f"{repository} ({config}, {split})", [*C4_ON_THE_HUB, split]
        try:
            dataset = datasets.load_dataset(repository, config, split=split, streaming=True)
        except Exception as error:
            raise DataError(
                f"{name} cannot be reached: {_one_line(error)}",
                hint="a machine without access to the hub needs the files",
                tries=["--training.dataset_path FOLDER", "--validation.dataset_path FOLDER"],
            ) from error
        return StreamedText(name, identity, dataset.num_shards, dataset)
    files = _files_of(Path(path), split)
    kind = "parquet" if files[0].name.endswith(PARQUET) else "json"
    try:
        dataset = datasets.load_dataset(kind, data_files=list(map(str, files)), split="train", streaming=True)
    except Exception as error:
        raise DataError(f"{path}: cannot be read as {kind}: {_one_line(error)}") from error
    sizes = [[file.name, file.stat().st_size] for file in files]
    if dataset.num_shards != len(files):
        raise DataError(f"{path}: {len(files)} files are {dataset.num_shards} to the datasets library")
    return StreamedText(path, sizes, len(files), dataset)


def find_stream(split: str, path: str | None) -> Sequence[Path]:
    """The files that `stream_c4` would read, none of the hub's; raises as it does if there are none."""
    _import_datasets()
    return _files_of(Path(path), split) if path else ()


def _files_of(path: Path, split: str) -> Sequence[Path]:
    """The files of the split if they are named as C4's are, else all. English if the folder is a copy of C4."""
    english = path / C4_ON_THE_HUB[1]
    files = find_files([english if english.is_dir() else path], kinds=JSON_LINES + PARQUET)
    named = [file for file in files if file.name.startswith(tuple(_FILES_OF_SPLIT.values()))]
    own = [file for file in named if file.name.startswith(_FILES_OF_SPLIT[split])]
    if named and not own:
        raise DataError(f"{path} holds files of C4, but none of its {split} split")
    files = own or files
    if len({file.name.endswith(PARQUET) for file in files}) > 1:
        raise DataError(f"{path}: parquet files and JSON lines cannot be streamed together")
    return files


def _one_line(error: Exception) -> str:
    """An error in one line, with the cause that the library wraps."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            "c4 is streamed by the `datasets` library, which is not installed",
            tries=["pip install 'titan-tools[data]'"],
        ) from None
    datasets.disable_progress_bars()
    return datasets
