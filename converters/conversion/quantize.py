"""Plan which weights an output quantizes: one tensor of values becomes a tensor of codes and one of scales."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from converters.common.box import TensorInfo
from converters.common.errors import ConfigError, UnsupportedError, list_offenders
from converters.common.fold import fold_texts
from converters.conversion.records import Request
from converters.engine.journal import files_identity
from converters.families.args import other_numbers
from converters.families.base import Naming
from converters.families.parameters import EMBEDDING, OUTPUT
from converters.families.registry import get_family
from converters.integrity.source_check import check_tensors
from converters.naming.native_view import DEQUANTIZED, Reading
from converters.quantized.fp8_encoder import Fp8Encoder
from converters.quantized.mxfp4_encoder import Mxfp4Encoder
from converters.quantized.mxfp4_scheme import Mxfp4Scheme
from converters.quantized.quantization import SPELLINGS, Fp8Scheme, Scheme, parse_quantize
from converters.source.open import open_checkpoint
from converters.source.weights import NativeWeights, native_weights
from converters.views.expressions import Mxfp4Blocks


@dataclass(frozen=True, slots=True)
class Quantization:
    """What an output quantizes."""

    scheme: Scheme  # as config.json describes it
    encoders: Mapping[str, Fp8Encoder | Mxfp4Encoder]  # by target name
    num_scales: int
    known: NativeWeights | None  # whose scales are compared, or kept
    known_scales: tuple[str, ...]  # its names of them
    keeps_known: bool

    @property
    def coded(self) -> frozenset[str]:
        """The target's names of codes and of scales."""
        return frozenset(self.encoders) | {encoder.scales for encoder in self.encoders.values()}

    def with_scales(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The target's tensors: codes, each with its scales, and what stays as it is."""
        planned: dict[str, TensorInfo] = {}
        for name, info in tensors.items():
            planned[name] = info
            if (encoder := self.encoders.get(name)) is not None:
                stored = self.scheme.stored(info.shape, scale_dtype=encoder.scale_dtype)
                planned[name], planned[encoder.scales] = stored
        return planned

    def casts(self, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
        """The casts before quantizing: where a scheme's rule is one for values in bfloat16."""
        if not (isinstance(self.scheme, Mxfp4Scheme) and self.scheme.rounds_up):
            return {}
        return {name: DEQUANTIZED for name in self.encoders if tensors[name].dtype != DEQUANTIZED}

    def check_known(self) -> None:
        """Raise CheckpointError if the scales that are kept are not those of their folder's manifest."""
        if self.known is not None and self.keeps_known:
            check_tensors(self.known.reader, self.known_scales)

    @property
    def fingerprint(self) -> str:
        """Text that identifies it, to resume only the same work."""
        files = "" if self.known is None else files_identity(self.known.catalog)
        return f"{self.scheme!r} {self.keeps_known} {sorted(self.encoders)} {files}"


def plan_quantization(
    weights: NativeWeights,
    tensors: Mapping[str, TensorInfo],
    native_of: Mapping[str, Sequence[str]],
    naming: Naming,
    *,
    quantize: str,
    scales_from: NativeWeights | None,
) -> Quantization:
    """Plan to quantize the linear layers and experts among `tensors` (the target's; their native names: `native_of`).

    `scales_from`: a quantized copy of the model, whose scales are kept, and which says which weights are quantized.
    Without one, scales that differ from those of a source that is quantized itself are counted.
    """
    scheme, info = parse_quantize(quantize), weights.info
    covered = {p.fqn for p in get_family(info.family).parameters(info.args) if scheme.covers(p)}
    chosen, known = [name for name in tensors if covered.issuperset(native_of[name])], scales_from
    is_renamed = isinstance(scheme, Fp8Scheme) and (known or weights).naming != naming.name
    if isinstance(scheme, Fp8Scheme) and any(len(tensors[name].shape) != 2 for name in chosen):
        raise UnsupportedError(
            f"--quantize {quantize}: checkpoints with {naming.name} names of this model have the experts of a layer as "
            "one tensor, for which there is no float8 form",
            hint="leave it out",
        )
    if scales_from is not None and scales_from.quantized is not None:
        if is_renamed:
            raise ConfigError(
                f"--scales-from {scales_from.catalog.root}: its weights have {scales_from.naming} names, the output's "
                f"have {naming.name} names"
            )
        scheme = _same_scheme(scheme, scales_from.quantized.scheme, scales_from.catalog.root)
    elif weights.quantized and weights.quantized.scheme.block == scheme.block and not is_renamed:
        known = weights
    encoders: Mapping[str, Fp8Encoder | Mxfp4Encoder]
    if isinstance(scheme, Mxfp4Scheme):
        encoders, known_scales = _mxfp4_encoders(
            tensors, chosen, native_of, scheme, known, keep=scales_from is not None
        )
    else:
        encoders, known_scales = _fp8_encoders(chosen, scheme, known, keep=scales_from is not None)
        scheme = replace(scheme, stays=_stays(tensors, encoders, native_of, naming))
    return Quantization(
        scheme=scheme,
        encoders=encoders,
        num_scales=sum(prod(scheme.stored(tensors[name].shape)[1].shape) for name in encoders),
        known=known,
        known_scales=known_scales,
        keeps_known=scales_from is not None,
    )


def _fp8_encoders(
    chosen: Sequence[str], scheme: Fp8Scheme, known: NativeWeights | None, *, keep: bool
) -> tuple[dict[str, Fp8Encoder], tuple[str, ...]]:
    """An encoder for each weight, and the names of known scales; kept ones also say which weights are quantized."""
    if keep and known is not None and known.quantized is not None:
        chosen = [name for name in chosen if name in known.quantized.expressions]
    encoders, found = {}, list[str]()
    for name in chosen:
        its = scheme.scales_of(name)
        held = known.reader.tensors.get(its) if known is not None else None
        encoders[name] = Fp8Encoder(
            its,
            scheme,
            DEQUANTIZED,
            scale_dtype=held.dtype if held is not None and keep else "float32",
            known=partial(known.reader.read, its) if held is not None and known is not None else None,
            keeps_known=keep,
        )
        found += [its] if held is not None else []
    return encoders, tuple(found)


def _mxfp4_encoders(
    tensors: Mapping[str, TensorInfo],
    chosen: Sequence[str],
    native_of: Mapping[str, Sequence[str]],
    scheme: Mxfp4Scheme,
    known: NativeWeights | None,
    *,
    keep: bool,
) -> tuple[dict[str, Mxfp4Encoder], tuple[str, ...]]:
    """An encoder for each weight, and the names of known scales; these may have other names than the output's.

    Raises UnsupportedError if rows are not whole blocks.
    """
    if odd := [f"{name}  {list(tensors[name].shape)}" for name in chosen if tensors[name].shape[-1] % scheme.block[1]]:
        raise UnsupportedError(
            f"mxfp4 has blocks of {scheme.block[1]} values of a row, which do not divide:"
            + list_offenders(fold_texts(odd))
        )
    encoders, scale_names = {}, list[str]()
    for name in chosen:
        (native,) = native_of[name]
        expression = known.source.expressions.get(native) if known is not None else None
        scales = expression.scales if isinstance(expression, Mxfp4Blocks) else None
        encoders[name] = Mxfp4Encoder(
            scheme.scales_of(name),
            scheme,
            DEQUANTIZED,
            known=partial(scales.read, known.reader) if known is not None and scales is not None else None,
            keeps_known=keep,
        )
        scale_names += scales.sources if scales is not None else ()
    return encoders, tuple(scale_names)


def _stays(
    tensors: Mapping[str, TensorInfo],
    encoders: Mapping[str, Any],
    native_of: Mapping[str, Sequence[str]],
    naming: Naming,
) -> tuple[str, ...]:
    """The modules of matrices that are not quantized, but for the embedding."""
    stays = [rule.foreign for rule in naming.rules if rule.native == OUTPUT]  # of tied models, too
    stays += [
        name
        for name, info in tensors.items()
        if name not in encoders and len(info.shape) > 1 and EMBEDDING not in native_of[name]
    ]
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in stays))


def _same_scheme(asked: Scheme, found: Scheme, folder: Path) -> Scheme:
    """The scheme of a folder whose scales are kept. Raises ConfigError if another was asked for."""
    if (asked.method, asked.power_of_two) != (found.method, found.power_of_two):
        kinds = {text: (each.method, each.power_of_two) for text, each in SPELLINGS.items()}
        fitting = next(text for text, kind in kinds.items() if kind == (found.method, found.power_of_two))
        raise ConfigError(
            f"--scales-from {folder} has {found}", hint="its scales are kept", tries=[f"--quantize {fitting}"]
        )
    return found if isinstance(found, Fp8Scheme) else asked


def describe_unknown(known: NativeWeights | None, num_mtp_layers: int) -> str:
    """The layers for multi-token prediction that a folder of kept scales lacks; "" if none of `num_mtp_layers`."""
    if known is None or known.num_mtp_layers >= num_mtp_layers:
        return ""
    return (
        f"--scales-from {known.catalog.root} has {known.num_mtp_layers} of {num_mtp_layers} layers for multi-token "
        "prediction: the weights of the others are not quantized"
    )


@contextmanager
def opened_scales(request: Request, weights: NativeWeights) -> Iterator[NativeWeights | None]:
    """The quantized copy of a model that `--scales-from` names. Raises ConfigError if it is of another model.

    With its layers for multi-token prediction, if they are kept and there are any.
    """
    folder = request.options.scales_from if "scales_from" in request.output.takes else None
    if folder is None:
        yield None
        return
    with native_weights(open_checkpoint(folder), Reading(keep_mtp=request.keep_mtp)) as known:
        if known.quantized is None:
            raise ConfigError(f"--scales-from {folder}: its weights are not quantized")
        other = other_numbers(weights.info.args, known.info.args)
        if other or known.info.family != weights.info.family:
            raise ConfigError(
                f"--scales-from {folder}: it is another model:" + list_offenders(other or [known.info.family])
            )
        yield known
