"""Open a checkpoint in any container. The content decides, never a folder's name."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from converters.common.collector import collector_paused
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import DCP_METADATA, HF_CONFIG, MANIFEST
from converters.containers.base import FolderFiles
from converters.containers.dcp_ranks import rank_metadata_files
from converters.containers.registry import CONTAINERS
from converters.containers.torch_folder import TORCH_SUFFIXES, open_file
from converters.naming.wrappers import unwrap_modules, unwrap_outer
from converters.source.foreign_folders import foreign_folder
from converters.source.models_inside import ROOT, choose_model
from converters.source.not_a_checkpoint import adapter_alone, not_a_checkpoint
from converters.source.weight_files import (
    ADAPTER,
    RUN_STATE,
    find_hf_entry,
    is_meta_shard,
    name_adapters,
    name_unread,
    refuse_mixtures,
    refuse_other_torch_files,
)
from converters.store.commit import find_complete
from converters.store.hf_cache import snapshot_of
from converters.store.hub_checksums import fetch_again
from converters.store.hub_names import download_command
from converters.store.manifest import Manifest, changed_since, check_sizes
from converters.store.paths import linked_files, refuse_links_out
from converters.views.catalog import Catalog

_READ_SUFFIXES = (*(suffix for c in CONTAINERS.values() for suffix in c.suffixes), ".json", ".metadata")


@collector_paused()
def open_checkpoint(path: str | Path, *, select: str | None = None, against_manifest: bool = True) -> Catalog:
    """The catalog of a checkpoint folder or file. Reads headers only.

    `select`: the model, if the checkpoint holds several (models_inside.choose_model); else the one that
    the manifest of a resharded checkpoint has.

    A folder's files are compared with its manifest if it has one, unless `against_manifest` is false.

    Raises CheckpointError if it is missing, incomplete, damaged or not a checkpoint, and UnsupportedError if it
    is of a kind that is not supported. DCP chunks are checked to cover each tensor exactly once.
    """
    path = Path(path)
    try:
        return _open(snapshot_of(find_complete(path)), select, against_manifest=against_manifest)
    except CheckpointError as error:
        if error.tries or not (again := fetch_again(path)):
            raise
        raise CheckpointError(error.message, **again) from None
    except OSError as error:  # no permission, a name that is too long, a disk that fails
        raise CheckpointError(f"{error.filename or path}: cannot be read ({error.strerror})") from error


def require_exists(path: Path) -> None:
    """Raise CheckpointError if there is nothing at `path`, with what was probably meant."""
    if find_complete(path).exists():
        return
    if path.is_symlink():
        raise CheckpointError(f"{path}: a broken link")
    near = get_close_matches(path.name, [p.name for p in path.parent.iterdir()], 1) if path.parent.is_dir() else []
    tries = [str(path.parent / name) for name in near] + download_command(path)
    raise CheckpointError(f"{path}: no such file or folder", tries=tries)


def _open(path: Path, select: str | None, *, against_manifest: bool) -> Catalog:
    require_exists(path)
    manifest = None
    if path.is_file():
        catalog = open_file(_resolved_if_link(path))
    elif path.is_dir():
        catalog = _open_folder(path)
        if against_manifest:
            manifest = catalog.manifest = check_sizes(path)
    else:
        raise CheckpointError(f"{path}: neither a file nor a folder")
    if not catalog.tensors:
        raise CheckpointError(f"{path}: a checkpoint without a single tensor")
    _refuse_unprintable_names(catalog)
    # What titan wrote has the model's own names; after --accept the manifest lists the names without wrappers.
    may_be_wrapped = manifest is None or manifest.accepted
    if may_be_wrapped:
        catalog = unwrap_modules(catalog)
    catalog = choose_model(catalog, select, otherwise=ROOT if manifest and manifest.selected else None)
    if may_be_wrapped and catalog.selected is None:
        catalog = unwrap_outer(catalog)
    if manifest is not None:
        _compare_with_manifest(catalog, manifest)
    return catalog


def _refuse_unprintable_names(catalog: Catalog) -> None:
    """Control characters would change the terminal that lists them; lone surrogates cannot be written at all."""
    names = (*catalog.tensors, *catalog.blobs, *catalog.values)
    odd = [f"{ascii(name):.200}" for name in names if not name or not name.isprintable()]
    if odd:
        raise CheckpointError(
            f"{catalog.place}: names that are empty or have unprintable characters:{list_offenders(odd)}",
            hint="no known tool writes such names; the file is damaged or hostile",
        )


def _compare_with_manifest(catalog: Catalog, manifest: Manifest) -> None:
    """Raise CheckpointError if the tensors or their files are not those of the manifest."""
    listed = [catalog.root / name for name in manifest.files]
    refuse_links_out(catalog.root, [p for p in listed if p.parent != catalog.root or p.is_symlink()])
    claimed = {fqn: (t.dtype, t.shape) for fqn, t in manifest.tensors.items()}
    actual = {fqn: (t.dtype, t.shape) for fqn, t in catalog.tensors.items()}
    odd = [
        f"{fqn}: {_describe(actual.get(fqn))} in the files, {_describe(claimed.get(fqn))} in {MANIFEST}"
        for fqn in sorted(claimed.keys() | actual.keys())
        if claimed.get(fqn) != actual.get(fqn)
    ]
    if odd:
        raise changed_since(catalog.root, odd)
    if added := sorted(catalog.tensor_files - manifest.files.keys()):
        raise changed_since(catalog.root, [f"{name}: weights that are not in {MANIFEST}" for name in added])


def _describe(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{tensor[0]} {list(tensor[1])}" if tensor else "missing"


def _resolved_if_link(path: Path) -> Path:
    """The target of a link that the user has named: it may lead anywhere. In the HF cache, the link itself."""
    try:
        refuse_links_out(path.parent, [path])
    except CheckpointError:
        return path.resolve()
    return path  # in the HF cache the files that describe the model are beside the link


def _open_folder(path: Path) -> Catalog:
    # before any file is opened
    refuse_links_out(path, [p for p in linked_files(path) if p.name.endswith(_READ_SUFFIXES)])
    names = {entry.name for entry in path.iterdir()}
    if not names:
        raise CheckpointError(f"{path}: the folder is empty", hint="was the download or the save interrupted?")
    if problem := foreign_folder(path, names):
        raise problem
    files = _sort_files(path, names)
    refuse_mixtures(path, names, files.entry)
    containers = {name: by for name, container in CONTAINERS.items() if (by := container.find(files))}
    if not containers:
        raise _no_weights(files, names)
    if len(containers) > 1 and (files.dcp_metadata or not files.entry or HF_CONFIG not in names):
        # else transformers' order decides
        raise CheckpointError(
            f"{path}: holds more than one checkpoint:{list_offenders(list(containers.values()))}",
            hint="keep each in its own folder",
        )
    catalog = CONTAINERS[next(iter(containers))].open_folder(files)
    catalog.file = "" if files.entry else catalog.file  # errors need not add a usual name to the folder's
    refuse_other_torch_files(catalog, names)
    catalog.unread |= name_unread(catalog, names, entry=files.entry) | name_adapters(catalog, names)
    return catalog


def _sort_files(path: Path, names: set[str]) -> FolderFiles:
    weights = sorted(name for name in names if not ADAPTER.fullmatch(name) and not RUN_STATE.fullmatch(name))
    return FolderFiles(
        path,
        entry=find_hf_entry(path, names),
        dcp_metadata=(DCP_METADATA,) if DCP_METADATA in names else tuple(rank_metadata_files(names)),
        safetensors=tuple(name for name in weights if name.endswith(".safetensors")),
        torch=tuple(name for name in weights if name.endswith(TORCH_SUFFIXES) and (path / name).is_file()),
        meta=tuple(name for name in weights if is_meta_shard(name)),
    )


def _no_weights(files: FolderFiles, names: Iterable[str]) -> Exception:
    adapters = sorted(name for name in names if ADAPTER.fullmatch(name))
    if adapters and not files.torch:
        called = f"{files.path}: holds a LoRA adapter ({', '.join(adapters)}), not a model"
        return adapter_alone(files.path, called=called)
    return not_a_checkpoint(files.path, set(names), files.torch)
