"""The quantization of a Hugging Face checkpoint: `quantization_config` of config.json, read and written.

Covered are float8 (e4m3) with one scale per block, as DeepSeek V3 and Qwen 3 are published, and mxfp4, as GPT-OSS is
(mxfp4_scheme.py). Scales of a float8 weight are a tensor of their own, with the weight's name and `_scale_inv`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converters.common.box import TensorInfo
from converters.common.errors import CheckpointError, ConfigError, UnsupportedError, list_offenders
from converters.families.parameters import Parameter, Role
from converters.quantized.mxfp4_scheme import METHOD as MXFP4
from converters.quantized.mxfp4_scheme import Mxfp4Scheme, mxfp4_config, read_mxfp4
from converters.quantized.not_quantized import is_listed, name_list_problem
from converters.views.fp8 import num_blocks

KEY = "quantization_config"
BESIDE = ".scale"  # of its scales in DeepSeek's inference code, instead of a weight's `.weight`
SCALE = "_scale_inv"  # a weight's name + this: its scales, which are multiplied (DeepSeek's name says otherwise)
CODES = "float8_e4m3fn"
SCALE_DTYPES = ("float32", "bfloat16")  # the second: Qwen's
_LISTS = ("modules_to_not_convert", "ignored_layers")  # transformers' and vLLM's name of one list
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {  # of fields that are not translated
    "quant_method": ("fp8",),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),  # static: with scales of activations, which titan does not keep
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
    "modules_to_convert": (None, []),
    "dequantize": (None, False, True),  # what a reader does by default
}
_KNOWN = {*_ACCEPTED, *_LISTS, "weight_block_size"}
_KINDS = ("format", "quant_algo", "bits")  # what other methods say of their codes
_NOT_QUANTIZED = frozenset(
    (Role.EMBEDDING, Role.OUTPUT, Role.NORM, Role.HEAD_NORM, Role.LATENT_NORM, Role.ROUTER, Role.ROUTER_BIAS, Role.MTP)
)


@dataclass(frozen=True)
class Fp8Scheme:
    """Weights of linear layers as float8 codes, with a scale for each `block` of (rows, columns)."""

    block: tuple[int, int] = (128, 128)
    power_of_two: bool = False  # every scale is one
    stays: tuple[str, ...] = ()  # modules that are not quantized: names, of a part of the model, or with wildcards

    method = "fp8"
    codes = "e4m3"
    naming = "hf"  # of Hugging Face checkpoints
    uncovered = "is float8: norms, embedding, output, routers, biases and eh_proj are not quantized in such checkpoints"

    def __str__(self) -> str:
        scales = "power-of-two scales" if self.power_of_two else "scales"
        return f"fp8 (e4m3), {scales} for blocks of {self.block[0]} × {self.block[1]}"

    def is_listed(self, module: str) -> bool:
        """Whether `stays` names a module."""
        return is_listed(module, self.stays)

    def covers(self, parameter: Parameter) -> bool:
        """Whether checkpoints are published with this parameter quantized."""
        return is_quantized(parameter)

    def scales_of(self, name: str) -> str:
        """The name of the scales of codes of this name."""
        return name + SCALE

    def weight_of(self, name: str) -> str:
        """The name of the codes of scales of this name; other names unchanged."""
        return f"{name.removesuffix(BESIDE)}.weight" if name.endswith(BESIDE) else name.removesuffix(SCALE)

    def stored(self, shape: tuple[int, ...], *, scale_dtype: str = "float32") -> tuple[TensorInfo, TensorInfo]:
        """Codes and scales of a matrix of this shape."""
        grid = tuple(num_blocks(size, block) for size, block in zip(shape, self.block, strict=True))
        return TensorInfo(CODES, shape), TensorInfo(scale_dtype, grid)

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the values of codes of this shape."""
        return shape


Scheme = Fp8Scheme | Mxfp4Scheme
SPELLINGS: Mapping[str, Scheme] = {  # of --quantize
    "fp8": Fp8Scheme(),
    "fp8:ue8m0": Fp8Scheme(power_of_two=True),
    "mxfp4": Mxfp4Scheme(),
    "mxfp4:torchao": Mxfp4Scheme(rounds_up=False),
}


def read_quantization(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None if its weights are not quantized.

    Raises UnsupportedError with everything that is not covered.
    """
    section = config.get(KEY)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise CheckpointError(f"config.json: its {KEY} is {section!r:.60}, not an object")
    method = section.get("quant_method")
    if method == MXFP4:
        return read_mxfp4(section)
    if method != "fp8":
        details = "".join(f", {key} {section[key]!r:.60}" for key in _KINDS if key in section)
        raise UnsupportedError(
            f"config.json: {KEY} has quant_method {method!r:.60}{details}, which is not covered",
            hint="covered: fp8 with one scale per block, as DeepSeek V3 and Qwen 3 are published, mxfp4, as GPT-OSS "
            "is, and 16 bits or more",
        )
    problems = [f"{key} = {section[key]!r:.60}" for key, values in _ACCEPTED.items() if section.get(key) not in values]
    problems += [f"{key} = {section[key]!r:.60}" for key in section if key not in _KNOWN]
    block = section.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        problems.append(f"weight_block_size = {block!r:.60}, not two sizes: a scale for a whole tensor is not covered")
    lists = {key: section[key] for key in _LISTS if section.get(key) is not None}
    for key, names in lists.items():
        problems += name_list_problem(key, names)
    if len(lists) == 2 and lists[_LISTS[0]] != lists[_LISTS[1]]:
        problems.append(f"{_LISTS[0]} and {_LISTS[1]} are two names of one list, and differ")
    if problems:
        raise UnsupportedError(
            f"config.json: {KEY} describes weights that are not covered:{list_offenders(problems)}",
            hint="covered: e4m3, activation_scheme dynamic, a weight_block_size such as [128, 128]",
        )
    assert isinstance(block, list)
    stays: list[str] = next(iter(lists.values()), [])
    return Fp8Scheme((block[0], block[1]), section.get("scale_fmt") == "ue8m0", tuple(stays))


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """The content of `quantization_config`, as DeepSeek and OpenAI publish it. transformers and vLLM read the list."""
    if isinstance(scheme, Mxfp4Scheme):
        return mxfp4_config(scheme)
    power_of_two = {"scale_fmt": "ue8m0"} if scheme.power_of_two else {}
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        **power_of_two,
        "weight_block_size": list(scheme.block),
        "modules_to_not_convert": list(scheme.stays),
    }


def parse_quantize(text: str) -> Scheme:
    """The scheme that a user asks for. Raises ConfigError for one that is not known."""
    if text not in SPELLINGS:
        raise ConfigError(f"unknown quantization: {text!r}", hint=f"known: {', '.join(SPELLINGS)}")
    return SPELLINGS[text]


def is_quantized(parameter: Parameter) -> bool:
    """Whether checkpoints are published with this parameter quantized: the weights of linear layers and of experts.

    Norms, embedding, output, routers, biases and the projection of multi-token prediction are not.
    """
    return parameter.role not in _NOT_QUANTIZED and not parameter.is_bias and len(parameter.shape) > 1
