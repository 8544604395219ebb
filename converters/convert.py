"""Convert a checkpoint: open, plan, copy, commit. Either the whole output appears or nothing does."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from converters.common.box import TensorInfo, count_dtypes
from converters.common.errors import CheckpointError, ConfigError
from converters.common.sizes import MIB
from converters.containers.registry import CONTAINERS
from converters.containers.safetensors import index_remarks, is_of_series
from converters.conversion.completed import completed
from converters.conversion.destination import destination_of
from converters.conversion.execute import Execution, Progress, no_progress
from converters.conversion.needs import (
    COPY_BYTES_PER_SEC,
    DEQUANTIZE_BYTES_PER_SEC,
    QUANTIZE_BYTES_PER_SEC,
    TRANSPOSE_BYTES_PER_SEC,
    TRANSPOSING_WORKER_BYTES,
    WORKER_BYTES,
    Needs,
    estimate_needs,
)
from converters.conversion.plan import ConversionPlan, plan_conversion
from converters.conversion.quantize import describe_unknown, opened_scales
from converters.conversion.remarks import describe_dtypes, describe_quantized
from converters.conversion.trained_by import TRAINED_BY, apply_trained_by
from converters.engine.copy import DEFAULT_WORKERS
from converters.engine.journal import plan_fingerprint
from converters.families.registry import get_family
from converters.formats.base import Format, OutputOptions
from converters.formats.registry import FORMATS, get_format, usual_format
from converters.integrity.source_check import unchecked_remark, vouched_for
from converters.model.mtp import check_repeats, describe_mtp
from converters.model.multimodal import describe_extras, require_extras
from converters.naming.namings import is_named
from converters.source.open import open_checkpoint, require_exists
from converters.source.weights import NativeWeights, dequantized_for, native_weights
from converters.views.catalog import Catalog
from converters.views.expressions import TRANSPOSED_ROWS


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was done, or what a dry run would have done."""

    source: str
    destination: str
    source_format: str  # container and naming
    selected: str  # the place of the model in the source, where that holds several; else ""
    to: str
    model: str
    num_tensors: int
    num_files: int
    num_bytes: int
    dtypes: Mapping[str, int]  # bytes by element type in the output
    dequantized: str  # how the source's weights are quantized; "" where they are not
    source_quantization: str  # fp8 or mxfp4; "" where they are not
    quantized: str  # how the output's weights are; "" where they are not
    num_scales: int  # in the output
    moved_scales: int | None  # of them, those that differ from `scales_of`'s; None where nothing was compared
    scales_of: str  # the folder of the quantized weights whose scales are compared: --scales-from, or the source
    num_cast: int
    relative_error: Mapping[str, float]  # tensor → the largest |new - old| / |old| of its cast, where it is not exact
    kept_float32: tuple[str, ...]  # native names of the tensors that --dtype left as they are
    dropped: Mapping[str, str]  # source tensor → reason
    made: Mapping[str, str]  # native name of a tensor that the source lacks and the output has, as zeros → reason
    left_out: Mapping[str, int]  # section → entries
    missing: tuple[str, ...]  # tensors of the model that the source lacks; the output lacks them too
    extra: tuple[str, ...]  # tensors of the source that the model does not have; not in the output
    non_finite: Mapping[str, int]  # tensor → values that are NaN or infinite
    remarks: tuple[str, ...]
    other_files: tuple[str, ...]  # tokenizer, configs
    resumed_bytes: int  # written by an earlier attempt, and valid
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
    select: str | None = None,
    model_from: Path | str | None = None,
    workers: int = DEFAULT_WORKERS,
    digests: bool = True,
    allow_missing: bool = False,
    allow_extra: bool = False,
    allow_nonfinite: bool = False,
    mtp: str = "drop",
    keep_extra: bool | None = None,
    trained_by: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> ConvertReport:
    """Write the weights of `src` in the format `to` into the folder `dst`, or into that file where the format is one.

    `source`: the format that `src` is expected to have; another one is an error that names the right command.
    `select`: the model, where `src` holds several. `options`: what the format lets one choose. `dtype` casts the
    floating tensors (plan.find_casts). A `dry_run` stops when everything is planned and checked. `resume` continues
    from what an interrupted run of the same plan has written. Without `digests` the manifest has none. `mtp`:
    "keep" or "drop" layers for multi-token prediction. `keep_extra`: keep the tensors, files and fields of
    config.json that a multimodal checkpoint has beside its text model, or take those of `model_from`; None: keep
    them if the source has native names. `trained_by`: one of trained_by.TRAINED_BY.

    Raises TitanError, and then nothing was written.
    """
    output = get_format(to)
    options = output.completed(options)
    if mtp not in ("drop", "keep"):
        raise ConfigError(f"unknown choice for layers of multi-token prediction: {mtp!r}", hint="known: drop, keep")
    if trained_by not in (None, *TRAINED_BY):
        raise ConfigError(f"unknown trainer: {trained_by!r}", hint=f"known: {', '.join(TRAINED_BY)}")
    if options.quantize and allow_nonfinite:
        raise ConfigError("--allow-nonfinite: values that are NaN or infinite cannot be quantized", hint="leave it out")
    src, dst, started = Path(src), Path(dst), time.monotonic()
    require_exists(src)  # first: of swapped arguments DST exists, and --overwrite would be the wrong advice
    destination = destination_of(dst, output)
    destination.check(src, overwrite=overwrite)
    if options.scales_from is not None:
        destination.check(options.scales_from, overwrite=overwrite)
    if keep_extra and model_from is not None:  # tensors are read from it, too
        destination.check(Path(model_from), overwrite=overwrite)
    catalog = open_checkpoint(src, select=select)
    if source is not None:
        _require_format(src, dst, catalog, get_format(source), output)
    with (
        _open_weights(
            src,
            catalog,
            model_from=model_from,
            allow_missing=allow_missing,
            allow_extra=allow_extra,
            keep_mtp=mtp == "keep",
            keep_extra=keep_extra,
            dequantized=dequantized_for(dtype),
        ) as found,
        completed(found, model_from if keep_extra else None) as opened,
        opened_scales(
            options.scales_from if "scales_from" in output.takes else None, opened, keep_mtp=mtp == "keep"
        ) as scales_from,
    ):
        named = [] if source is None else _check_names(src, dst, opened, get_format(source), output)
        if keep_extra:
            require_extras(get_family(opened.info.family), opened.info.outer, opened.extras, where=src)
        weights, trained = apply_trained_by(opened, trained_by)
        if mtp == "keep" and not weights.num_mtp_layers:
            raise ConfigError(f"--mtp keep: {src} has no layers for multi-token prediction", hint="leave it out")
        plan = plan_conversion(
            weights,
            dst=dst,
            output=output,
            options=options,
            dtype=dtype,
            scales_from=scales_from,
            keep_extra=keep_extra,
        )
        weights = replace(weights, info=plan.contents.info)
        quantization = plan.quantization
        dequantized = weights.quantized.dtype if weights.quantized else ""
        vouched = vouched_for(catalog, plan.stored, rearranged=plan.rearranged, dequantized=dequantized)
        remarks = [*named, *trained, *destination.remarks(src, weights), *weights.info.notes, *weights.notes_on_codes]
        remarks += describe_dtypes(weights.info, weights.source.tensors, _cast_by_readers(plan), to=to, dtype=dtype)
        remarks += [describe_unknown(scales_from, weights.num_mtp_layers if mtp == "keep" else 0)]
        carried = destination.carried_files(weights)
        done, needs = Execution({}, []), None
        if dry_run:
            needs = estimate_needs(
                destination.work_folder,
                plan.target,
                num_read=len(catalog.tensors),
                workers=workers,
                carried=carried,
                worker_bytes_per_sec=_worker_rate(weights, plan),
                worker_bytes=TRANSPOSING_WORKER_BYTES if _transposes(weights, plan) else WORKER_BYTES,
            )
        else:
            remarks += check_repeats(weights.source, kept=mtp == "keep", where=str(src))
            if quantization:
                quantization.check_known()
            done = destination.write(
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
                fingerprint=plan_fingerprint(
                    catalog,
                    plan.target,
                    plan.casts,
                    digests=digests,
                    quantization=quantization.fingerprint if quantization else "",
                ),
                selected=catalog.place_of_selected,
                encoders=quantization.encoders if quantization else None,
                scales_from=quantization.known.reader if quantization and quantization.known else None,
                resume=resume,
                allow_nonfinite=allow_nonfinite,
            )
    is_indexed = catalog.container == "safetensors" and src.is_dir()
    index = index_remarks(catalog.root, catalog.num_bytes) if is_indexed else []
    ledger = weights.source.ledger
    return ConvertReport(
        source=str(src),
        destination=str(dst),
        source_format=f"{catalog.container}, {weights.naming} names",
        selected=catalog.place_of_selected,
        to=to,
        model=f"{weights.info.family}, {weights.info.args.num_layers} layers, dim {weights.info.args.dim}",
        num_tensors=len(plan.target.tensors),
        num_files=len(plan.target.file_bytes),
        num_bytes=plan.target.total_bytes,
        dtypes=count_dtypes(plan.target.tensors),
        dequantized=describe_quantized(weights.quantized),
        source_quantization=weights.quantized.scheme.method if weights.quantized else "",
        quantized="" if quantization is None else f"{len(quantization.encoders):,} weights in {quantization.scheme}",
        num_scales=quantization.num_scales if quantization else 0,
        moved_scales=done.num_moved if quantization and quantization.known and not dry_run else None,
        scales_of=str(quantization.known.catalog.place) if quantization and quantization.known else "",
        num_cast=len(plan.casts),
        relative_error=done.relative_error,
        kept_float32=plan.kept_float32,
        dropped=plan.dropped,
        made=plan.made,
        left_out=weights.left_out,
        missing=tuple(ledger.missing),
        extra=tuple(ledger.extra),
        non_finite=done.non_finite,
        remarks=tuple(
            filter(
                None,
                [
                    _describe_long_files(plan.target.file_bytes, options.shard_bytes),
                    describe_mtp(weights.num_mtp_layers, plan.dropped),
                    # of Meta's shards the catalog has one rank's part
                    *describe_extras(plan.dropped, {} if catalog.container == "meta" else catalog.tensors),
                    unchecked_remark(catalog, vouched),
                    *remarks,
                    *catalog.notes,
                    *index,
                    *done.remarks,
                ],
            )
        ),
        other_files=tuple(done.other_files),
        resumed_bytes=done.resumed_bytes,
        needs=needs,
        secs=time.monotonic() - started,
        dry_run=dry_run,
    )


def _cast_by_readers(plan: ConversionPlan) -> dict[str, TensorInfo]:
    """The tensors of an output without codes and scales, and without those that every reader keeps in float32."""
    contents, keep = plan.contents, plan.contents.family.keep_float32
    natives = contents.view.ledger.used
    return {
        name: info
        for name, info in contents.unquantized.items()
        if info.dtype != "float32" or not all(is_named(fqn, keep) for fqn in natives[name])
    }


def _describe_long_files(file_bytes: Mapping[str, int], shard_bytes: int | None) -> str:
    """The files that are longer than --shard-size because of one large tensor; headers and padding do not count."""
    most = None if shard_bytes is None else 1.1 * shard_bytes + MIB
    long = [name for name, size in file_bytes.items() if most and size > most]
    return f"--shard-size: longer, because no tensor is cut to fit: {', '.join(long)}" if long else ""


def _worker_rate(weights: NativeWeights, plan: ConversionPlan) -> float:
    """Bytes that a thread writes per second."""
    if plan.quantization:
        return QUANTIZE_BYTES_PER_SEC
    if _transposes(weights, plan):
        return TRANSPOSE_BYTES_PER_SEC
    return DEQUANTIZE_BYTES_PER_SEC if weights.quantized else COPY_BYTES_PER_SEC


def _transposes(weights: NativeWeights, plan: ConversionPlan) -> bool:
    """Whether large matrices are transposed on the way."""
    read = (*weights.source.expressions.values(), *plan.contents.view.expressions.values())
    return any(made.rows_together >= TRANSPOSED_ROWS for made in read)


def _open_weights(src: Path, catalog: Catalog, **options: Any) -> NativeWeights:
    """The weights of `src`. Raises CheckpointError that names the folder where `src` is one file of a series."""
    try:
        return native_weights(catalog, **options)
    except CheckpointError as error:
        if not (src.is_file() and is_of_series(src.name)):
            raise
        raise CheckpointError(
            f"{src}: a part of a checkpoint, one file of a series", hint="give its folder", tries=[str(src.parent)]
        ) from error


def _check_names(src: Path, dst: Path, weights: NativeWeights, wanted: Format, output: Format) -> list[str]:
    """A remark on the names in `src`, whose container other formats have, too.

    Raises CheckpointError where they are those of another format.
    """
    container, names = weights.catalog.container, weights.naming
    remarks = [text for begin, text in wanted.names.items() if begin == container or names.startswith(begin)]
    if remarks or not wanted.names:
        return [text for text in remarks if text]
    others = (f for f in FORMATS.values() if container in f.containers and names.startswith(tuple(f.names)))
    found = next(others, usual_format(container))
    if found is wanted:
        return [f"tensors have {names} names, not those of {wanted.called}"]
    tries = [f"titan convert {found.name}-to-{output.name} {src} {dst}"]
    raise CheckpointError(f"{src} is {found.called} with {names} names, not {wanted.called}", tries=tries)


def _require_format(src: Path, dst: Path, catalog: Catalog, wanted: Format, output: Format) -> None:
    """Raise CheckpointError where `src` is not what the command's name says."""
    if catalog.container in wanted.containers:
        return
    found = usual_format(catalog.container)
    if found is output:
        tries = [f"titan reshard {src} {dst}"] if output.name == "dcp" else []
        tries.append(f"titan convert {output.name}-to-{wanted.name} {src} {dst}")  # the other way round
    else:
        tries = [f"titan convert {found.name}-to-{output.name} {src} {dst}"]
    raise CheckpointError(f"{src} is {CONTAINERS[catalog.container].called}, not {wanted.called}", tries=tries)
