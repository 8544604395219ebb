"""Quantize weights while they are copied: one tensor of values becomes a tensor of codes and one of scales."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from converters.catalog import Box, TensorInfo
from converters.dtypes import numpy_dtype
from converters.engine.encoder import Encoded
from converters.errors import ConfigError, list_offenders
from converters.families.base import EMBEDDING, OUTPUT, Naming, computed_numbers
from converters.families.registry import get_family
from converters.fp8 import block_amax, decode, encode, num_blocks, saturated, scales_of
from converters.open import open_checkpoint
from converters.quantization import CODES, SCALE, SPELLINGS, Fp8Scheme, is_quantized, parse_quantize
from converters.source_check import check_tensors
from converters.weights import DEQUANTIZED, NativeWeights, native_weights

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Fp8Encoder:
    """Quantizes one matrix (see engine/encoder.py)."""

    scales: str  # name of the tensor of scales
    scheme: Fp8Scheme
    scale_dtype: str = "float32"
    known: Callable[[Box], _Array] | None = None  # scales that another copy of the weights has
    keeps_known: bool = False  # use them, but where values have outgrown them

    @property
    def rows(self) -> int:
        return self.scheme.block[0]

    @property
    def digest_dtype(self) -> str:
        return DEQUANTIZED

    def encode(self, box: Box, values: _Array) -> Encoded:
        """Codes and scales of `values`; not of values that are infinite or NaN, which the caller counts."""
        block = self.scheme.block
        with np.errstate(over="ignore", invalid="ignore"):
            amax = block_amax(values, block)
            scales = scales_of(amax, power_of_two=self.scheme.power_of_two).astype(numpy_dtype(self.scale_dtype))
            first = (box.offsets[0] // block[0], box.offsets[1] // block[1])
            place = Box(first, (scales.shape[0], scales.shape[1]))
            num_moved, is_exact = 0, self.scheme.power_of_two or self.scale_dtype != "float32"
            exact = np.full(scales.shape, is_exact)
            if self.known is not None:
                known = self.known(place)
                wide = known.astype(np.float32)
                if self.keeps_known:
                    fits = (np.isfinite(wide) & (wide >= 0)) & ~saturated(amax, wide)
                    scales, exact = np.where(fits, known, scales), exact | fits
                num_moved = int(np.count_nonzero(scales.astype(np.float32) != wide))
            codes = encode(values, amax, scales.astype(np.float32), block, exact=exact)
            return Encoded(codes, scales, place, num_moved)

    def values_of(self, encoded: Encoded, box: Box) -> _Array:
        start = (box.offsets[0], box.offsets[1])
        codes = encoded.codes.view(numpy_dtype(CODES))
        return decode(codes, encoded.scales, self.scheme.block, start=start, dtype=DEQUANTIZED)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What an output quantizes."""

    scheme: Fp8Scheme  # as config.json describes it
    encoders: Mapping[str, Fp8Encoder]  # by target name
    num_scales: int
    known: NativeWeights | None  # whose scales are compared, or kept
    keeps_known: bool

    def with_scales(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The target's tensors: codes, each with its scales, and what stays as it is."""
        planned: dict[str, TensorInfo] = {}
        for name, info in tensors.items():
            planned[name] = info
            if (encoder := self.encoders.get(name)) is not None:
                planned[name] = TensorInfo(CODES, info.shape)
                planned[encoder.scales] = TensorInfo(encoder.scale_dtype, _grid(info.shape, self.scheme))
        return planned

    def check_known(self) -> None:
        """Raise CheckpointError where the scales that are kept are not those of their folder's manifest."""
        if self.known is not None and self.keeps_known:
            check_tensors(self.known.reader, [each.scales for each in self.encoders.values() if each.known])

    @property
    def fingerprint(self) -> str:
        """Text that identifies it, to resume only the same work."""
        files = ""
        if self.known is not None:
            catalog = self.known.catalog
            states = [(name, (catalog.root / name).stat()) for name in sorted(catalog.tensor_files)]
            files = f"{catalog.root.resolve()} {[(name, s.st_size, s.st_mtime_ns) for name, s in states]}"
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

    `scales_from`: an fp8 copy of the model, whose scales are kept, and which says which weights are quantized. Without
    one, scales that differ from those of a source that is quantized itself are counted.
    """
    scheme = parse_quantize(quantize)
    family = get_family(weights.info.family)
    matrices = {p.fqn for p in family.parameters(weights.info.args) if is_quantized(p)}
    linear = [name for name in tensors if matrices.issuperset(native_of[name])]
    chosen, known = linear, scales_from
    if scales_from is not None and scales_from.quantized is not None:
        if scales_from.naming != naming.name:
            raise ConfigError(
                f"--scales-from {scales_from.catalog.root}: its weights have {scales_from.naming} names, the output's "
                f"have {naming.name} names"
            )
        scheme = _same_scheme(scheme, scales_from.quantized.scheme, scales_from.catalog.root)
        chosen = [name for name in linear if name in scales_from.quantized.expressions]
    elif weights.quantized and weights.naming == naming.name and weights.quantized.scheme.block == scheme.block:
        known = weights
    encoders = {}
    for name in chosen:
        held = known.reader.tensors.get(name + SCALE) if known is not None else None
        encoders[name] = Fp8Encoder(
            name + SCALE,
            scheme,
            scale_dtype=held.dtype if held is not None and scales_from is not None else "float32",
            known=partial(known.reader.read, name + SCALE) if held is not None and known is not None else None,
            keeps_known=scales_from is not None,
        )
    stays = [rule.foreign for rule in naming.rules if rule.native == OUTPUT]  # of tied models, too
    stays += [
        name
        for name, info in tensors.items()
        if name not in encoders and len(info.shape) > 1 and EMBEDDING not in native_of[name]
    ]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stays)
    return Quantization(
        scheme=replace(scheme, stays=tuple(modules)),
        encoders=encoders,
        num_scales=sum(prod(_grid(tensors[name].shape, scheme)) for name in encoders),
        known=known,
        keeps_known=scales_from is not None,
    )


def _grid(shape: tuple[int, ...], scheme: Fp8Scheme) -> tuple[int, ...]:
    return tuple(num_blocks(size, block) for size, block in zip(shape, scheme.block, strict=True))


def _same_scheme(asked: Fp8Scheme, found: Fp8Scheme, folder: Path) -> Fp8Scheme:
    """The scheme of a folder whose scales are kept. Raises ConfigError where another was asked for."""
    if asked.power_of_two != found.power_of_two:
        fitting = next(text for text, power_of_two in SPELLINGS.items() if power_of_two == found.power_of_two)
        raise ConfigError(
            f"--scales-from {folder} has {found}", hint="its scales are kept", tries=[f"--quantize {fitting}"]
        )
    return found


@contextmanager
def opened_scales(
    folder: Path | None, weights: NativeWeights, *, keep_mtp: bool = False
) -> Iterator[NativeWeights | None]:
    """The quantized copy of a model that `--scales-from` names. Raises ConfigError where it is of another model.

    `keep_mtp`: with its layers for multi-token prediction, if there are any.
    """
    if folder is None:
        yield None
        return
    with native_weights(open_checkpoint(folder), keep_mtp=keep_mtp) as known:
        if known.quantized is None:
            raise ConfigError(f"--scales-from {folder}: its weights are not quantized")
        ours, theirs = computed_numbers(weights.info.args), computed_numbers(known.info.args)
        other = [f"{key}: {ours[key]}, there {theirs.get(key)}" for key in ours if ours[key] != theirs.get(key)]
        if other or known.info.family != weights.info.family:
            raise ConfigError(
                f"--scales-from {folder}: it is another model:" + list_offenders(other or [known.info.family])
            )
        yield known
