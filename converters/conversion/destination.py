"""The destination of an output: a folder, or one file. Both are checked first, and appear complete or not at all."""

from dataclasses import dataclass, replace

from converters.common.errors import CheckpointError, TitanError
from converters.containers import torch_file
from converters.containers.registry import CONTAINERS, weight_suffixes
from converters.containers.sniff import first_bytes, is_zip
from converters.conversion.execute import check_places, execute
from converters.conversion.records import Execution, Plan, Run, no_small_files
from converters.conversion.remarks import describe_left_files, describe_lone_file, describe_tokenizer
from converters.families.args import DecoderArgs
from converters.formats.base import Format
from converters.model.model_info import ModelInfo
from converters.store.base import Store, is_present, open_store
from converters.store.local_files import is_link
from converters.store.location import Location, Place, locate
from converters.tokenizers.assets import tokenizer_remark
from converters.views.catalog import Catalog


@dataclass(frozen=True, slots=True)
class FolderDestination:
    """A folder of weights, manifest and small files."""

    location: Location
    format: Format

    def check(self, src: Place, *, overwrite: bool) -> None:
        """Raise CheckpointError if the output may not be written."""
        check_places(src, self.location, overwrite=overwrite)

    def remarks(self, catalog: Catalog, info: ModelInfo) -> list[str]:
        """What happens to the files that are not weights, if a user should know. `info`: of the output."""
        of_meta, tokenizer = CONTAINERS[catalog.container].keeps_tokenizer_model, ""
        if isinstance(info.args, DecoderArgs):
            vocab_size = info.args.vocab_size
            tokenizer = tokenizer_remark(info.assets, to=self.format.name, vocab_size=vocab_size, of_meta=of_meta)
        left_files = describe_left_files(catalog, info) if not catalog.is_lone_file else ""
        return [tokenizer, describe_tokenizer(info), *info.remarks, left_files]

    def write(self, plan: Plan, run: Run) -> Execution:
        """Carry out a plan."""
        return execute(self.location, plan, run)


@dataclass(frozen=True, slots=True)
class FileDestination:
    """A single file of weights: written in a temporary folder like any output, then renamed to its place."""

    location: Location

    def check(self, src: Place, *, overwrite: bool) -> None:
        """Raise CheckpointError if the file may not be written; only a torch file of weights is replaced."""
        location, source = self.location, locate(src).resolved()
        is_a_link = not location.scheme and is_link(location.path)
        if is_a_link or not is_present(location) or source == location.resolved():
            check_places(src, location, overwrite=overwrite)
            return
        if location.resolved().is_inside(source) and not open_store(source)[1]:
            raise CheckpointError(f"{location} is a part of the source", hint="write to a file outside of the source")
        store, file = open_store(location)
        if not file:
            raise CheckpointError(
                f"{location}: exists and is not a file", hint="a DST with this suffix is the file to write"
            )
        if problem := _not_weights(store, file):
            raise CheckpointError(
                f"{location}: exists already and is {problem}; it is not replaced",
                hint="give a new name, or remove this one yourself",
            )
        if not overwrite:
            raise CheckpointError(f"{location}: exists already", hint="nothing was written", tries=["--overwrite"])

    def remarks(self, catalog: Catalog, info: ModelInfo) -> list[str]:
        """What one file cannot hold."""
        return [
            "the file does not describe its model: commands that read it need --model-from",
            describe_lone_file(info),
        ]

    def write(self, plan: Plan, run: Run) -> Execution:
        """Carry out a plan whose target is one file."""
        return execute(self.location, replace(plan, write_small_files=no_small_files, carried=()), run, is_file=True)


Destination = FolderDestination | FileDestination


def destination_of(dst: Place, format: Format) -> Destination:
    """The destination that a place means for a format. Raises CheckpointError for a folder with the name of a file."""
    location = locate(dst)
    if location.suffix in format.file_suffixes:
        return FileDestination(location)
    if location.suffix.lower() in weight_suffixes():
        stem = location.name.removesuffix(location.suffix)
        raise CheckpointError(
            f"{dst}: a folder would be made, and this is the name of a file",
            tries=[str(location.with_name(stem + suffix)) for suffix in ("", *sorted(format.file_suffixes))],
        )
    return FolderDestination(location, format)


def _not_weights(store: Store, file: str) -> str:
    """The kind of a file that is not a torch file of weights; "" if it is one."""
    try:
        torch_file.read_catalog(store, file)
    except TitanError as error:
        is_torch = is_zip(first_bytes(store, file))
        return f"a torch file without weights ({error.message})" if is_torch else "no torch file"
    return ""
