"""Open a checkpoint, whatever its container. The content decides, never a folder's name."""

import re
from difflib import get_close_matches
from pathlib import Path

from converters.catalog import Catalog
from converters.commit import find_complete
from converters.containers import dcp, meta_shards, safetensors, torch_file, torch_shards
from converters.containers.dcp_ranks import rank_metadata_files
from converters.containers.hf_cache import snapshot_of
from converters.containers.paths import linked_files, refuse_links_out
from converters.containers.safetensors import is_of_series
from converters.cover import cover_problem
from converters.errors import CheckpointError, TitanError, UnsupportedError, list_offenders
from converters.folder import (
    ADAPTER,
    FOREIGN,
    HF_ENTRIES,
    RUN_STATE,
    TORCH_SUFFIXES,
    find_hf_entry,
    is_meta_shard,
    name_adapters,
    name_unread,
)
from converters.manifest import Manifest, changed_since, check_sizes
from converters.model_info import says_model
from converters.names import (
    DCP_METADATA,
    HF_CONFIG,
    HF_INDEX,
    MANIFEST,
    META_SHARD,
    TORCH_INDEX,
    epoch_of,
    step_of,
)
from converters.wrappers import unwrap_names

_READ_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".distcp", ".json", ".metadata")
_SNIFF_BYTES = 512
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # of a model: meta-llama/Llama-3.2-1B


def open_checkpoint(path: str | Path, *, against_manifest: bool = True) -> Catalog:
    """The catalog of a checkpoint folder or file. Reads headers only.

    A folder's files are compared with its manifest where it has one, unless `against_manifest` is false.

    Raises CheckpointError where it is missing, half-written, damaged or not a checkpoint, and UnsupportedError where it
    is one of a kind that is not covered. DCP chunks are checked to cover each tensor exactly once.
    """
    path = Path(path)
    try:
        return _open(snapshot_of(find_complete(path)), against_manifest=against_manifest)
    except OSError as error:  # no permission, a name that is too long, a disk that fails
        raise CheckpointError(f"{error.filename or path}: cannot be read ({error.strerror})") from error


def require_there(path: Path) -> None:
    """Raise CheckpointError where there is nothing at `path`, with what may have been meant."""
    if find_complete(path).exists():
        return
    if path.is_symlink():
        raise CheckpointError(f"{path}: a link that leads nowhere")
    near = get_close_matches(path.name, [p.name for p in path.parent.iterdir()], 1) if path.parent.is_dir() else []
    tries = [str(path.parent / near[0])] if near else []
    if _HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        tries = [f"titan download {path}"]
    raise CheckpointError(f"{path}: no such file or folder", tries=tries)


def _open(path: Path, *, against_manifest: bool) -> Catalog:
    require_there(path)
    manifest = None
    if path.is_file():
        catalog = _open_file(_own_place(path))
    elif path.is_dir():
        catalog = _open_folder(path)
        manifest = check_sizes(path) if against_manifest else None
    else:
        raise CheckpointError(f"{path}: neither a file nor a folder")
    if not catalog.tensors:
        raise CheckpointError(f"{path}: a checkpoint without a single tensor")
    _refuse_odd_names(catalog)
    # What titan wrote has the model's own names; after --accept the manifest lists the names without wrappers
    if manifest is None or manifest.accepted:
        catalog = unwrap_names(catalog)
    _compare_with_manifest(catalog, manifest)
    return catalog


def _refuse_odd_names(catalog: Catalog) -> None:
    """Control characters would take over the terminal that lists them; lone surrogates cannot be written at all."""
    names = (*catalog.tensors, *catalog.blobs, *catalog.values)
    odd = [f"{ascii(name):.200}" for name in names if not name or not name.isprintable()]
    if odd:
        raise CheckpointError(
            f"{catalog.place}: names that are empty or hold what cannot be shown:{list_offenders(odd)}",
            hint="no tool that is known here writes such names; the file is damaged or hostile",
        )


def _compare_with_manifest(catalog: Catalog, manifest: Manifest | None) -> None:
    if manifest is None:
        return
    listed = [catalog.root / name for name in manifest.files]
    refuse_links_out(catalog.root, [p for p in listed if p.parent != catalog.root or p.is_symlink()])
    claimed = {fqn: (t.dtype, t.shape) for fqn, t in manifest.tensors.items()}
    found = {fqn: (t.dtype, t.shape) for fqn, t in catalog.tensors.items()}
    odd = [
        f"{fqn}: {_shown(found.get(fqn))} in the files, {_shown(claimed.get(fqn))} in {MANIFEST}"
        for fqn in sorted(claimed.keys() | found.keys())
        if claimed.get(fqn) != found.get(fqn)
    ]
    if odd:
        raise changed_since(catalog.root, odd)
    used = {chunk.file for entry in catalog.tensors.values() for chunk in entry.chunks}
    if added := sorted(used - manifest.files.keys()):
        raise changed_since(catalog.root, [f"{name}: weights that are not in {MANIFEST}" for name in added])


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{tensor[0]} {list(tensor[1])}" if tensor else "missing"


def _own_place(path: Path) -> Path:
    """Where a file lies that the user has named himself: then a link may lead anywhere."""
    try:
        refuse_links_out(path.parent, [path])
    except CheckpointError:
        return path.resolve()
    return path  # in the HF cache what says the model lies beside the link


def _open_folder(path: Path) -> Catalog:
    # before any file is opened
    refuse_links_out(path, [p for p in linked_files(path) if p.name.endswith(_READ_SUFFIXES)])
    names = {entry.name for entry in path.iterdir()}
    if not names:
        raise CheckpointError(f"{path}: the folder is empty", hint="was the download or the save cut short?")
    entry = find_hf_entry(path, names)
    catalog = _open_weights(path, names, entry)
    catalog.file = "" if entry else catalog.file  # of a usual name, which errors need not add to the folder's
    catalog.unread = name_unread(catalog, names, entry=entry) | name_adapters(catalog, names)
    return catalog


def _open_weights(path: Path, names: set[str], entry: str) -> Catalog:
    """The weights of a folder. `entry`: what transformers takes, "" for none."""
    found = sorted(name for name in names if not ADAPTER.fullmatch(name) and not RUN_STATE.fullmatch(name))
    safetensors_files = [name for name in found if name.endswith(".safetensors")]
    torch_files = [name for name in found if name.endswith(TORCH_SUFFIXES) and (path / name).is_file()]
    meta_files = [name for name in found if is_meta_shard(name)]
    metadata = [DCP_METADATA] if DCP_METADATA in names else rank_metadata_files(names)
    kinds = [
        (metadata, f"DCP ({', '.join(metadata[:1])})"),
        (entry, entry),
        (not entry and safetensors_files, ", ".join(safetensors_files[:3])),
        (meta_files, ", ".join(meta_files[:3])),
        (safetensors_files and not (entry or meta_files) and torch_files, ", ".join(torch_files[:3])),
    ]
    found = [called for is_there, called in kinds if is_there]
    if len(found) > 1 and (metadata or not entry or HF_CONFIG not in names):  # else transformers' order decides
        raise CheckpointError(
            f"{path}: holds more than one checkpoint:{list_offenders(found)}",
            hint="nothing says which one is meant; keep each in a folder of its own",
        )
    if metadata:
        _refuse_strange_files(path, metadata, pickles=True)
        return _covered(dcp.read_catalog(path))
    if entry.endswith((".safetensors", ".safetensors.index.json")) or (safetensors_files and not entry):
        one_file = entry.endswith(".safetensors")
        _refuse_strange_files(path, [entry] if one_file else safetensors_files)
        return _covered(safetensors.read_catalog(path, entry))
    if entry == TORCH_INDEX:
        _refuse_strange_files(path, torch_files)
        return torch_shards.read_catalog(path)
    if entry:
        return _open_file(path / entry)
    if meta_files:
        _refuse_strange_files(path, meta_files)
        return meta_shards.read_catalog(path)
    if len(torch_files) == 1:
        return _open_file(path / torch_files[0])
    adapters = sorted(name for name in names if ADAPTER.fullmatch(name))
    if adapters and not torch_files:
        raise UnsupportedError(
            f"{path}: holds a LoRA adapter ({', '.join(adapters)}), not a model",
            hint="merge it into its base model first; torchtune does so unless save_adapter_weights_only is set",
        )
    raise _nothing_here(path, names, torch_files)


def _covered(catalog: Catalog) -> Catalog:
    problems = [f"{fqn}: {why}" for fqn, entry in catalog.tensors.items() if (why := cover_problem(entry))]
    if problems:
        raise CheckpointError(
            f"{catalog.root}: chunks do not cover these tensors exactly:{list_offenders(problems)}",
            hint="a rank's part is missing or stands twice; stock DCP would leave the rest uninitialised",
        )
    return catalog


def _nothing_here(path: Path, names: set[str], torch_files: list[str]) -> TitanError:
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    if steps:
        return _name_newest(path, [path / name for _, name in steps], called="a folder of checkpoints")
    inside = [p for name in sorted(names) if (path / name).is_dir() for p in (path / name).iterdir()]
    inside = [p for p in inside if step_of(p.name) is not None and p.is_dir() and not p.is_symlink()]
    if inside:
        return _name_newest(path, sorted(inside, key=lambda p: step_of(p.name) or 0), called="the folder of a run")
    if runs := [str(path / name) for name in sorted(names) if _is_run(path / name)]:
        return CheckpointError(f"{path}: a folder of runs, not a checkpoint", tries=runs[:8])
    epochs = sorted((epoch, name) for name in names if (epoch := epoch_of(name)) is not None)
    if epochs:
        return CheckpointError(
            f"{path}: a run of torchtune, not a checkpoint", tries=[str(path / name) for _, name in epochs[-2:]]
        )
    if any(name.endswith(".distcp") for name in names):
        return CheckpointError(
            f"{path}: DCP data without {DCP_METADATA}",
            hint=f"the save was cut off before its end, or {DCP_METADATA} (a hidden file) was not copied",
        )
    if torch_files:
        return _of_several(path, torch_files)
    if inside := _checkpoints_inside(path, names):
        model = path if (path / HF_CONFIG).is_file() else "FOLDER"
        named = ["" if says_model(place) else f" --model-from {model}" for place in inside]
        tries = [f"{place}{option}" for place, option in zip(inside, named, strict=True)]
        return CheckpointError(f"{path}: not a checkpoint, but holds some", tries=tries[-3:])
    if foreign := [name for name in sorted(names) if Path(name).suffix in FOREIGN]:
        kinds = ", ".join(sorted({FOREIGN[Path(name).suffix] for name in foreign}))
        return UnsupportedError(
            f"{path}: its weights are {kinds} files, which are not covered:{list_offenders(foreign)}",
            hint="load them with transformers and save them with save_pretrained, which writes safetensors",
        )
    expected = f"{DCP_METADATA}, *.safetensors, {META_SHARD.format(index=0)} or one .pt/.pth/.bin file"
    shown = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
    return CheckpointError(f"{path}: not a checkpoint; it holds {shown}", hint=f"expected: {expected}")


def _of_several(path: Path, torch_files: list[str]) -> TitanError:
    """Of several torch files none is the checkpoint; what can be opened is offered, but no part of a series."""
    opened, problems = [], []
    for name in torch_files:
        try:
            if _open_file(path / name).tensors:
                opened.append(name)
        except TitanError as error:
            problems.append(error)
    if problems and not opened:
        return problems[0]
    tries = [] if any(map(is_of_series, torch_files)) else [str(path / name) for name in opened[:2]]
    what = f"{path}: {len(torch_files)} torch files and no {TORCH_INDEX}:{list_offenders(torch_files)}"
    return UnsupportedError(what, hint="name the one that holds the weights", tries=tries)


def _checkpoints_inside(path: Path, names: set[str]) -> list[Path]:
    """Folders in `path` that hold weights (Accelerate's pytorch_model_fsdp_0, the Trainer's checkpoint-500)."""
    places = [path / name for name in sorted(names) if not name.startswith("optimizer")]
    marks = (DCP_METADATA, *HF_ENTRIES)
    found = [place for place in places if place.is_dir() and any((place / mark).is_file() for mark in marks)]
    return sorted(found, key=lambda place: [int(number) for number in re.findall(r"\d+", place.name)])


def _is_run(path: Path) -> bool:
    """Whether a folder holds one with steps in it; one that cannot be read is none."""
    try:
        return any(step_of(p.parent.name) is not None for p in path.glob(f"*/*/{DCP_METADATA}"))
    except OSError:
        return False


def _name_newest(path: Path, steps: list[Path], *, called: str) -> CheckpointError:
    """`steps`, in their order, lie below `path`; a save that was cut off has no .metadata."""
    complete = [step for step in steps if (step / DCP_METADATA).is_file()]
    return CheckpointError(
        f"{path}: {called}, not a checkpoint",
        hint="its newest complete step is meant, perhaps" if complete else "none of its steps is complete",
        tries=[str(step) for step in complete[-1:]],
    )


def _open_file(path: Path) -> Catalog:
    if path.name in (DCP_METADATA, HF_INDEX, TORCH_INDEX, MANIFEST) or path.suffix == ".distcp":
        whole = path.suffix != ".distcp" or any(path.parent.glob("*.metadata"))
        hint = "give its folder" if whole else f"{DCP_METADATA} lists what it holds, and is not there"
        tries = [str(path.parent)] if whole else []
        raise CheckpointError(f"{path}: a part of a checkpoint", hint=hint, tries=tries)
    start = _sniff(path)
    if start[:4] == b"PK\x03\x04":
        return torch_file.read_catalog(path)
    if start[8:9] == b"{":
        return safetensors.read_catalog(path)
    if problem := _stranger(path, start):
        raise problem
    raise CheckpointError(f"{path}: neither safetensors nor a torch file", hint=f"its first bytes are {start[:16]!r}")


def _sniff(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_SNIFF_BYTES)


def _refuse_strange_files(folder: Path, names: list[str], *, pickles: bool = False) -> None:
    """Recognise what downloads leave behind in place of weights, before a parser calls it a damaged header."""
    problems = []
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        start = _sniff(path)
        if start[8:9] == b"{":  # safetensors; a header of 640 bytes begins like a pickle (80 02)
            continue
        if not (pickles and start[:1] == b"\x80") and (problem := _stranger(path, start)):
            problems.append(problem)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        first, told = problems[0], [problem.message for problem in problems]
        raise type(first)(
            f"{folder}: {len(told)} files hold something else than weights:{list_offenders(told)}",
            hint=first.hint,
            tries=first.tries,
        )


def _stranger(path: Path, start: bytes) -> CheckpointError | None:
    text = start.lstrip().lower()
    if not start:
        return CheckpointError(f"{path}: is empty", hint="the download or the copy was cut off")
    if start.startswith(b"version https://git-lfs"):
        return CheckpointError(
            f"{path}: a Git LFS pointer, not the weights", hint="fetch them in the repository", tries=["git lfs pull"]
        )
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return CheckpointError(
            f"{path}: a web page, not weights",
            hint="the server answered with an error or a log-in page; fetch it again",
        )
    if start.startswith(b"\x1f\x8b"):
        unpacked = path.with_suffix("") if path.suffix == ".gz" else f"{path}.unpacked"
        return CheckpointError(f"{path}: compressed with gzip", tries=[f"gunzip < {path} > {unpacked}"])
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return UnsupportedError(
            f"{path}: a legacy torch file (a bare pickle), which cannot be read without running it",
            hint="load it once with torch.load(weights_only=True) and save it again with torch.save",
        )
    return None
