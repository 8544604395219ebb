"""A folder in fp8 with a field of its quantization_config changed, or a tensor: the same values, or refused by name.

The fields are those of transformers' class. Its own reading is no reference for partial blocks, and needs a package
that is not among the test's; values are compared with torch's, by the published formula.
"""

import inspect

import pytest
import torch
from transformers.utils.quantization_config import FineGrainedFP8Config

from converters.common.errors import TitanError
from tests.differential.makers import tiny_config, tiny_model
from tests.differential.sampling import every
from tests.doors import convert
from tests.fp8_folders import CONFIG, dequantized, read_folder, save, write_fp8

BLOCK = (16, 24)
VALUES = {  # of fields, one at a time
    "activation_scheme": [None, "static", "Dynamic", 1],
    "weight_block_size": [None, [128, 128], [24, 16], [16, 23], [16], [0, 24], "16", [16.0, 24.0], [True, 24]],
    "dequantize": [True, False, None],
    "modules_to_not_convert": [
        None,
        [],
        ["lm_head"],
        ["model.layers.1.mlp.up_proj"],
        ["mlp.gate"],
        ["o_proj"],
        "x",
        [1],
    ],
    "modules_to_convert": [None, [], ["model.embed_tokens"]],
    "scale_fmt": [None, "float", "ue8m0", "e4m3"],
    "expert_dtype": [None, "fp8", "fp4"],
    "quant_method": [None, "fbgemm_fp8", "mxfp4", "awq", "FP8", 8],
    "fmt": [None, "e4m3", "e5m2", "e4m3fnuz"],
    "ignored_layers": [None, [], ["lm_head"], ["model.layers.1.mlp"]],
    "kv_cache_scheme": [{"num_bits": 8}],
    "": [None, {}, [], "fp8", 3],  # all of it
}
HARMLESS = {
    ("activation_scheme", None),
    *(("dequantize", value) for value in (True, False, None)),
    *(("modules_to_not_convert", value) for value in ("None", "[]", "['lm_head']", "['mlp.gate']")),
    *(("ignored_layers", value) for value in ("None", "[]", "['lm_head']")),
    *(("modules_to_convert", value) for value in ("None", "[]")),
    *(("scale_fmt", value) for value in (None, "float", "ue8m0")),  # what the scales are, the file says
    *(("expert_dtype", value) for value in (None, "fp8")),
    *(("fmt", value) for value in (None, "e4m3")),
}
TENSORS = (
    *("drop scales", "drop codes", "double scales", "scales of another", "transpose scales", "scales in fp8"),
    *("codes in bf16", "codes in uint8", "codes in e5m2", "quantize the embedding", "quantize the norm"),
)
SILENT = {"scales of another"}  # of the same shape: other values, which nothing in the folder contradicts
CASES = [
    *(("field", field, value) for field, values in VALUES.items() for value in values),
    *(("tensor", change, number) for change in TENSORS for number in (0, 5)),
]


def test_every_field_of_transformers_class_is_changed():
    known = set(inspect.signature(FineGrainedFP8Config.__init__).parameters) - {"self", "kwargs"}
    assert known <= VALUES.keys()


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    config = tiny_config("qwen3", pad_token_id=None, bos_token_id=1, eos_token_id=2, head_dim=8, num_hidden_layers=2)
    tiny_model(config).bfloat16().save_pretrained(folder / "bf16")
    return write_fp8(folder / "fp8", folder / "bf16", block=BLOCK)


@pytest.mark.parametrize(("kind", "what", "value"), every(CASES, num=6))
def test_the_same_values_or_refused(fp8, tmp_path, kind, what, value, count):
    config, held = CONFIG | {"weight_block_size": list(BLOCK)}, read_folder(fp8)
    expected = dequantized(fp8, block=BLOCK)
    if kind == "field":
        config = value if not what else config | {what: value}
        names = {"quantization_config", "blocks of"}
    else:
        names = _change(held, what, value)
    src = save(tmp_path / "src", held, fp8, config) if config is not None else _without_config(tmp_path, held, fp8)
    try:
        convert(src, tmp_path / "dcp", to="dcp")
    except TitanError as error:
        count("quantized", "refused")
        text = f"{error.message} {error.hint}"
        assert any(name in text for name in names), text
        assert not (tmp_path / "dcp").exists()
        harmless = {(field, str(of)) for field, of in HARMLESS}
        assert kind == "tensor" or (what, str(value)) not in harmless, text
        return
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    found = read_folder(tmp_path / "hf")
    is_same = all(
        torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in expected.items()
    )
    count("quantized", "same" if is_same else "silent")
    assert is_same or what in SILENT


def _without_config(folder, held, fp8):
    return save(folder / "src", held, fp8.parent / "bf16", None)


def _change(held: dict[str, torch.Tensor], what: str, number: int) -> set[str]:
    """Change a tensor; the names that an error may mention."""
    scales = sorted(name for name in held if name.endswith("_scale_inv"))[number]
    codes, other = scales.removesuffix("_scale_inv"), f"{scales}.other"
    match what:
        case "drop scales":
            del held[scales]
        case "drop codes":
            del held[codes]
        case "double scales":
            held[other.replace(".weight_scale_inv.other", ".extra_scale_inv")] = held[scales].clone()
        case "scales of another":
            held[scales] = held[scales].flip(0).contiguous() * 2
        case "transpose scales":
            held[scales] = torch.cat([held[scales], held[scales]]).T.contiguous()
        case "scales in fp8":
            held[scales] = held[scales].to(torch.float8_e4m3fn)
        case "codes in bf16":
            held[codes] = held[codes].bfloat16()
        case "codes in uint8":
            held[codes] = held[codes].view(torch.uint8)
        case "codes in e5m2":
            held[codes] = held[codes].bfloat16().to(torch.float8_e5m2)
        case "quantize the embedding":
            codes = "model.embed_tokens.weight"
            held[codes] = held[codes].to(torch.float8_e4m3fn)
        case "quantize the norm":
            codes = "model.norm.weight"
            held[codes] = held[codes].to(torch.float8_e4m3fn)
    return {codes, scales, codes.replace(".weight", ".extra_scale_inv")}
