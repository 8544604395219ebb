"""Open a folder of torch files: the only one, or several with an index (`pytorch_model.bin.index.json`)."""

from converters.common.errors import CheckpointError
from converters.common.names import DCP_METADATA, HF_INDEX, MANIFEST, TORCH_INDEX
from converters.containers import safetensors, torch_file
from converters.containers.base import Container, Listing, name_some
from converters.containers.dcp_names import DATA_SUFFIX, metadata_files
from converters.containers.sniff import first_bytes, foreign_file_error, is_safetensors, is_zip, refuse_foreign_files
from converters.store.base import Store
from converters.views.catalog import Catalog, TensorEntry

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def open_file(store: Store, name: str) -> Catalog:
    """The catalog of one file of weights. Its first bytes say what it is, never its name."""
    path = store.location / name
    if name in (DCP_METADATA, HF_INDEX, TORCH_INDEX, MANIFEST) or path.suffix == DATA_SUFFIX:
        is_whole = path.suffix != DATA_SUFFIX or bool(metadata_files(store.names()))
        hint = "give its folder" if is_whole else f"{DCP_METADATA}, which lists its contents, is missing"
        tries = [str(path.parent)] if is_whole else []
        raise CheckpointError(f"{path}: a part of a checkpoint", hint=hint, tries=tries)
    start = first_bytes(store, name)
    if is_zip(start):
        return torch_file.read_catalog(store, name)
    if is_safetensors(start):
        return safetensors.open_file(store, name)
    if problem := foreign_file_error(path, start):
        raise problem
    raise CheckpointError(f"{path}: neither safetensors nor a torch file", hint=f"its first bytes are {start[:16]!r}")


def _find(files: Listing) -> str:
    """A single file; several are recognized only together with safetensors, for the error that lists both."""
    if files.entry:
        return files.entry if files.entry.endswith((*TORCH_SUFFIXES, TORCH_INDEX)) else ""
    if files.is_marked:
        return ""
    torch_files = files.ending(TORCH_SUFFIXES)
    return name_some(torch_files) if files.ending(".safetensors") or len(torch_files) == 1 else ""


def _open_folder(files: Listing) -> Catalog:
    torch_files = files.ending(TORCH_SUFFIXES)
    if files.entry == TORCH_INDEX:
        refuse_foreign_files(files.store, torch_files)
        return Catalog(files.store, "torch", safetensors.read_indexed(files.store, TORCH_INDEX, read_file))
    if not files.entry:
        safetensors.require_series(files.store.location, torch_files)
    return open_file(files.store, files.entry or torch_files[0])


def read_file(store: Store, name: str) -> dict[str, TensorEntry]:
    """The tensors of one torch file."""
    return torch_file.read_catalog(store, name).tensors


TORCH = Container(
    name="torch",
    called="a torch file",
    title="a torch file",
    suffixes=TORCH_SUFFIXES,
    replaceable=("pytorch_model*.bin",),  # any other may be a script's
    find=_find,
    open_folder=_open_folder,
    keeps_sections=True,
    has_common_suffixes=True,
    is_for_transformers=True,
)
