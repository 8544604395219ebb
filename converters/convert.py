"""Convert a checkpoint: open, plan, copy, commit. Either the whole output appears or nothing does."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from converters.common.box import TensorInfo, count_dtypes
from converters.common.errors import CheckpointError, ConfigError
from converters.common.sizes import MIB
from converters.containers.registry import CONTAINERS
from converters.containers.safetensors import is_of_series
from converters.conversion.destination import Destination, destination_of
from converters.conversion.plan import ConversionPlan, plan_conversion
from converters.conversion.quantize import describe_unknown, opened_scales
from converters.conversion.records import RUN, Execution, Needs, Request, Run
from converters.conversion.remarks import describe_dtypes, describe_quantized
from converters.conversion.steps import take_steps
from converters.conversion.trained_by import TRAINED_BY
from converters.families.args import describe_size
from converters.formats.registry import usual_format
from converters.integrity.source_check import unchecked_remark
from converters.model.mtp import check_repeats, describe_mtp
from converters.model.multimodal import describe_extras
from converters.naming.namings import is_named
from converters.naming.native_view import Reading
from converters.source.open import open_checkpoint, require_exists
from converters.source.weights import NativeWeights, dequantized_for, native_weights
from converters.views.catalog import Catalog


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


def convert(request: Request, run: Run = RUN) -> ConvertReport:
    """Write the weights of `request.src` in the format `request.output`, into a folder or into one file.

    Raises TitanError, and then nothing was written.
    """
    started = time.monotonic()
    request = replace(request, options=request.output.completed(request.options))
    _check_choices(request)
    destination = _checked_destination(request, overwrite=run.overwrite)
    catalog = open_checkpoint(request.src, select=request.select)
    _require_format(request, catalog)
    with ExitStack() as files:
        opened = files.enter_context(_open_weights(request, catalog))
        scales_from = files.enter_context(opened_scales(request, opened))
        weights, remarks = take_steps(opened, request, files)
        plan = plan_conversion(weights, request, scales_from=scales_from)
        remarks += _remarks(request, destination, weights, plan)
        remarks += [describe_unknown(scales_from, weights.num_mtp_layers if request.keep_mtp else 0)]
        if not run.dry_run:
            remarks += check_repeats(weights.source, kept=request.keep_mtp, where=str(request.src))
            if plan.quantization:
                plan.quantization.check_known()
        done = destination.write(plan.work, run)
    return replace(_report(request, weights, plan, done, remarks), secs=time.monotonic() - started)


def _check_choices(request: Request) -> None:
    """Raise ConfigError for a choice that is unknown, or impossible with another."""
    if request.mtp not in ("drop", "keep"):
        text = f"unknown choice for layers of multi-token prediction: {request.mtp!r}"
        raise ConfigError(text, hint="known: drop, keep")
    if request.trained_by not in (None, *TRAINED_BY):
        raise ConfigError(f"unknown trainer: {request.trained_by!r}", hint=f"known: {', '.join(TRAINED_BY)}")
    if request.options.quantize and request.allow_nonfinite:
        raise ConfigError("--allow-nonfinite: values that are NaN or infinite cannot be quantized", hint="leave it out")


def _checked_destination(request: Request, *, overwrite: bool) -> Destination:
    """The destination. Raises CheckpointError if it may not be written, or is a part of what is read."""
    require_exists(request.src)  # first: of swapped arguments DST exists, and --overwrite would be the wrong advice
    destination = destination_of(request.dst, request.output)
    destination.check(request.src, overwrite=overwrite)
    if request.options.scales_from is not None:
        destination.check(request.options.scales_from, overwrite=overwrite)
    if request.keep_extra and request.model_from is not None:  # tensors are read from it, too
        destination.check(request.model_from, overwrite=overwrite)
    return destination


def _remarks(request: Request, destination: Destination, weights: NativeWeights, plan: ConversionPlan) -> list[str]:
    """What a user should know of the plan and the report has no field for."""
    info, catalog, tensors = plan.contents.info, weights.catalog, weights.source.tensors
    return [
        *destination.remarks(catalog, info),
        *info.notes,
        *weights.notes_on_codes,
        *describe_dtypes(info, tensors, _cast_by_readers(plan), to=request.output.name, dtype=request.dtype),
    ]


def _report(
    request: Request, weights: NativeWeights, plan: ConversionPlan, done: Execution, remarks: Sequence[str]
) -> ConvertReport:
    """The report, without the time that it took."""
    catalog, info, target = weights.catalog, plan.contents.info, plan.work.target
    quantization, ledger = plan.quantization, weights.source.ledger
    known = quantization.known if quantization else None
    container = CONTAINERS[catalog.container]
    all_remarks = [
        _describe_long_files(target.file_bytes, request.options.shard_bytes),
        describe_mtp(weights.num_mtp_layers, plan.dropped),
        *describe_extras(plan.dropped, {} if container.has_parts_of_ranks else catalog.tensors),
        unchecked_remark(catalog, plan.work.vouched),
        *remarks,
        *catalog.notes,
        *([] if catalog.is_lone_file else container.index_remarks(catalog.store, catalog.num_bytes)),
        *done.remarks,
    ]
    return ConvertReport(
        source=str(request.src),
        destination=str(request.dst),
        source_format=f"{catalog.container}, {weights.naming} names",
        selected=catalog.place_of_selected,
        to=request.output.name,
        model=f"{info.family}, {describe_size(info.args)}",
        num_tensors=len(target.tensors),
        num_files=len(target.file_bytes),
        num_bytes=target.total_bytes,
        dtypes=count_dtypes(target.tensors),
        dequantized=describe_quantized(weights.quantized),
        source_quantization=weights.quantized.scheme.method if weights.quantized else "",
        quantized="" if quantization is None else f"{len(quantization.encoders):,} weights in {quantization.scheme}",
        num_scales=quantization.num_scales if quantization else 0,
        moved_scales=done.num_moved if known else None,
        scales_of=str(known.catalog.place) if known else "",
        num_cast=len(plan.work.casts),
        relative_error=done.relative_error,
        kept_float32=plan.kept_float32,
        dropped=plan.dropped,
        made=plan.made,
        left_out=weights.left_out,
        missing=tuple(ledger.missing),
        extra=tuple(ledger.extra),
        non_finite=done.non_finite,
        remarks=tuple(filter(None, all_remarks)),
        other_files=tuple(done.other_files),
        resumed_bytes=done.resumed_bytes,
        needs=done.needs,
        secs=0.0,
        dry_run=done.needs is not None,
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


def _open_weights(request: Request, catalog: Catalog) -> NativeWeights:
    """The weights of the source. Raises CheckpointError that names the folder if it is one file of a series."""
    try:
        reading = Reading(
            allow_missing=request.allow_missing,
            allow_extra=request.allow_extra,
            keep_mtp=request.keep_mtp,
            keep_extra=request.keep_extra,
            dequantized=dequantized_for(request.dtype),
        )
        return native_weights(catalog, reading, model_from=request.model_from)
    except CheckpointError as error:
        if not (catalog.is_lone_file and is_of_series(catalog.file)):
            raise
        raise CheckpointError(
            f"{request.src}: a part of a checkpoint, one file of a series",
            hint="give its folder",
            tries=[str(catalog.location)],
        ) from error


def _require_format(request: Request, catalog: Catalog) -> None:
    """Raise CheckpointError if the source is not what the command's name says."""
    wanted, output, places = request.source, request.output, f"{request.src} {request.dst}"
    if wanted is None or catalog.container in wanted.containers:
        return
    actual = usual_format(catalog.container)
    if actual is output:
        tries = [f"titan reshard {places}"] if output.name == "dcp" else []
        tries.append(f"titan convert {output.name}-to-{wanted.name} {places}")  # the other way round
    elif actual:
        tries = [f"titan convert {actual.name}-to-{output.name} {places}"]
    else:  # a registered container without a format
        tries = [f"titan convert auto {places} --to {output.name}"]
    raise CheckpointError(f"{request.src} is {CONTAINERS[catalog.container].called}, not {wanted.called}", tries=tries)
