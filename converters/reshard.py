"""Reshard a DCP checkpoint: weights, optimizer and everything else, sharded for another mesh."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from converters.common.box import Box, TensorInfo, count_dtypes
from converters.common.dtypes import itemsize
from converters.common.errors import CheckpointError, ConfigError, UnsupportedError, list_offenders
from converters.common.fold import fold_texts
from converters.common.names import ASSETS_FOLDER, DCP_METADATA, MODEL_INFO, OPTIMIZER, SECTIONS, UNTRANSLATED
from converters.containers.dcp_names import EXTRA_FILE, SMALL_TENSOR_FILE
from converters.containers.dcp_write import plan_dcp
from converters.containers.registry import CONTAINERS
from converters.containers.safetensors_write import DEFAULT_SHARD_BYTES
from converters.conversion.execute import check_places, execute
from converters.conversion.plan import find_casts, find_kept_float32
from converters.conversion.records import RUN, Execution, Needs, Plan, Run
from converters.conversion.remarks import describe_quantized
from converters.engine.read import CatalogReader
from converters.families.registry import get_family
from converters.integrity.source_check import check_blobs, unchecked_remark, vouched_for
from converters.layout.layout import Files, boxes_for_any_mesh, boxes_for_mesh, boxes_for_num_files
from converters.layout.mesh_check import check_mesh
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, write_model_info
from converters.source.open import open_checkpoint, require_exists
from converters.source.weights import dequantized_for
from converters.store.json_file import read_json
from converters.store.local_files import copy_file, names_in
from converters.store.location import Place, locate
from converters.store.manifest import list_files
from converters.store.outputs import outputs_at
from converters.tokenizers.assets import write_assets
from converters.training.contents import ReshardedContents, collect
from converters.training.parameter_names import Spelling, read_spelling
from converters.training.sections import (
    MODEL,
    TrainingCheckpoint,
    describe_loader_state,
    describe_rng_state,
    find_sections,
    with_titan_sections,
)
from converters.views.catalog import Catalog
from converters.views.view import View


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What was done, or what a dry run would have done."""

    source: str
    destination: str
    naming: str  # how the source spells its weights; the output has native names
    selected: str  # the place of the model in the source, where that holds several; else ""
    cut: str  # the mesh, or the number of files
    num_tensors: int
    num_blobs: int
    num_files: int
    num_bytes: int
    dtypes: Mapping[str, int]  # bytes by element type in the output
    num_cast: int
    relative_error: Mapping[str, float]  # tensor → the largest |new - old| / |old| of its cast, where it is not exact
    sections: Mapping[str, int]  # section → entries carried over
    dropped_sections: Mapping[str, int]  # section → entries left out as asked
    dropped: Mapping[str, str]  # tensor → reason
    missing: tuple[str, ...]  # parameters without weights or optimizer state, where that is allowed
    loader_state: str  # its kind, and whether it fits the mesh
    non_finite: Mapping[str, int]  # tensor → values that are NaN or infinite
    remarks: tuple[str, ...]
    other_files: tuple[str, ...]
    resumed_bytes: int
    needs: Needs | None  # of a dry run
    secs: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ReshardRequest:
    """What a resharding is asked for: the options of `titan reshard` that are not in Run.

    At most one of `mesh`, `num_files` and `shard_bytes` determines the files. `dtype` casts the weights and
    `optimizer_dtype` the states of their shape; `drop` names sections to leave out, `model` included. `select`: the
    model, if `src` holds several.
    """

    src: Place
    dst: Place
    mesh: MeshShape | None = None
    num_files: int | None = None
    shard_bytes: int | None = None
    dtype: str | None = None
    optimizer_dtype: str | None = None
    drop: Sequence[str] = ()
    select: str | None = None
    model_from: Place | None = None
    allow_missing: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    """A training checkpoint: its sections, and the names of its parameters."""

    catalog: Catalog
    training: TrainingCheckpoint
    spelling: Spelling
    sections: Mapping[str, str]  # entry → section
    kept: Catalog  # without the sections that are dropped
    loader_state: str  # its kind, and whether it fits the mesh


@dataclass(frozen=True, slots=True)
class _ReshardPlan:
    """What is written."""

    contents: ReshardedContents
    work: Plan
    kept_float32: Sequence[str]  # tensors that a cast to 16 bits leaves as they are


def reshard(request: ReshardRequest, run: Run = RUN) -> ReshardReport:
    """Write a DCP checkpoint again, sharded for another mesh, or into another number of files.

    Moments are sharded like their parameter; non-tensor entries are copied as bytes. A checkpoint in another naming, or
    with its optimizer under another name, is written as the trainer writes it (see optimizer_state.py).

    Raises TitanError, and then nothing was written.
    """
    started = time.monotonic()
    require_exists(request.src)  # first: of swapped arguments DST exists, and --overwrite would be the wrong advice
    check_places(request.src, request.dst, overwrite=run.overwrite)
    _check_choice(request)
    source = _open(request)
    with CatalogReader(source.kept) as reader:
        plan = _plan(request, source, reader)
        done = execute(request.dst, plan.work, run)
    return replace(_report(request, source, plan, done), secs=time.monotonic() - started)


def _open(request: ReshardRequest) -> _Source:
    """Open the source. Raises TitanError if it, its sections or its model do not fit the request."""
    src, drop = request.src, request.drop
    catalog = open_checkpoint(src, select=request.select)
    container = CONTAINERS[catalog.container]
    if not container.keeps_state:
        raise CheckpointError(
            f"{src} is {container.called}, which has no layout to change",
            tries=[f"titan convert auto {src} {request.dst} --to dcp --for-mesh MESH"],
        )
    training = with_titan_sections(catalog, drop=drop)
    spelling = read_spelling(
        training.catalog,
        renamed=bool(training.stored),
        model_from=request.model_from,
        allow_missing=request.allow_missing,
        dequantized=dequantized_for(request.dtype),
    )
    weights_held = [name for expression in spelling.weights.values() for name in expression.sources]
    sections = find_sections(training.catalog, [*weights_held, *spelling.dropped])
    _check_drop(drop, sections.values())
    if request.mesh is not None:
        check_mesh(request.mesh, get_family(spelling.info.family), spelling.info.args)
    kept = _only(training.catalog, {name for name, section in sections.items() if section not in drop})
    loader_state = describe_loader_state(kept.names, request.mesh)
    return _Source(catalog, training, spelling, sections, kept, loader_state)


def _plan(request: ReshardRequest, source: _Source, reader: CatalogReader) -> _ReshardPlan:
    """Plan the output. Raises TitanError if parts of the source do not belong together, or have changed."""
    catalog, training, spelling = source.catalog, source.training, source.spelling
    contents = collect(reader, spelling, source.sections, allow_missing=request.allow_missing)
    stored = _stored(contents.source, training)
    rearranged = (names for fqn, names in stored.items() if contents.source.expressions[fqn].has_own_digest)
    vouched = vouched_for(training.catalog, stored, rearranged=frozenset(chain.from_iterable(rearranged)))
    check_blobs(reader)
    _refuse_other_payloads(reader, source.sections)
    infos = contents.source.tensors
    weights = {name: info for name, info in infos.items() if name in spelling.weights}
    moments = {name: infos[name] for names in contents.moments.values() for name in names}
    if request.optimizer_dtype is not None and not moments:
        raise ConfigError(f"--optimizer-dtype {request.optimizer_dtype}: the checkpoint has no moments to cast")
    keep = get_family(spelling.info.family).keep_float32
    casts = find_casts(weights, request.dtype, keep=keep) | find_casts(moments, request.optimizer_dtype)
    tensors = {name: replace(info, dtype=casts.get(name, info.dtype)) for name, info in infos.items()}
    files = _files(request, tensors, contents)
    work = Plan(
        source=contents.source,
        target=plan_dcp(
            tensors,
            files,
            blobs=contents.blobs,
            planner_data=contents.paths,
            streamed=outputs_at(locate(request.dst)).only_appends,
        ),
        casts=casts,
        write_small_files=lambda folder: _write_small_files(catalog, spelling.info, folder),
        carried=[*(catalog.root / name for name in _other_files(catalog)), *spelling.info.assets.values()],
        catalog=catalog,
        readers=[reader],
        vouched=vouched,
    )
    kept_float32 = [
        *find_kept_float32(weights, request.dtype, keep=keep),
        *find_kept_float32(moments, request.optimizer_dtype),
    ]
    return _ReshardPlan(contents, work, kept_float32)


def _remarks(request: ReshardRequest, source: _Source, plan: _ReshardPlan) -> list[str]:
    """What a user should know of the plan and the report has no field for; some are ""."""
    catalog, training, spelling = source.catalog, source.training, source.spelling
    of_selected = catalog.selected is not None and OPTIMIZER in source.sections.values()
    islands = plan.kept_float32
    return [
        ""
        if spelling.names.are_native
        else f"names: {spelling.naming} in the source; now as `titan train` writes them",
        describe_quantized(spelling.quantized),
        f"optimizer: {', '.join(training.optimizers)}, taken as that of {catalog.place_of_selected}"
        if of_selected and OPTIMIZER not in request.drop
        else "",
        source.loader_state,
        describe_rng_state(source.kept.names, request.mesh),
        _describe_unknown(plan.contents.unknown),
        f"float32 stays for {len(islands)} tensors among others of 16 bits: {', '.join(islands)}" if islands else "",
        unchecked_remark(catalog, plan.work.vouched),
        *spelling.info.notes,
    ]


def _report(request: ReshardRequest, source: _Source, plan: _ReshardPlan, done: Execution) -> ReshardReport:
    """The report, without the time that it took."""
    catalog, sections, target, mesh = source.catalog, source.sections, plan.work.target, request.mesh
    remarks = filter(None, _remarks(request, source, plan))
    return ReshardReport(
        source=str(request.src),
        destination=str(request.dst),
        naming=source.spelling.naming,
        selected=catalog.place_of_selected,
        cut=f"mesh {mesh}" if mesh else f"{request.num_files} files" if request.num_files else "any mesh",
        num_tensors=len(target.tensors),
        num_blobs=len(plan.contents.blobs),
        num_files=len(target.file_bytes),
        num_bytes=target.total_bytes,
        dtypes=count_dtypes(target.tensors),
        num_cast=len(plan.work.casts),
        relative_error=done.relative_error,
        sections=dict(Counter(sections[name] for name in source.kept.names)),
        dropped_sections=dict(Counter(section for section in sections.values() if section in request.drop)),
        dropped=plan.contents.dropped,
        missing=plan.contents.missing,
        loader_state=source.loader_state,
        non_finite=done.non_finite,
        remarks=(*remarks, *catalog.notes, *done.remarks),
        other_files=tuple(done.other_files),
        resumed_bytes=done.resumed_bytes,
        needs=done.needs,
        secs=0.0,
        dry_run=done.needs is not None,
    )


def _refuse_other_payloads(reader: CatalogReader, sections: Mapping[str, str]) -> None:
    """Raise UnsupportedError if items hold other classes than the plain tensors that .metadata lists."""
    if other := reader.smaller_than_listed():
        found = dict.fromkeys(sections[name] for name in other)
        raise UnsupportedError(
            f"{reader.catalog.root}: {len(other):,} tensors are not stored as {DCP_METADATA} lists them:"
            + list_offenders(fold_texts([f"{name}: {what}" for name, what in other.items()])),
            hint="their codes and scales are those of the parts that ranks held, and cannot be cut for others",
            tries=[f"--drop {','.join(found)}"],
        )


def _check_choice(request: ReshardRequest) -> None:
    given = {"--for-mesh": request.mesh, "--num-files": request.num_files, "--shard-size": request.shard_bytes}
    chosen = [option for option, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} cannot be combined", hint="each determines the files")


def _check_drop(drop: Sequence[str], found: Collection[str]) -> None:
    known = [*dict.fromkeys((MODEL, *SECTIONS, *found))]
    unknown = [name for name in drop if name not in known]
    if unknown:
        raise ConfigError(f"unknown section: {', '.join(unknown)}", hint=f"sections: {', '.join(known)}")
    if set(found) <= set(drop):
        raise ConfigError(f"nothing is left without {', '.join(drop)}")


def _only(catalog: Catalog, names: set[str]) -> Catalog:
    return replace(
        catalog,
        tensors={n: t for n, t in catalog.tensors.items() if n in names},
        values={n: value for n, value in catalog.values.items() if n in names},
    )


def _stored(source: View, training: TrainingCheckpoint) -> dict[str, tuple[str, ...]]:
    """Name in the output → names in the source's manifest."""
    return {
        name: tuple(map(training.own_name, held))
        for name, held in source.ledger.used.items()
        if all(one in training.catalog.tensors for one in held)
    }


def _files(request: ReshardRequest, tensors: Mapping[str, TensorInfo], contents: ReshardedContents) -> Files:
    """Parameters as the mesh holds them, each followed by its moments; other tensors in files of their own."""
    together = {
        p.fqn: [n for n in (p.fqn, *contents.moments.get(p.fqn, ())) if n in tensors] for p in contents.parameters
    }
    large = {name: tensors[name] for names in together.values() for name in names}
    beside = {name: tensors[name] for name in contents.beside if name in tensors}  # a text model: no rank reads them
    large |= beside
    small = [(name, Box.whole(info.shape)) for name, info in tensors.items() if name not in large]
    if request.mesh is not None:
        widest = {fqn: max([itemsize(tensors[n].dtype) for n in names], default=1) for fqn, names in together.items()}
        held = boxes_for_mesh(contents.parameters, request.mesh, itemsizes=widest)
        files = {f: [(name, box) for fqn, box in boxes for name in together[fqn]] for f, boxes in held.items()}
        files[EXTRA_FILE] = [(name, Box.whole(info.shape)) for name, info in beside.items()]
        files = {file: boxes for file, boxes in files.items() if boxes}
    elif request.num_files is not None:
        files = boxes_for_num_files(large, request.num_files)
    else:
        files = boxes_for_any_mesh(large, file_bytes=request.shard_bytes or DEFAULT_SHARD_BYTES)
    return files | ({SMALL_TENSOR_FILE: small} if small else {})


def _other_files(catalog: Catalog) -> list[str]:
    names = list_files(catalog.store)
    container = CONTAINERS[catalog.container]
    return [name for name in names if not container.is_data(name) and name not in container.marks(names)]


def _write_small_files(catalog: Catalog, info: ModelInfo, folder: Path) -> list[str]:
    """Everything in the source's folder that is not tensor data, and what `info` adds to it from --model-from."""
    names = _other_files(catalog)
    root = catalog.store.local(names)
    for name in names:
        copy_file(root / name, folder / name)
    own = read_json(folder / MODEL_INFO) if MODEL_INFO in names else {}
    if own.get(UNTRANSLATED, {}) != info.untranslated or not own:
        write_model_info(folder, info)
    assets, generation = info.assets, info.generation
    if names_in(folder / ASSETS_FOLDER):
        assets, generation = {n: path for n, path in assets.items() if not path.is_relative_to(root)}, {}
    added = write_assets(folder / ASSETS_FOLDER, assets, generation)
    return [*names, *(f"{ASSETS_FOLDER}/{name}" for name in added)]


def _describe_unknown(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
    return f"unknown, copied unchanged: {shown}"
