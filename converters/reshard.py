"""Reshard a DCP checkpoint: weights, optimizer and everything else, cut as another mesh will read it."""

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from converters.catalog import Box, Catalog, TensorInfo, count_dtypes
from converters.dtypes import itemsize
from converters.errors import CheckpointError, ConfigError, UnsupportedError, list_offenders
from converters.execute import Execution, Progress, check_places, execute, no_progress, require_room
from converters.families.base import Parameter
from converters.families.registry import get_family
from converters.formats.dcp_write import plan_dcp
from converters.formats.safetensors_write import DEFAULT_SHARD_BYTES
from converters.layout import Files, MeshShape, boxes_for_any_mesh, boxes_for_mesh, check_mesh
from converters.manifest import list_files
from converters.model_info import write_model_info
from converters.names import DATALOADER, DCP_METADATA, MODEL_INFO, OPTIMIZER, RNG, SECTIONS, section_of
from converters.open import open_checkpoint
from converters.plan import find_casts
from converters.read import CatalogReader
from converters.source_check import check_blobs, unchecked_remark, vouched_for
from converters.weights import native_weights

# Tensors that every rank needs whole (step counters, RNG states) lie together, not in some rank's large file
SMALL_TENSOR_FILE = "__small_0.distcp"
_STATE = f"{OPTIMIZER}.state."


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What was done, or would be done by a run that is not dry."""

    source: str
    destination: str
    mesh: str
    num_tensors: int
    num_blobs: int
    num_files: int
    num_bytes: int
    dtypes: Mapping[str, int]  # bytes by element type in the output
    num_cast: int
    sections: Mapping[str, int]  # section → entries carried over
    dropped_sections: Mapping[str, int]  # section → entries left out as asked
    dropped: Mapping[str, str]  # tensor → reason
    remarks: tuple[str, ...]
    other_files: tuple[str, ...]
    secs: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def reshard(
    src: Path | str,
    dst: Path | str,
    *,
    mesh: MeshShape | None = None,
    dtype: str | None = None,
    drop: Sequence[str] = (),
    model_from: Path | str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ReshardReport:
    """Write the DCP checkpoint `src` to `dst`, cut for `mesh` (None: row blocks that suit any).

    Moments take their parameter's boxes; what is no tensor is copied as bytes, undecoded. `dtype` casts the weights,
    not the optimizer; `drop` names sections to leave out.
    """
    src, dst, started = Path(src), Path(dst), time.monotonic()
    check_places(src, dst, overwrite=overwrite)
    _check_sections(drop)
    catalog = open_checkpoint(src)
    if catalog.container != "dcp":
        raise CheckpointError(
            f"{src} is no DCP checkpoint, so it has no layout to change",
            tries=[f"titan convert hf-to-dcp {src} {dst} --for-mesh MESH"],
        )
    kept = _without_sections(catalog, drop)
    with native_weights(catalog, model_from=model_from) as weights, CatalogReader(kept) as reader:
        if any(native != name for native, name in weights.source.ledger.used.items()):
            raise UnsupportedError(
                f"{src} spells its weights as {weights.naming!r}; its other sections would need the same change",
                tries=[f"titan convert auto {src} {dst} --to dcp, for the weights alone"],
            )
        if mesh is not None:
            check_mesh(mesh, weights.info.args)
        parameters = get_family(weights.info.family).parameters(weights.info.args)
        _check_optimizer(kept, parameters)
        vouched = vouched_for(
            catalog, {name: name for name in kept.tensors if name not in weights.source.ledger.dropped}
        )
        check_blobs(reader)
        casts = find_casts(weights.source.tensors, dtype)
        others = {n: i for n, i in reader.tensors.items() if section_of(n) != "model"}
        tensors = {
            n: replace(i, dtype=casts.get(n, i.dtype)) for n, i in (*weights.source.tensors.items(), *others.items())
        }
        target = plan_dcp(
            tensors,
            _cut(tensors, parameters, mesh),
            blobs={name: reader.read_blob(name) for name in kept.blobs},
            planner_data={name: path for name, path in kept.planner_data.items() if section_of(name) not in drop},
        )
        require_room(dst, target)

        def write_small_files(folder: Path) -> list[str]:
            names = _carry_files(catalog, folder)
            if MODEL_INFO not in names:
                write_model_info(folder, weights.info)
            return names

        done = Execution({}, [])
        if not dry_run:
            done = execute(
                dst,
                source=reader,
                target=target,
                casts=casts,
                vouched=vouched,
                write_small_files=write_small_files,
                overwrite=overwrite,
                progress=progress,
            )
    return ReshardReport(
        source=str(src),
        destination=str(dst),
        mesh=str(mesh) if mesh else "any",
        num_tensors=len(tensors),
        num_blobs=len(kept.blobs),
        num_files=len(target.file_bytes),
        num_bytes=target.total_bytes,
        dtypes=count_dtypes(tensors),
        num_cast=len(casts),
        sections=_count_sections(kept),
        dropped_sections={s: n for s, n in _count_sections(catalog).items() if s in drop},
        dropped=weights.source.ledger.dropped,
        remarks=(*_remarks(kept), *filter(None, [unchecked_remark(catalog, vouched)])),
        other_files=tuple(done.other_files),
        secs=time.monotonic() - started,
        dry_run=dry_run,
    )


def _check_sections(drop: Sequence[str]) -> None:
    unknown = [name for name in drop if name not in SECTIONS]
    if unknown:
        raise ConfigError(f"no section is called {', '.join(unknown)}", hint=f"sections: {', '.join(SECTIONS)}")


def _without_sections(catalog: Catalog, drop: Sequence[str]) -> Catalog:
    return replace(
        catalog,
        tensors={n: t for n, t in catalog.tensors.items() if section_of(n) not in drop},
        blobs={n: b for n, b in catalog.blobs.items() if section_of(n) not in drop},
    )


def _count_sections(catalog: Catalog) -> dict[str, int]:
    return dict(Counter(section_of(name) for name in (*catalog.tensors, *catalog.blobs)))


def _check_optimizer(catalog: Catalog, parameters: Sequence[Parameter]) -> None:
    """Every state belongs to a parameter and every parameter has the states that the others have; shapes agree.

    Group-indexed states (`state.<number>.…`) are refused: their numbers collide across pipeline stages.
    """
    shapes = {p.fqn: p.shape for p in parameters}
    kinds_of: dict[str, set[str]] = {}
    problems = []
    for name in (n for n in (*catalog.tensors, *catalog.blobs) if n.startswith(_STATE)):
        fqn, _, kind = name.removeprefix(_STATE).rpartition(".")
        if fqn not in shapes:
            problems.append(f"unexpected  {name}")
            continue
        kinds_of.setdefault(fqn, set()).add(kind)
        entry = catalog.tensors.get(name)
        if entry is not None and entry.shape not in ((), shapes[fqn]):
            problems.append(f"shape       {name}  is {list(entry.shape)}, its parameter {list(shapes[fqn])}")
    if kinds_of:
        every = set().union(*kinds_of.values())
        for fqn in shapes:
            problems += [f"missing     {_STATE}{fqn}.{kind}" for kind in sorted(every - kinds_of.get(fqn, set()))]
    if problems:
        raise CheckpointError(
            f"the optimizer state does not match the model, {len(problems)} problems:"
            + list_offenders(sorted(problems)),
            tries=[f"--drop {OPTIMIZER}, to go on with the weights alone"],
        )


def _cut(tensors: Mapping[str, TensorInfo], parameters: Sequence[Parameter], mesh: MeshShape | None) -> Files:
    """Parameters as the mesh holds them, each followed by its moments; small tensors in a file of their own."""
    shapes = {p.fqn: p.shape for p in parameters}
    moments: dict[str, list[str]] = {fqn: [] for fqn in shapes}
    small = []
    for name, info in tensors.items():
        fqn = name.removeprefix(_STATE).rpartition(".")[0] if name.startswith(_STATE) else ""
        if fqn in shapes and info.shape == shapes[fqn]:
            moments[fqn].append(name)
        elif name not in shapes:
            small.append((name, Box.whole(info.shape)))
    if mesh is None:
        small_names = {name for name, _ in small}
        files = boxes_for_any_mesh(
            {n: i for n, i in tensors.items() if n not in small_names}, file_bytes=DEFAULT_SHARD_BYTES
        )
    else:
        widest = {fqn: max(itemsize(tensors[n].dtype) for n in (fqn, *moments[fqn])) for fqn in shapes}
        files = {
            file: [(name, box) for fqn, box in held for name in (fqn, *moments[fqn])]
            for file, held in boxes_for_mesh(parameters, mesh, itemsizes=widest).items()
        }
    return files | ({SMALL_TENSOR_FILE: small} if small else {})


def _carry_files(catalog: Catalog, folder: Path) -> list[str]:
    """Everything in the folder that is not tensor data: model info, assets, whatever else lies with them."""
    names = [n for n in list_files(catalog.root) if n != DCP_METADATA and not n.endswith(".distcp")]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(catalog.root / name, folder / name)
    return names


def _remarks(catalog: Catalog) -> list[str]:
    """What a user should know about states that depend on the number of ranks."""
    names = [*catalog.tensors, *catalog.blobs]
    remarks = []
    if any(n.startswith(f"{DATALOADER}.dp_rank_") for n in names):  # torchtitan's
        remarks.append(
            "dataloader: state per data-parallel rank, kept as it is; it fits only a run of the same dp degree"
        )
    elif any(section_of(n) == DATALOADER for n in names):
        remarks.append("dataloader: kept; titan's state means the same for any mesh")
    if num_ranks := sum(n.startswith(f"{RNG}.cpu.") for n in names):
        remarks.append(f"rng: states of {num_ranks} ranks kept; a run with another number seeds anew")
    return remarks
