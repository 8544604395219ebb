"""Open a checkpoint in any container. The content decides, never a folder's name."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from converters.common.collector import collector_paused
from converters.common.errors import CheckpointError, list_offenders
from converters.common.names import ASSETS_FOLDER, HF_CONFIG, MANIFEST
from converters.containers.base import Listing
from converters.containers.registry import CONTAINERS, index_suffixes, registered, weight_suffixes
from converters.containers.torch_folder import TORCH_SUFFIXES, open_file
from converters.model.model_info import MODEL_FILES
from converters.naming.wrappers import unwrap_modules, unwrap_outer
from converters.source.foreign_folders import foreign_folder
from converters.source.models_inside import ROOT, choose_model
from converters.source.not_a_checkpoint import adapter_alone, not_a_checkpoint
from converters.source.weight_files import (
    ADAPTER,
    FOREIGN,
    RUN_STATE,
    find_hf_entry,
    name_adapters,
    name_unread,
    refuse_mixtures,
    refuse_other_torch_files,
)
from converters.store.base import Store, open_store
from converters.store.hub_checksums import fetch_again
from converters.store.json_file import MOST_BYTES
from converters.store.location import Place, locate
from converters.store.manifest import Manifest, changed_since, check_sizes
from converters.store.paths import linked_files, refuse_links_out, refuse_listed_links
from converters.tokenizers.assets import CARRIED, CHAT_TEMPLATES, DOCUMENT
from converters.views.catalog import Catalog

_SMALL_FOLDERS = (ASSETS_FOLDER, f"{ASSETS_FOLDER}/{CHAT_TEMPLATES}", CHAT_TEMPLATES, "original", ".hf_metadata")
_BESIDE_A_FILE = {*MODEL_FILES, *CARRIED, MANIFEST}


@collector_paused()
def open_checkpoint(place: Place, *, select: str | None = None, against_manifest: bool = True) -> Catalog:
    """The catalog of a checkpoint folder or file. Reads headers only.

    `select`: the model, if the checkpoint holds several (models_inside.choose_model); else the one that
    the manifest of a resharded checkpoint has.

    A folder's files are compared with its manifest if it has one, unless `against_manifest` is false.

    Raises CheckpointError if it is missing, incomplete, damaged or not a checkpoint, and UnsupportedError if it
    is of a kind that is not supported. DCP chunks are checked to cover each tensor exactly once.
    """
    location = locate(place)
    try:
        store, file = open_store(location)
        with closing(store):
            return _open(store, file, select, against_manifest=against_manifest)
    except CheckpointError as error:
        if error.tries or location.scheme or not (again := fetch_again(location.path)):
            raise
        raise CheckpointError(error.message, **again) from None
    except OSError as error:  # no permission, a name that is too long, a disk that fails
        raise CheckpointError(f"{error.filename or location}: cannot be read ({error.strerror})") from error


def require_exists(place: Place) -> None:
    """Raise CheckpointError if there is nothing at `place`, with what was probably meant."""
    open_store(locate(place))


def local_folder(place: Place) -> Path:
    """A folder on this machine with the files that describe the model of a checkpoint, and its tokenizer."""
    store, file = open_store(locate(place))
    return store.local(_small_files(store, file))


def _open(store: Store, file: str, select: str | None, *, against_manifest: bool) -> Catalog:
    path, manifest = store.location / file, None
    store.local(_small_files(store, file))
    if file:
        catalog = replace(open_file(store, file), is_lone_file=True)
    else:
        catalog = _open_folder(store)
        if against_manifest:
            manifest = catalog.manifest = check_sizes(store)
    if not catalog.tensors:
        raise CheckpointError(f"{path}: a checkpoint without a single tensor")
    _refuse_unprintable_names(catalog)
    # What titan wrote has the model's own names; after --accept the manifest lists the names without wrappers.
    is_titans = manifest is not None and not manifest.accepted
    may_be_wrapped = not is_titans and not CONTAINERS[catalog.container].has_parts_of_ranks
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
    odd = [f"{ascii(name):.200}" for name in catalog.names if not name or not name.isprintable()]
    if odd:
        raise CheckpointError(
            f"{catalog.place}: names that are empty or have unprintable characters:{list_offenders(odd)}",
            hint="no known tool writes such names; the file is damaged or hostile",
        )


def _compare_with_manifest(catalog: Catalog, manifest: Manifest) -> None:
    """Raise CheckpointError if the tensors or their files are not those of the manifest."""
    refuse_listed_links(catalog.root, manifest.files)
    claimed = {fqn: (t.dtype, t.shape) for fqn, t in manifest.tensors.items()}
    actual = {fqn: (t.dtype, t.shape) for fqn, t in catalog.tensors.items()}
    odd = [
        f"{fqn}: {_describe(actual.get(fqn))} in the files, {_describe(claimed.get(fqn))} in {MANIFEST}"
        for fqn in sorted(claimed.keys() | actual.keys())
        if claimed.get(fqn) != actual.get(fqn)
    ]
    if odd:
        raise changed_since(catalog.location, odd)
    if added := sorted(catalog.tensor_files - manifest.files.keys()):
        raise changed_since(catalog.location, [f"{name}: weights that are not in {MANIFEST}" for name in added])


def _describe(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{tensor[0]} {list(tensor[1])}" if tensor else "missing"


def _small_files(store: Store, file: str) -> Iterator[str]:
    """The files without tensors that are not too large for a config or a tokenizer: `Store.local` may copy them.

    Beside a single file there may be any others: only those of usual names are taken.
    """
    names = store.names()
    if file:
        names = [n for n in names if n.endswith("/") or n in _BESIDE_A_FILE or DOCUMENT.fullmatch(n)]
    of_weights = weight_suffixes()
    for name in (*names, *(f"{folder}/{name}" for folder in _SMALL_FOLDERS for name in _names_in(store, folder))):
        if not name.endswith(("/", *of_weights, *FOREIGN)) and store.size(name) <= MOST_BYTES:
            yield name


def _names_in(store: Store, folder: str) -> list[str]:
    """The names in a folder of the checkpoint; none if it has no such folder."""
    parent, _, last = folder.rpartition("/")
    return store.names(folder) if f"{last}/" in (_names_in(store, parent) if parent else store.names()) else []


def _open_folder(store: Store) -> Catalog:
    root, path = store.local(), store.location
    # before any file is opened
    read = (*weight_suffixes(), *index_suffixes())
    refuse_links_out(root, [p for p in linked_files(root) if p.name.endswith(read)])
    names = {*store.names()}
    if not names:
        raise CheckpointError(f"{path}: the folder is empty", hint="was the download or the save interrupted?")
    # A folder of another tool is one that no built-in container reads whole; a registered one may
    problem, added = foreign_folder(path, names), registered()
    if problem and not added:
        raise problem
    files = _listing(store, names)
    asked = added if problem else CONTAINERS
    containers = {name: by for name, container in asked.items() if (by := container.find(files))}
    if problem and not containers:
        raise problem
    refuse_mixtures(store, names, files.entry)
    if not containers:
        raise _no_weights(files)
    is_chosen = files.entry and HF_CONFIG in names  # by transformers' order
    if len(containers) > 1 and (not is_chosen or any(CONTAINERS[name].stands_alone for name in containers)):
        raise CheckpointError(
            f"{path}: holds more than one checkpoint:{list_offenders(list(containers.values()))}",
            hint="keep each in its own folder",
        )
    catalog = CONTAINERS[next(iter(containers))].open_folder(files)
    catalog.file = "" if files.entry else catalog.file  # errors need not add a usual name to the folder's
    refuse_other_torch_files(catalog, names)
    catalog.unread |= name_unread(catalog, names, entry=files.entry) | name_adapters(catalog, names)
    return catalog


def _listing(store: Store, names: set[str]) -> Listing:
    weights = sorted(name for name in names if not ADAPTER.fullmatch(name) and not RUN_STATE.fullmatch(name))
    is_marked = any(container.marks(names) for container in CONTAINERS.values())
    return Listing(store, names, find_hf_entry(store, names), tuple(weights), is_marked)


def _no_weights(files: Listing) -> Exception:
    adapters, torch_files = sorted(filter(ADAPTER.fullmatch, files.names)), files.ending(TORCH_SUFFIXES)
    if adapters and not torch_files:
        called = f"{files.store.location}: holds a LoRA adapter ({', '.join(adapters)}), not a model"
        return adapter_alone(files.store.location, called=called)
    return not_a_checkpoint(files.store.location, {*files.names}, torch_files)
