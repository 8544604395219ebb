"""Plan what a conversion writes, before the first byte: source view, casts, files, and what is left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from converters.common.box import Box, TensorInfo, count_dtypes
from converters.common.collector import collector_paused
from converters.common.dtypes import DTYPES, itemsize
from converters.common.errors import CheckpointError, ConfigError, list_offenders
from converters.common.fold import fold_texts
from converters.conversion.quantize import Quantization, plan_quantization
from converters.conversion.records import Plan, Request
from converters.families.base import Naming
from converters.families.registry import get_family
from converters.formats.base import Contents, Format, OutputOptions
from converters.integrity.source_check import Vouched, check_digests, vouched_for
from converters.model.multimodal import require_place, with_extras
from converters.naming.foreign_view import foreign_view
from converters.naming.namings import is_named
from converters.source.weights import NativeWeights, without_outer
from converters.store.digest import TensorDigest
from converters.store.location import locate
from converters.store.outputs import outputs_at
from converters.views.expressions import Expression, Index, Source, Stack
from converters.views.view import View

DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """A plan of writing the weights of a model, and what the report says of it."""

    work: Plan
    contents: Contents
    kept_float32: tuple[str, ...]  # native names of tensors that a cast to 16 bits leaves as they are
    dropped: Mapping[str, str]  # source tensor → reason
    made: Mapping[str, str]  # native name of a tensor that is zeros, without a source → reason
    quantization: Quantization | None


@collector_paused()
def plan_conversion(
    weights: NativeWeights, request: Request, *, scales_from: NativeWeights | None = None
) -> ConversionPlan:
    """Plan writing `weights` as requested; `scales_from`: the open checkpoint that the options name.

    Raises UnsupportedError if the output cannot hold this model, CheckpointError if it cannot hold values that are not
    zero or if the source's small files are not those of its manifest, and ConfigError for a `keep_extra` if it cannot
    hold the tensors beside the text model.
    """
    output, options = request.output, request.options
    output.check_options(options)
    family = get_family(weights.info.family)
    naming, view, holds_extras = _named(weights, output, options)
    native_of = {name: (name,) for name in view.tensors} if naming is None else view.ledger.used
    written = {fqn for names in native_of.values() for fqn in names}
    unplaced = () if holds_extras else weights.extras
    no_place = require_place(output.called, unplaced, keep_extra=request.keep_extra)
    dropped = no_place if naming is None else no_place | _dropped(weights, view, output, options)
    native_casts = find_casts(weights.source.tensors, request.dtype, keep=family.keep_float32)
    casts = {name: native_casts[names[0]] for name, names in native_of.items() if names[0] in native_casts}
    quantization = None
    if options.quantize is not None and naming is not None:
        quantization = plan_quantization(
            weights, view.tensors, native_of, naming, quantize=options.quantize, scales_from=scales_from
        )
        plain_casts = {name: cast for name, cast in casts.items() if name not in quantization.encoders}
        casts = plain_casts | quantization.casts(view.tensors)  # encoders take the values that were read
    tensors = {n: TensorInfo(casts.get(n, info.dtype), info.shape) for n, info in view.tensors.items()}
    info = without_outer(weights.info, family) if unplaced else weights.info
    dst = locate(request.dst)
    contents = Contents(tensors, view, family, info, dst, streamed=outputs_at(dst).only_appends)
    if quantization is not None:
        coded, scheme = quantization.coded, quantization.scheme
        contents = replace(contents, tensors=quantization.with_scales(tensors), quantization=scheme, coded=coded)
    kept_float32 = find_kept_float32(weights.source.tensors, request.dtype, keep=family.keep_float32)
    work = Plan(
        source=view,
        target=output.plan(contents, options),
        casts=casts,
        write_small_files=lambda folder: output.write_small_files(folder, contents, options),
        carried=list(info.assets.values()),
        catalog=weights.catalog,
        readers=[weights.reader, *weights.other_readers, *([scales_from.reader] if scales_from else [])],
        native_rows=None if naming is None else view.native_rows,
        vouched=_vouched(weights, view, native_of, is_native=naming is None),
        encoders=quantization.encoders if quantization else {},
        quantization=quantization.fingerprint if quantization else "",
        is_dequantized=weights.quantized is not None,
        allow_nonfinite=request.allow_nonfinite,
    )
    return ConversionPlan(
        work=work,
        contents=contents,
        kept_float32=tuple(fqn for fqn in kept_float32 if fqn in written),
        dropped={**weights.source.ledger.dropped, **dropped},
        made={fqn: reason for fqn, reason in weights.source.ledger.made.items() if fqn in written},
        quantization=quantization,
    )


def _named(weights: NativeWeights, output: Format, options: OutputOptions) -> tuple[Naming | None, View, bool]:
    """The naming of an output (None: native), the weights under it, and whether it holds those beside a text model."""
    family = get_family(weights.info.family)
    naming = output.naming(family, options)
    if naming is None:
        return None, weights.source, True
    holds_extras = bool(weights.extras) and family.multimodal is not None and naming.name == "hf"
    if holds_extras and family.multimodal:
        naming = family.namings[family.multimodal.naming]
    view = foreign_view(weights.source, weights.info, naming)
    return naming, with_extras(view, weights.source, weights.extras) if holds_extras else view, holds_extras


def _vouched(
    weights: NativeWeights, view: View, native_of: Mapping[str, Sequence[str]], *, is_native: bool
) -> Vouched | None:
    """The digests that the source's manifest has of what is read."""
    source = weights.source
    stored = {name: _stored(view.expressions[name], source, is_native=is_native) for name in native_of}
    in_halves = {fqn for fqn, expression in source.expressions.items() if expression.has_own_digest}
    rearranged = frozenset(
        name
        for target, names in stored.items()
        if view.expressions[target].has_own_digest or not in_halves.isdisjoint(native_of[target])
        for name in names
    )
    values = {target: tuple(n for n in names if n not in source.ledger.scales) for target, names in stored.items()}
    dequantized = weights.quantized.dtype if weights.quantized else ""
    return vouched_for(weights.catalog, values, rearranged=rearranged, dequantized=dequantized)


def _stored(expression: Expression, native: View, *, is_native: bool) -> tuple[str, ...]:
    """The source's own names of the tensors that a target's values are read from."""
    if is_native:
        return expression.sources
    match expression:
        case Index(Source(fqn), number) if isinstance(stack := native.expressions[fqn], Stack):
            return stack.parts[number].sources
    return tuple(dict.fromkeys(name for fqn in expression.sources for name in native.expressions[fqn].sources))


def _dropped(weights: NativeWeights, view: View, output: Format, options: OutputOptions) -> dict[str, str]:
    """Source tensor → reason, for tensors that the naming has no name for. They are read: only zeros can be dropped.

    Raises CheckpointError with every one that is not zero, unless `options` say to drop it.
    """
    if options.drop_expert_bias and not view.ledger.dropped:
        raise ConfigError(f"--drop-expert-bias: {output.called} of this model drops none", hint="leave it out")
    source, lost = weights.source, []
    dropped: dict[str, str] = {}
    reasons_by_fqn = {fqn: reason for fqn, reason in view.ledger.dropped.items() if source.ledger.used[fqn]}
    digests = {fqn: TensorDigest(source.tensors[fqn].dtype, source.tensors[fqn].shape) for fqn in reasons_by_fqn}
    for fqn, reason in reasons_by_fqn.items():
        whole = Box.whole(source.tensors[fqn].shape)
        values = source.read(fqn, whole)
        digests[fqn].update(whole, values)
        if not np.any(values != 0):
            reason = f"zero; {reason}"
        elif options.drop_expert_bias:
            reason = f"as asked, although it is not zero: tokens may be sent to other experts ({reason})"
        else:
            lost.append(fqn)
        dropped |= dict.fromkeys(source.ledger.used[fqn], reason)
    check_digests(weights.catalog, {fqn: source.ledger.used[fqn] for fqn in reasons_by_fqn}, digests)
    if lost:
        reasons = "; ".join(dict.fromkeys(reasons_by_fqn[fqn] for fqn in lost))
        raise CheckpointError(
            f"{output.called} has no place for these, and they are not zero:" + list_offenders(fold_texts(lost)),
            hint=f"{reasons}; keep them with --to dcp or --to torch, or drop them, which changes how tokens are routed",
            tries=["--drop-expert-bias"],
        )
    return dropped


def find_casts(tensors: Mapping[str, TensorInfo], dtype: str | None, *, keep: Sequence[str] = ()) -> dict[str, str]:
    """The floating tensors that are cast to `dtype`; none if it is None (the source dtype stays).

    Those of `find_kept_float32` stay float32.
    """
    if dtype is None:
        return {}
    name, kept = _floating(dtype), set(find_kept_float32(tensors, dtype, keep=keep))
    return {
        n: name
        for n, info in tensors.items()
        if info.dtype != name and DTYPES[info.dtype].is_floating and n not in kept
    }


def find_kept_float32(tensors: Mapping[str, TensorInfo], dtype: str | None, *, keep: Sequence[str] = ()) -> list[str]:
    """Tensors that stay float32 when the others are cast to 16 bits or less.

    A few float32 tensors among weights of 16 bits (most, by bytes) are so on purpose. `keep`: native names, with
    `{n}` for the layer, that a family always wants in float32.
    """
    if dtype is None or itemsize(_floating(dtype)) > 2:
        return []
    wide = [n for n, info in tensors.items() if info.dtype == "float32"]
    floating = {n: info for n, info in tensors.items() if DTYPES[info.dtype].is_floating}
    num_bytes = count_dtypes(floating)
    narrow_bytes = sum(size for kind, size in num_bytes.items() if itemsize(kind) <= 2)
    if narrow_bytes > sum(num_bytes.values()) - narrow_bytes:
        return wide
    return [n for n in wide if is_named(n, keep)]


def _floating(dtype: str) -> str:
    """The name of an element type as a user may spell it. Raises ConfigError if it is not a floating type."""
    name = DTYPE_SPELLINGS.get(dtype, dtype)
    if name not in DTYPES or not DTYPES[name].is_floating:
        floating = ", ".join(d.name for d in DTYPES.values() if d.is_floating)
        raise ConfigError(f"unknown floating element type: {dtype!r}", hint=f"known: {floating}")
    return name
