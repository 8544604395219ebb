"""Folders in fp8: read as the values that torch computes, refused where weights and scales do not match."""

import json
from dataclasses import replace

import pytest
import torch

from converters.common.errors import CheckpointError, TitanError, UnsupportedError
from converters.diff import diff
from converters.families.registry import get_family
from converters.inspect import inspect_checkpoint
from converters.model.model_info import read_model_info
from converters.quantized.quantization import Fp8Scheme, is_quantized, read_quantization
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert
from tests.fp8_folders import CONFIG, E4M3, dequantized, read_folder, save, write_fp8
from tests.models.dense import write as write_tiny
from tests.models.qwen3_moe import write as write_experts
from tests.unit.converters.samples import assert_same

Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.10.gate_proj.weight"
SHAPES = {"hidden_size": 192, "intermediate_size": 576, "moe_intermediate_size": 129, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Qwen 3 MoE in bfloat16: 576 and 129 rows, 192 columns, experts beyond ten."""
    folder = tmp_path_factory.mktemp("fp8") / "bf16"
    write_experts(folder, dtype="bfloat16", **SHAPES)
    return folder


@pytest.fixture(scope="module")
def fp8(plain):
    """The same in fp8, the scales in another file than their weights."""
    return write_fp8(plain.parent / "fp8", plain, files=2)


@pytest.mark.parametrize("workers", [1, 3])
def test_reads_what_torch_dequantizes(fp8, tmp_path, workers):
    report = convert(fp8, tmp_path / "dcp", to="dcp", workers=workers)
    assert report.dequantized == "127 weights from fp8 (e4m3), scales for blocks of 128 × 128, now bfloat16"
    assert report.num_cast == 0 and report.extra == () and not report.dropped
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    assert_same(read_folder(tmp_path / "hf"), dequantized(fp8))
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())
    assert diff(fp8, tmp_path / "dcp").equal


@pytest.mark.parametrize("dtype", ["float32", "float16", "bf16"])
def test_another_dtype_is_rounded_once(fp8, tmp_path, dtype):
    report = convert(fp8, tmp_path / "hf", to="hf", dtype=dtype)
    kind = torch.bfloat16 if dtype == "bf16" else getattr(torch, dtype)
    wide = dequantized(fp8, dtype=torch.float32)
    assert_same(read_folder(tmp_path / "hf"), {name: tensor.to(kind) for name, tensor in wide.items()})
    assert (report.num_cast == 0) == (dtype == "bf16")


@pytest.mark.parametrize("name", ["llama3", "llama3_tied", "qwen3"])
def test_any_family(tmp_path, name):
    """Heads whose rows are permuted; a tied output; blocks of another size; scales in bfloat16."""
    write_tiny(tmp_path / "bf16", name, dtype=torch.bfloat16)
    write_fp8(tmp_path / "fp8", tmp_path / "bf16", block=(16, 32), scale_dtype=torch.bfloat16)
    convert(tmp_path / "fp8", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    assert_same(read_folder(tmp_path / "hf"), dequantized(tmp_path / "fp8", block=(16, 32)))


def test_digests_are_of_the_values(fp8, plain, tmp_path):
    values = save(tmp_path / "values", dequantized(fp8), plain, None)
    for src, dst in ((fp8, "a"), (values, "b")):
        convert(src, tmp_path / dst, to="dcp")
    assert read_manifest(tmp_path / "a").tensors == read_manifest(tmp_path / "b").tensors
    assert all(check.outcome != "failed" for check in verify(fp8).checks)


def test_inspect_says_how(fp8, plain):
    found = inspect_checkpoint(fp8)
    held = read_folder(fp8)
    codes = [tensor for tensor in held.values() if tensor.dtype == E4M3]
    scales = [tensor for name, tensor in held.items() if name.endswith("_scale_inv")]
    assert found.quantization == {
        "method": "fp8",
        "weight_block_size": [128, 128],
        "codes": "e4m3",
        "power_of_two_scales": False,
        "num_weights": len(codes),
        "weight_bytes": sum(t.nbytes for t in codes),
        "scale_dtypes": ["float32"],
        "scale_bytes": sum(t.nbytes for t in scales),
        "read_as": "bfloat16",
        "problems": [],
    }
    assert found.num_parameters == inspect_checkpoint(plain).num_parameters
    assert inspect_checkpoint(plain).quantization is None


def test_the_trainer_and_inference_read_slices(fp8):
    with open_native(fp8) as weights, open_native(fp8, dequantized="float32") as wide:
        expected = dequantized(fp8)[Q]
        assert weights.tensors["layers.0.attention.wq.weight"].dtype == "bfloat16"
        assert wide.tensors["layers.0.attention.wq.weight"].dtype == "float32"
        from converters.common.box import Box

        found = weights.read("layers.0.attention.wq.weight", Box((60, 120), (40, 20)))
        assert found.tobytes() == expected[60:100, 120:140].contiguous().view(torch.uint8).numpy().tobytes()
        assert weights.tensors["layers.1.moe.experts.w1"].shape == (12, 129, 192)


def test_a_folder_of_values_whose_config_still_says_fp8(plain, tmp_path):
    stale = save(tmp_path / "stale", read_folder(plain), plain, CONFIG)
    with pytest.raises(CheckpointError, match="none is float8: remove it"):
        convert(stale, tmp_path / "dcp", to="dcp")


def test_a_description_from_an_fp8_folder_does_not_quantize_other_weights(fp8, plain, tmp_path):
    convert(plain, tmp_path / "dcp", to="dcp")
    (tmp_path / "dcp/titan_model.json").unlink()
    (tmp_path / "dcp/titan_manifest.json").unlink()
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf", model_from=fp8)
    assert_same(read_folder(tmp_path / "hf"), read_folder(plain))


def _drop(name):
    return lambda held: held.pop(name)


def _set(name, value):
    return lambda held: held.__setitem__(name, value)


SCALE = f"{Q}_scale_inv"
BROKEN = {
    "missing": (_drop(SCALE), f"missing     {SCALE}  [1, 2]: {Q} is float8"),
    "too many": (
        _set("model.norm.weight_scale_inv", torch.ones(1, 1)),
        "scales      model.norm.weight_scale_inv  model.norm.weight is bfloat16, which needs none",
    ),
    "two of one weight": (
        _set(Q.replace("weight", "scale"), torch.ones(1, 2)),
        f"scales      {SCALE}  {Q} has {Q.replace('weight', 'scale')}, too",
    ),
    "of nothing": (_set("model.x.weight_scale_inv", torch.ones(1, 1)), "there is no model.x.weight"),
    "weight missing": (_drop(Q), f"scales      {SCALE}  there is no {Q}"),
    "shape": (_set(SCALE, torch.ones(2, 2)), f"shape       {SCALE}  is [2, 2], should be [1, 2]"),
    "rounded down": (
        _set("model.layers.2.mlp.gate_proj.weight_scale_inv", torch.ones(4, 2)),
        "is [4, 2], should be [5, 2] for [576, 192] in blocks of 128 × 128",
    ),
    "dtype": (_set(SCALE, torch.ones(1, 2).half()), f"dtype       {SCALE}  is float16, should be float32 or bfloat16"),
    "unquantized": (_set(Q, torch.ones(128, 192).bfloat16()), f"scales      {SCALE}  {Q} is bfloat16"),
    "kind": (_set(Q, torch.ones(128, 192).to(torch.float8_e5m2)), f"dtype       {Q}  is float8_e5m2, should be"),
    "shape of codes": (_set(Q, torch.ones(120, 192).to(E4M3)), f"shape       {Q}  is [120, 192], should be"),
    "a norm": (_set("model.norm.weight", torch.ones(192).to(E4M3)), "model.norm.weight  is [192], and float8"),
    "the embedding": (
        _set("model.embed_tokens.weight", torch.ones(97, 192).to(E4M3)),
        "quantized   model.embed_tokens",
    ),
    "one of a stack": (_set(GATE, torch.ones(129, 192).half()), f"{GATE} is float16, which needs none"),
    "static": (_set("model.layers.0.self_attn.q_proj.input_scale", torch.ones(1)), "unexpected  model.layers.0"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_scales_that_do_not_match_are_listed_with_all_others(fp8, tmp_path, kind):
    change, text = BROKEN[kind]
    expected, held = [text], read_folder(fp8)
    if kind in ("missing", "shape", "rounded down", "dtype"):  # a second offender
        other = "model.layers.3.self_attn.k_proj.weight_scale_inv"
        held[other] = torch.ones(3, 3)
        expected.append(f"shape       {other}  is [3, 3], should be [1, 2]")
    change(held)
    broken = save(tmp_path / "broken", held, fp8, CONFIG)
    for allow in (False, True)[: 1 if kind == "static" else 2]:  # an unknown tensor like any other
        with pytest.raises(CheckpointError) as caught:
            convert(broken, tmp_path / "dcp", to="dcp", allow_missing=allow, allow_extra=allow)
        for line in expected:
            assert line in caught.value.message
        assert not (tmp_path / "dcp").exists()
    if kind in ("missing", "shape"):
        for quick in (False, True):
            failed = [check for check in verify(broken, quick=quick).checks if check.outcome == "failed"]
            assert [check.name for check in failed] == ["names and shapes", "values"][: 1 if quick else 2]
        assert len(inspect_checkpoint(broken).quantization["problems"]) == 2


def test_scales_without_a_config_and_a_config_that_lists_a_quantized_module(fp8, plain, tmp_path):
    with pytest.raises(CheckpointError, match="unexpected") as caught:
        convert(save(tmp_path / "a", read_folder(fp8), plain, None), tmp_path / "x", to="dcp")
    assert "quantization_config" in caught.value.hint
    listed = CONFIG | {
        "modules_to_not_convert": ["lm_head", "model.layers.*.mlp.gate", "model.layers.0.self_attn.q_proj"]
    }
    with pytest.raises(CheckpointError, match=r"lists its module as not quantized") as caught:
        convert(save(tmp_path / "b", read_folder(fp8), fp8, listed), tmp_path / "x", to="dcp")
    assert caught.value.message.count("lists its module") == 1 and Q in caught.value.message


@pytest.mark.parametrize("called", [SCALE, f"{Q}_scale", Q.replace("weight", "scale")])
def test_scales_are_not_left_out_without_their_weights(fp8, plain, tmp_path, called):
    held = read_folder(fp8)
    without = save(tmp_path / "src", read_folder(plain) | {Q: held[Q], called: held[SCALE]}, plain, None)
    with pytest.raises(CheckpointError, match=f"unexpected  {called}: scales of {Q}"):
        convert(without, tmp_path / "dcp", to="dcp", allow_extra=True)


def test_unknown_weights_and_their_scales_may_be_left_out(fp8, tmp_path):
    held = read_folder(fp8)
    held["mtp.weight"], held["mtp.weight_scale_inv"] = torch.ones(1, 1).to(E4M3), torch.ones(1, 1)
    src = save(tmp_path / "src", held, fp8, CONFIG)
    with pytest.raises(CheckpointError, match="unexpected  mtp.weight_scale_inv"):
        convert(src, tmp_path / "dcp", to="dcp")
    report = convert(src, tmp_path / "dcp", to="dcp", allow_extra=True)
    assert set(report.extra) == {"mtp.weight", "mtp.weight_scale_inv"}


def test_codes_that_are_nan_are_counted_and_refused(fp8, tmp_path):
    held = read_folder(fp8)
    codes = held[Q].view(torch.uint8)
    codes[3, 5], codes[127, 191] = 0x7F, 0xFF
    src = save(tmp_path / "src", held, fp8, CONFIG)
    with pytest.raises(CheckpointError, match="NaN or infinite") as caught:
        convert(src, tmp_path / "dcp", to="dcp")
    assert "layers.0.attention.wq.weight: 2 values" in caught.value.message and not (tmp_path / "dcp").exists()
    report = convert(src, tmp_path / "dcp", to="dcp", allow_nonfinite=True)
    assert report.non_finite == {"layers.0.attention.wq.weight": 2}


BAD_CONFIGS = {
    "method": ({"quant_method": "gptq"}, "quant_method 'gptq'"),
    "mxfp4": ({"quant_method": "mxfp4"}, "weight_block_size = [128, 128]"),
    "static": ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
    "format": ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
    "no blocks": ({"weight_block_size": None}, "weight_block_size = None"),
    "odd blocks": ({"weight_block_size": [128, 0]}, "weight_block_size = [128, 0]"),
    "scales": ({"scale_fmt": "e4m3"}, "scale_fmt = 'e4m3'"),
    "experts": ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    "modules": ({"modules_to_not_convert": "lm_head"}, "not a list of names"),
    "two lists": ({"modules_to_not_convert": ["a"], "ignored_layers": ["b"]}, "two names of one list"),
    "unknown": ({"kv_cache_scheme": {}}, "kv_cache_scheme = {}"),
}


@pytest.mark.parametrize("kind", BAD_CONFIGS)
def test_other_quantizations_are_refused_by_name(fp8, tmp_path, kind):
    change, text = BAD_CONFIGS[kind]
    src = save(tmp_path / "src", {"x": torch.ones(1)}, fp8, CONFIG | change)
    with pytest.raises(UnsupportedError) as caught:
        read_model_info(src)
    assert text in caught.value.message and "quantization_config" in caught.value.message
    both = CONFIG | change | {"fmt": "int4"}
    if change.get("quant_method", "fp8") == "fp8":
        with pytest.raises(UnsupportedError, match="fmt = 'int4'"):
            read_quantization({"quantization_config": both})


def test_published_configs_are_read():
    assert read_quantization({}) is None and read_quantization({"quantization_config": None}) is None
    assert read_quantization({"quantization_config": CONFIG}) == Fp8Scheme()
    third = CONFIG | {"scale_fmt": "ue8m0", "ignored_layers": ["lm_head"]}
    assert read_quantization({"quantization_config": third}) == Fp8Scheme(power_of_two=True, stays=("lm_head",))
    with pytest.raises(TitanError):
        read_quantization({"quantization_config": "fp8"})


@pytest.mark.parametrize(
    ("patterns", "module", "is_listed"),
    [
        (["lm_head"], "lm_head", True),
        (["model.layers.1"], "model.layers.1.mlp", True),
        (["model.layers.1"], "model.layers.11.mlp", False),
        (["mlp.gate"], "model.layers.1.mlp.gate", True),
        (["mlp.gate"], "model.layers.1.mlp.gate_proj", False),
        (["model.layers.*.mlp.gate"], "model.layers.3.mlp.gate", True),
        (["model.layers.*.mlp.gate"], "model.layers.3.mlp.gate_proj", False),
        (["model.layers.*.self_attn"], "model.layers.3.self_attn.q_proj", True),
        ([], "lm_head", False),
    ],
)
def test_modules_are_matched_as_transformers_does(patterns, module, is_listed):
    from transformers.quantizers.quantizers_utils import should_convert_module

    assert Fp8Scheme(stays=tuple(patterns)).is_listed(module) is is_listed
    assert should_convert_module(module, patterns) is not is_listed


def test_roles_say_what_is_quantized():
    family = get_family("qwen3")
    args = replace(family.flavors["debug_moe"], attention_bias=True)
    parameters = family.parameters(args)
    kept = {p.fqn for p in parameters if not is_quantized(p)}
    assert {"tok_embeddings.weight", "output.weight", "norm.weight", "layers.0.moe.router.gate.weight"} <= kept
    assert {"layers.0.moe.expert_bias", "layers.0.attention.wq.bias", "layers.0.attention.q_norm.weight"} <= kept
    assert not any(".experts." in fqn or fqn.endswith(("wq.weight", "wo.weight")) for fqn in kept)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},  # int4, Kimi K2 Thinking's
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_other_methods_are_refused_by_what_they_say_of_themselves(said):
    with pytest.raises(UnsupportedError) as caught:
        read_quantization({"quantization_config": said})
    assert all(repr(value) in caught.value.message for value in said.values())
    assert "int4" not in caught.value.message
