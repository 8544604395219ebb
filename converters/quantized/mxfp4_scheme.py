"""The quantization of GPT-OSS's releases: experts in mxfp4, with codes and scales as two tensors of bytes.

A matrix of rows and columns is `X_blocks` [..., rows, columns / 32, 16] with `X_scales` [..., rows, columns / 32] in
Hugging Face's names, and `X.blocks` with `X.scales` in OpenAI's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converters.common.box import TensorInfo
from converters.common.errors import UnsupportedError, list_offenders
from converters.families.parameters import Parameter, Role
from converters.quantized.not_quantized import is_listed, name_list_problem
from converters.views.mxfp4 import BLOCK, CODE_BYTES

METHOD = "mxfp4"
ENDS: Mapping[str, str] = {"_blocks": "_scales", ".blocks": ".scales"}  # of the names of codes → of their scales
PUBLISHED_STAYS = (  # of config.json
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)
_EXPERTS = frozenset((Role.EXPERT_GATE_UP, Role.EXPERT_ROW))
_LIST = "modules_to_not_convert"
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "quant_method": (METHOD,),
    "dequantize": (None, False, True),  # what a reader does by default
}


@dataclass(frozen=True)
class Mxfp4Scheme:
    """Experts as 4-bit codes, with a power-of-two scale for each 32 values of a row."""

    rounds_up: bool = (
        True  # a block's scale, so that no value is clipped (mxfp4.scales_rounded_up); else torchao's rule
    )
    stays: tuple[str, ...] = PUBLISHED_STAYS  # modules that are not quantized

    method = METHOD
    codes = "e2m1"
    naming = "hf_mxfp4"  # of Hugging Face checkpoints
    uncovered = "is mxfp4: only experts are quantized in such checkpoints"
    block = (1, BLOCK)
    power_of_two = True

    def __str__(self) -> str:
        rule = "" if self.rounds_up else ", by torchao's rule"
        return f"mxfp4 (e2m1), power-of-two scales for blocks of {BLOCK}{rule}"

    def covers(self, parameter: Parameter) -> bool:
        """Whether checkpoints are published with this parameter quantized: only the experts' matrices."""
        return parameter.role in _EXPERTS and not parameter.is_bias

    def scales_of(self, name: str) -> str:
        """The name of the scales of codes of this name."""
        return next(name.removesuffix(end) + scales_end for end, scales_end in ENDS.items() if name.endswith(end))

    def weight_of(self, name: str) -> str:
        """The name of the codes of scales of this name; other names unchanged."""
        return next(
            (name.removesuffix(scales_end) + end for end, scales_end in ENDS.items() if name.endswith(scales_end)), name
        )

    def stored(self, shape: tuple[int, ...], *, scale_dtype: str = "uint8") -> tuple[TensorInfo, TensorInfo]:
        """Codes and scales of a tensor of this shape, whose last dim is a multiple of 32."""
        grid = (*shape[:-1], shape[-1] // BLOCK)
        return TensorInfo("uint8", (*grid, CODE_BYTES)), TensorInfo(scale_dtype, grid)

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the values of codes of this shape."""
        return (*shape[:-2], shape[-2] * BLOCK) if len(shape) > 2 and shape[-1] == CODE_BYTES else shape

    def is_listed(self, module: str) -> bool:
        """Whether `stays` names a module."""
        return is_listed(module, self.stays)


def read_mxfp4(section: Mapping[str, Any]) -> Mxfp4Scheme:
    """The scheme of a `quantization_config`. Raises UnsupportedError with everything that is not covered."""
    problems = [f"{key} = {section[key]!r:.60}" for key, values in _ACCEPTED.items() if section.get(key) not in values]
    problems += [f"{key} = {section[key]!r:.60}" for key in section if key not in (*_ACCEPTED, _LIST)]
    names = section.get(_LIST)
    if names is not None:
        problems += name_list_problem(_LIST, names)
    if problems:
        raise UnsupportedError(
            f"config.json: quantization_config describes mxfp4 weights that are not covered:{list_offenders(problems)}",
            hint=f"covered: {_LIST}, as in the gpt-oss releases",
        )
    return Mxfp4Scheme(stays=tuple(names or ()))


def mxfp4_config(scheme: Mxfp4Scheme) -> dict[str, Any]:
    """The content of `quantization_config`, as it is published."""
    return {_LIST: list(scheme.stays), "quant_method": METHOD}
