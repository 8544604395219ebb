"""Match quantized weights with their scales, before a tensor is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from converters.common.box import Box, TensorInfo, TensorSource
from converters.quantized.mxfp4_scheme import Mxfp4Scheme
from converters.quantized.mxfp4_tensors import find_mxfp4
from converters.quantized.quantization import BESIDE, CODES, KEY, SCALE, SCALE_DTYPES, Fp8Scheme, Scheme
from converters.views.expressions import Expression, Fp8Blocks, Source
from converters.views.fp8 import num_blocks


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The quantized weights among a checkpoint's tensors, by stored name."""

    scheme: Scheme
    dtype: str  # of their values
    expressions: Mapping[str, Expression]  # weight → its values
    scales: Mapping[str, str]  # tensor with the name of scales → the weight that they are of
    problems: Mapping[str, str] = field(default_factory=dict)  # tensor that is missing, too many or wrong → what is

    def native_info(self, name: str, info: TensorInfo) -> TensorInfo:
        """Element type and shape of a tensor's values; `info`: as stored."""
        if name not in self.expressions:
            return info
        return TensorInfo(self.dtype, self.scheme.values_shape(info.shape))


@dataclass(frozen=True, slots=True)
class DequantizedSource:
    """A TensorSource whose quantized weights are read as their values."""

    source: TensorSource
    quantized: QuantizedTensors

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: self.quantized.native_info(name, info) for name, info in self.source.tensors.items()}

    def read(self, fqn: str, box: Box) -> np.ndarray:
        values = self.quantized.expressions.get(fqn)
        return self.source.read(fqn, box) if values is None else values.read(self.source, box)


def find_quantized(
    tensors: Mapping[str, TensorInfo], scheme: Scheme, *, dtype: str, is_own: bool
) -> QuantizedTensors | None:
    """The weights that are codes, with their scales; None if the scheme is that of another checkpoint.

    `is_own`: the scheme is in the checkpoint's own folder, so that a checkpoint without any such weight is an error.
    """
    if isinstance(scheme, Mxfp4Scheme):
        mxfp4 = find_mxfp4(tensors, scheme, dtype=dtype, is_own=is_own)
        return (
            None if mxfp4 is None else QuantizedTensors(scheme, dtype, mxfp4.expressions, mxfp4.scales, mxfp4.problems)
        )
    return _find_fp8(tensors, scheme, dtype=dtype, is_own=is_own)


def _find_fp8(
    tensors: Mapping[str, TensorInfo], scheme: Fp8Scheme, *, dtype: str, is_own: bool
) -> QuantizedTensors | None:
    codes = {name: info for name, info in tensors.items() if info.dtype.startswith("float8")}
    scales = {name: name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)}
    beside = {scales_name: name for name in codes if (scales_name := _beside(name)) in tensors}
    if beside:  # names of DeepSeek's code
        weights = {_beside(name): name for name in tensors if name.endswith(".weight")}
        beside |= {scales_name: weights[scales_name] for scales_name in tensors if scales_name in weights}
    scales_of = {name: _beside(name) if beside and not scales else name + SCALE for name in codes}
    scales_of |= {name: scales_name for scales_name, name in beside.items()}
    scales |= beside
    if not codes and not scales:
        if not is_own:
            return None
        text = f"config      {KEY} says that weights are quantized, but none is float8: remove it if they no longer are"
        return QuantizedTensors(scheme, dtype, {}, {}, {KEY: text})
    problems = {}
    for name, weight in scales.items():
        if weight not in tensors:
            problems[name] = f"scales      {name}  there is no {weight}"
        elif weight not in codes:
            problems[name] = f"scales      {name}  {weight} is {tensors[weight].dtype}, which needs none"
        elif scales_of[weight] != name:
            problems[name] = f"scales      {name}  {weight} has {scales_of[weight]}, too"
    expressions = {}
    for name, info in codes.items():
        scales_name = scales_of[name]
        problems |= _problems(name, info, scales_name, tensors.get(scales_name), scheme)
        expressions[name] = Fp8Blocks(Source(name), Source(scales_name), scheme.block, dtype)
    return QuantizedTensors(scheme, dtype, expressions, scales, problems)


def _beside(name: str) -> str:
    """The name of a weight's scales in DeepSeek's inference code."""
    return name.removesuffix(".weight") + BESIDE if name.endswith(".weight") else name + SCALE


def _problems(
    name: str, info: TensorInfo, scales_name: str, scales: TensorInfo | None, scheme: Fp8Scheme
) -> dict[str, str]:
    """Problems of a float8 tensor and its scales, whose name is `scales_name`: tensor → problem."""
    if info.dtype != CODES:
        return {name: f"dtype       {name}  is {info.dtype}, should be {CODES}"}
    if len(info.shape) != 2:
        return {name: f"shape       {name}  is {list(info.shape)}, and float8: only matrices are quantized"}
    problems = {}
    if scheme.is_listed(name.rpartition(".")[0]):
        problems[name] = f"config      {name}  is float8, and {KEY} lists its module as not quantized"
    shape = tuple(num_blocks(size, block) for size, block in zip(info.shape, scheme.block, strict=True))
    if scales is None:
        problems[scales_name] = f"missing     {scales_name}  {list(shape)}: {name} is float8"
    elif scales.shape != shape:
        described = f"{list(info.shape)} in blocks of {scheme.block[0]} × {scheme.block[1]}"
        problems[scales_name] = (
            f"shape       {scales_name}  is {list(scales.shape)}, should be {list(shape)} for {described}"
        )
    elif scales.dtype not in SCALE_DTYPES:
        problems[scales_name] = f"dtype       {scales_name}  is {scales.dtype}, should be {' or '.join(SCALE_DTYPES)}"
    return problems
