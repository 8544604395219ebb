"""Convert a checkpoint: open, plan, copy, commit. Either the whole output appears or nothing does."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converters.assets import tokenizer_remark
from converters.carry_remarks import describe_dtypes, describe_left_files, describe_lone_file, describe_tokenizer
from converters.catalog import Catalog, count_dtypes
from converters.containers.safetensors import index_remarks, is_of_series
from converters.engine.copy import DEFAULT_WORKERS
from converters.engine.journal import plan_fingerprint
from converters.errors import CheckpointError
from converters.execute import Execution, Progress, check_places, execute, no_progress
from converters.formats.base import OutputOptions
from converters.formats.registry import get_output
from converters.needs import Needs, estimate_needs
from converters.open import open_checkpoint, require_there
from converters.plan import ConversionPlan, plan_conversion
from converters.single_file import check_file_place, execute_into_file, folder_of
from converters.source_check import unchecked_remark, vouched_for
from converters.weights import NativeWeights, native_weights

# `titan convert A-to-B` exists for each of these and DCP, both ways
_BESIDE_DCP = ("hf", "meta", "torch", "torchtune")
_CONTAINERS_OF = {
    "dcp": ("dcp",),
    "hf": ("safetensors", "torch"),
    "meta": ("meta",),
    "torch": ("torch",),
    "torchtune": ("safetensors", "torch", "meta"),  # what its checkpointers write, each under its own names
}
_CALLED = {
    "dcp": "a DCP checkpoint",
    "hf": "a Hugging Face checkpoint",
    "meta": "an original Meta release",
    "torch": "a torch file",
    "torchtune": "a checkpoint of torchtune",
}
_CALLED_CONTAINER = {
    "dcp": "a DCP checkpoint",
    "safetensors": "a Hugging Face checkpoint (safetensors)",
    "torch": "a torch file",
    "meta": "an original Meta release",
}
_SUFFIXES_OF_FILES = {".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".distcp"}
_KIND_OF = {"dcp": "dcp", "safetensors": "hf", "meta": "meta", "torch": "torch"}
_LONE_FILE = "the file does not say what model it is: whoever reads it names a folder that does (--model-from)"


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was done, or would be done by a run that is not dry."""

    source: str
    destination: str
    source_format: str  # container and naming
    to: str
    model: str
    num_tensors: int
    num_files: int
    num_bytes: int
    dtypes: Mapping[str, int]  # bytes by element type in the output
    num_cast: int
    relative_error: Mapping[str, float]  # tensor → the largest |new - old| / |old| that its cast made; exact: not in
    kept_float32: tuple[str, ...]  # native names of what --dtype passed over
    dropped: Mapping[str, str]  # source tensor → reason
    left_out: Mapping[str, int]  # section → entries
    missing: tuple[str, ...]  # what the model has and the source has not: allowed, and missing in the output too
    extra: tuple[str, ...]  # what the source has and the model has not: allowed, and not in the output
    non_finite: Mapping[str, int]  # tensor → values that are NaN or infinite
    remarks: tuple[str, ...]
    other_files: tuple[str, ...]  # tokenizer, configs
    resumed_bytes: int  # written by an earlier attempt, and found good
    needs: Needs | None  # of a dry run
    secs: float
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    src: Path | str,
    dst: Path | str,
    *,
    to: str,
    source: str | None = None,
    dtype: str | None = None,
    options: OutputOptions = OutputOptions(),  # noqa: B008  frozen
    model_from: Path | str | None = None,
    workers: int = DEFAULT_WORKERS,
    digests: bool = True,
    allow_missing: bool = False,
    allow_extra: bool = False,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ConvertReport:
    """Write the weights of `src` as `to` into the folder `dst`, or into that very file where the format is one.

    `source`: what `src` is expected to be (dcp, hf, meta, torch, torchtune); another kind is an error that names the
    right command. `options`: what the format lets one choose. `dtype` casts the floating tensors (plan.find_casts). A
    `dry_run` stops when everything is planned and checked. `resume` goes on from what a killed run of the same plan
    has written. Without `digests` the manifest has none.
    """
    output = get_output(to)
    src, dst, started = Path(src), Path(dst), time.monotonic()
    require_there(src)  # first: of swapped arguments DST exists, and --overwrite would be the wrong advice
    into_file = dst.suffix in output.file_suffixes
    if not into_file and dst.suffix.lower() in _SUFFIXES_OF_FILES:
        raise CheckpointError(
            f"{dst}: a folder would be made, and this is the name of a file",
            tries=[str(dst.with_suffix(suffix)) for suffix in ("", *sorted(output.file_suffixes))],
        )
    (check_file_place if into_file else check_places)(src, dst, overwrite=overwrite)
    catalog = open_checkpoint(src)
    _require_source(src, dst, catalog, source, to)
    with _open_weights(
        src, catalog, model_from=model_from, allow_missing=allow_missing, allow_extra=allow_extra
    ) as weights:
        plan = plan_conversion(weights, dst=dst, output=output, options=options, dtype=dtype)
        vouched = vouched_for(catalog, plan.stored)
        remarks = _describe_carried(src, weights, plan, to=to, dtype=dtype, into_file=into_file)
        carried = list(weights.info.assets.values())
        done, needs = Execution({}, []), None
        if dry_run:
            needs = estimate_needs(
                folder_of(dst) if into_file else dst,
                plan.target,
                workers=workers,
                carried=() if into_file else carried,
            )
        else:
            done = (execute_into_file if into_file else execute)(
                dst,
                source=plan.contents.view,
                target=plan.target,
                casts=plan.casts,
                write_small_files=lambda folder: output.write_small_files(folder, plan.contents, options),
                carried=carried,
                native_rows=plan.native_rows,
                vouched=vouched,
                overwrite=overwrite,
                progress=progress,
                workers=workers,
                digests=digests,
                fingerprint=plan_fingerprint(catalog, plan.target, plan.casts, digests=digests),
                resume=resume,
                allow_nonfinite=allow_nonfinite,
            )
    ledger = weights.source.ledger
    return ConvertReport(
        source=str(src),
        destination=str(dst),
        source_format=f"{catalog.container}, {weights.naming} names",
        to=to,
        model=f"{weights.info.family}, {weights.info.args.num_layers} layers, dim {weights.info.args.dim}",
        num_tensors=len(plan.target.tensors),
        num_files=len(plan.target.file_bytes),
        num_bytes=plan.target.total_bytes,
        dtypes=count_dtypes(plan.target.tensors),
        num_cast=len(plan.casts),
        relative_error=done.relative_error,
        kept_float32=plan.kept_float32,
        dropped=ledger.dropped,
        left_out=weights.left_out,
        missing=tuple(ledger.missing),
        extra=tuple(ledger.extra),
        non_finite=done.non_finite,
        remarks=(
            *filter(None, [_tell_long_files(plan.target.file_bytes, options.shard_bytes)]),
            *filter(None, [unchecked_remark(catalog, vouched)]),
            *remarks,
            *catalog.notes,
            *(
                index_remarks(catalog.root, catalog.num_bytes)
                if catalog.container == "safetensors" and src.is_dir()
                else ()
            ),
            *done.remarks,
        ),
        other_files=tuple(done.other_files),
        resumed_bytes=done.resumed_bytes,
        needs=needs,
        secs=time.monotonic() - started,
        dry_run=dry_run,
    )


def _describe_carried(
    src: Path, weights: NativeWeights, plan: ConversionPlan, *, to: str, dtype: str | None, into_file: bool
) -> list[str]:
    """What becomes of everything that is not weights, where that is not as it was."""
    info, written = weights.info, plan.contents.tensors
    if into_file:
        found = [_LONE_FILE, describe_lone_file(info)]
    else:
        of_meta = weights.catalog.container == "meta"
        untranslated = tokenizer_remark(info.assets, to=to, vocab_size=info.args.vocab_size, of_meta=of_meta)
        found = [untranslated, describe_tokenizer(info), *info.remarks]
        found += [describe_left_files(weights.catalog, info) if src.is_dir() else ""]
    found += info.notes
    found += describe_dtypes(info, weights.source.tensors, written, to=to, dtype=dtype)
    return [remark for remark in found if remark]


def _tell_long_files(file_bytes: Mapping[str, int], shard_bytes: int | None) -> str:
    """What came of --shard-size where tensors are larger; headers and a little padding are not meant."""
    most = None if shard_bytes is None else 1.1 * shard_bytes + 1024**2
    long = [name for name, size in file_bytes.items() if most and size > most]
    return f"--shard-size: longer, because no tensor is cut to fit: {', '.join(long)}" if long else ""


def _open_weights(src: Path, catalog: Catalog, **options: Any) -> NativeWeights:
    """The weights of `src`; where they are not a model, and `src` is one file of a series, that is what is amiss."""
    try:
        return native_weights(catalog, **options)
    except CheckpointError as error:
        if not (src.is_file() and is_of_series(src.name)):
            raise
        raise CheckpointError(
            f"{src}: a part of a checkpoint, one file of a series", hint="give its folder", tries=[str(src.parent)]
        ) from error


def _require_source(src: Path, dst: Path, catalog: Catalog, source: str | None, to: str) -> None:
    """Raise CheckpointError where `src` is not what the command's name says."""
    if source is None or catalog.container in _CONTAINERS_OF[source]:
        return
    found = _KIND_OF[catalog.container]
    if found == to:
        tries = [f"titan reshard {src} {dst}"] if to == "dcp" else []
        tries.append(f"titan convert {to}-to-{source} {src} {dst}")  # the other way round
    elif (found == "dcp" and to in _BESIDE_DCP) or (to == "dcp" and found in _BESIDE_DCP):
        tries = [f"titan convert {found}-to-{to} {src} {dst}"]
    else:
        tries = [f"titan convert auto {src} {dst} --to {to}"]
    raise CheckpointError(f"{src} is {_CALLED_CONTAINER[catalog.container]}, not {_CALLED[source]}", tries=tries)
