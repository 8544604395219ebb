"""Match mxfp4 codes with their scales, before a tensor is read."""

from collections.abc import Mapping
from dataclasses import dataclass

from converters.common.box import TensorInfo
from converters.common.dtypes import DTYPES
from converters.quantized.mxfp4_scheme import ENDS, METHOD, Mxfp4Scheme
from converters.quantized.quantization import KEY
from converters.views.expressions import Expression, Mxfp4Blocks, Source
from converters.views.mxfp4 import CODE_BYTES


@dataclass(frozen=True, slots=True)
class Mxfp4Tensors:
    """See QuantizedTensors."""

    expressions: Mapping[str, Expression]
    scales: Mapping[str, str]
    problems: Mapping[str, str]


def find_mxfp4(
    tensors: Mapping[str, TensorInfo], scheme: Mxfp4Scheme, *, dtype: str, is_own: bool
) -> Mxfp4Tensors | None:
    """The weights that are mxfp4 codes, with their scales; None if there are none (see find_quantized).

    Floating tensors under the names of codes are values: torchtitan and transformers save such files.
    """
    blocks = {name: info for name, info in tensors.items() if name.endswith(tuple(ENDS))}
    codes = {name: info for name, info in blocks.items() if not DTYPES[info.dtype].is_floating}
    scales = {name: weight for name in tensors if (weight := scheme.weight_of(name)) != name}
    if not codes and not scales:
        if blocks or not is_own:
            return None
        text = f"config      {KEY} says that experts are {METHOD}, but none is: remove it if they no longer are"
        return Mxfp4Tensors({}, {}, {KEY: text})
    problems = {}
    for name, weight in scales.items():
        if weight not in tensors:
            problems[name] = f"scales      {name}  there is no {weight}"
        elif weight not in codes:
            problems[name] = f"scales      {name}  {weight} is {tensors[weight].dtype}, which needs none"
    for name in blocks.keys() - codes.keys() if codes else ():
        problems[name] = f"dtype       {name}  is {blocks[name].dtype}, other experts are {METHOD}"
    expressions = {}
    for name, info in codes.items():
        scales_name = scheme.scales_of(name)
        problems |= _problems(name, info, scales_name, tensors.get(scales_name), scheme)
        expressions[name] = Mxfp4Blocks(Source(name), Source(scales_name), dtype)
    return Mxfp4Tensors(expressions, scales, problems)


def _problems(
    name: str, info: TensorInfo, scales_name: str, scales: TensorInfo | None, scheme: Mxfp4Scheme
) -> dict[str, str]:
    """Problems of codes and their scales, whose name is `scales_name`: tensor → problem."""
    if info.dtype != "uint8":
        return {name: f"dtype       {name}  is {info.dtype}, should be uint8"}
    if len(info.shape) < 3 or info.shape[-1] != CODE_BYTES:
        return {name: f"shape       {name}  is {list(info.shape)}, should be [..., {CODE_BYTES}]: 32 codes in a block"}
    problems = {}
    module = name.rpartition(".")[0]
    if scheme.is_listed(module):
        problems[name] = f"config      {name}  is {METHOD}, and {KEY} lists its module as not quantized"
    if scales is None:
        problems[scales_name] = f"missing     {scales_name}  {list(info.shape[:-1])}: {name} is {METHOD}"
    elif scales.shape != info.shape[:-1]:
        problems[scales_name] = f"shape       {scales_name}  is {list(scales.shape)}, should be {list(info.shape[:-1])}"
    elif scales.dtype != "uint8":
        problems[scales_name] = f"dtype       {scales_name}  is {scales.dtype}, should be uint8"
    return problems
