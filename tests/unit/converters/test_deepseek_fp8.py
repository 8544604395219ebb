"""DeepSeek V3 as it is published: fp8 blocks, partial ones, and a layer for multi-token prediction."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from converters.common.errors import CheckpointError
from converters.diff import diff
from converters.families.registry import get_family
from converters.formats.base import OutputOptions
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert, reshard
from tests.fp8_folders import dequantized, read_folder, write_fp8
from tests.models.deepseek import write as write_deepseek
from tests.models.deepseek import write_mtp
from tests.unit.converters.test_deepseek_forms import own_names
from trainer.config.sections import Checkpoint
from trainer.job.chosen_model import refuse_other_form

BLOCK = 128
SIZES = {
    "hidden_size": 160,
    "moe_intermediate_size": 136,
    "intermediate_size": 264,
    "kv_lora_rank": 140,
}  # partial ones


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder, its tensors, the dequantized ones): every matrix but embedding, output, routers and eh_proj in fp8."""
    root = tmp_path_factory.mktemp("fp8")
    _, tensors = write_mtp(root / "hf", **SIZES)
    stored, values = {}, {}
    for name, tensor in tensors.items():
        stays = tensor.ndim < 2 or any(part in name for part in ("embed_tokens", "head", "mlp.gate.", "eh_proj"))
        if stays:
            is_bias = name.endswith("correction_bias")
            stored[name] = values[name] = tensor if is_bias else tensor.bfloat16()
            continue
        rows, columns = (-(-size // BLOCK) for size in tensor.shape)
        scales = torch.rand(rows, columns) * 0.01 + 0.001
        wide = scales.repeat_interleave(BLOCK, 0)[: tensor.shape[0]].repeat_interleave(BLOCK, 1)[:, : tensor.shape[1]]
        codes = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": scales}
        values[name] = (codes.float() * wide).bfloat16()
    save_file(stored, root / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "hf" / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (root / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return root / "hf", stored, values


def test_dequantized_values_are_those_of_the_formula(published, tmp_path):
    folder, _, values = published
    convert(folder, tmp_path / "dcp", to="dcp", mtp="keep")
    convert(tmp_path / "dcp", tmp_path / "back", to="hf", mtp="keep")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == values.keys()
    assert all(torch.equal(written[name], values[name]) for name in values)
    assert diff(folder, tmp_path / "dcp").equal
    assert verify(folder).ok and verify(tmp_path / "dcp").ok
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_dcp_of_codes_is_resharded_as_it_is_converted(published, dtype, tmp_path):
    """Saved by another tool: a product is rounded once, to the type that is asked for."""
    folder, stored, _ = published
    dcp.save(dict(stored), checkpoint_id=tmp_path / "codes", no_dist=True)
    report = reshard(tmp_path / "codes", tmp_path / "out", num_files=2, model_from=folder, dtype=dtype)
    convert(tmp_path / "codes", tmp_path / "converted", to="dcp", model_from=folder, mtp="keep", dtype=dtype)
    assert diff(tmp_path / "out", tmp_path / "converted").equal and verify(tmp_path / "out").ok
    assert any("weights from fp8 (e4m3), scales for blocks of 128 × 128, now" in r for r in report.remarks)


@pytest.mark.parametrize("quantize", ["fp8", "fp8:ue8m0"])
@pytest.mark.parametrize("value", [torch.finfo(torch.bfloat16).max, 1e300])
def test_values_that_would_be_infinite_are_not_quantized(tmp_path, quantize, value):
    write_deepseek(tmp_path / "hf", "v3", dtype="float32" if value < 1e300 else "float64")
    tensors, name = read_folder(tmp_path / "hf"), "model.layers.1.mlp.experts.2.gate_proj.weight"
    tensors[name][0, 0] = value
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name}: holds values larger than 2.5e"):
        convert(tmp_path / "hf", tmp_path / "out", to="hf", options=OutputOptions(quantize=quantize))
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_quantized_or_have_no_scales_are_noted(published, tmp_path):
    folder, stored, _ = published
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    plain = {n: t for n, t in stored.items() if n != f"{name}_scale_inv"} | {name: stored[name].bfloat16()}
    shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    report = convert(tmp_path / "plain", tmp_path / "dcp", to="dcp")
    assert f"not quantized, although config.json does not list their modules: {name}" in report.remarks
    codes = {n: t for n, t in stored.items() if not n.endswith("_scale_inv")}
    save_file(codes, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with open_native(tmp_path / "plain") as weights:
        assert any("in float8 without scales" in note for note in weights.notes)
        wanted = Checkpoint(initial_load_in_hf=True, initial_load_in_hf_quantized=True)
        with pytest.raises(CheckpointError, match="weights in float8, and neither scales nor a quantization_config"):
            refuse_other_form(weights, tmp_path / "plain", wanted)
    assert "in float8 without scales" in " ".join(convert(tmp_path / "plain", tmp_path / "x", to="dcp").remarks)


def test_scales_of_a_dropped_layer_are_dropped(published, tmp_path):
    folder, stored, _ = published
    report = convert(folder, tmp_path / "dcp", to="dcp")
    assert {name for name in stored if name.startswith("model.layers.3.")} == set(report.dropped)
    assert not report.extra and not report.missing


def test_back_to_the_same_codes_and_scales(published, tmp_path):
    folder, stored, _ = published
    convert(folder, tmp_path / "dcp", to="dcp", mtp="keep")
    options = OutputOptions(quantize="fp8", scales_from=folder)
    convert(tmp_path / "dcp", tmp_path / "back", to="hf", mtp="keep", options=options)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        ours = written[name]
        assert ours.dtype == tensor.dtype, name
        assert np.array_equal(ours.view(torch.uint8).numpy(), tensor.contiguous().view(torch.uint8).numpy()), name


@pytest.mark.parametrize(
    "name", ["v2_lite", *(pytest.param(each, marks=pytest.mark.slow) for each in ("v2", "moonlight", "kimi"))]
)
def test_other_models_of_the_class(name, tmp_path):
    """Through DCP and a torch file, with 576 rows in five blocks; a dry run plans what a conversion writes."""
    write_deepseek(tmp_path / "bf16", name, dtype="bfloat16", **SIZES | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    fp8 = write_fp8(tmp_path / "fp8", tmp_path / "bf16", files=2)
    if name == "kimi":
        config = json.loads((fp8 / "config.json").read_text())
        (fp8 / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    stored, values = read_folder(fp8), dequantized(fp8)
    assert stored["model.layers.2.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)
    planned = convert(fp8, tmp_path / "dcp", to="dcp", dry_run=True)
    done = convert(fp8, tmp_path / "dcp", to="dcp")
    assert (planned.num_tensors, planned.num_bytes, planned.dtypes) == (done.num_tensors, done.num_bytes, done.dtypes)
    convert(fp8, tmp_path / "torch", to="torch")
    assert diff(tmp_path / "torch", tmp_path / "dcp").equal and diff(fp8, tmp_path / "dcp").equal
    convert(tmp_path / "torch", tmp_path / "values", to="hf")
    options = OutputOptions(quantize="fp8", scales_from=fp8)
    assert convert(tmp_path / "dcp", tmp_path / "back", to="hf", options=options).moved_scales == 0
    for found, expected in ((read_folder(tmp_path / "values"), values), (read_folder(tmp_path / "back"), stored)):
        assert found.keys() == expected.keys()
        assert [n for n, t in expected.items() if found[n].dtype != t.dtype] == []
        assert [
            n for n, t in expected.items() if not torch.equal(found[n].view(torch.uint8), t.view(torch.uint8))
        ] == []


def test_deepseeks_own_form_has_scales_of_another_name(published, tmp_path):
    """`X.scale` beside `X.weight`, and no layer for multi-token prediction."""
    folder, stored, _ = published
    convert(folder, tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "native", to="torch")
    native = torch.load(tmp_path / "native" / "model.pt")
    named = own_names(
        {name: torch.tensor([n]) for n, name in enumerate(native) if ".experts." not in name}, has_bias=True
    )
    names = list(native)
    hf = {name: _hf_name(names[int(number)]) for name, number in named.items()}
    hf |= {
        f"layers.{n}.ffn.experts.{e}.{ours}.weight": f"model.layers.{n}.mlp.experts.{e}.{theirs}_proj.weight"
        for n in (1, 2)
        for e in range(12)
        for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    }
    own = {name: stored[theirs] for name, theirs in hf.items()}
    own |= {
        name.replace(".weight", ".scale"): stored[f"{theirs}_scale_inv"]
        for name, theirs in hf.items()
        if f"{theirs}_scale_inv" in stored
    }
    (tmp_path / "own").mkdir()
    save_file(own, tmp_path / "own" / "model0-mp1.safetensors")
    convert(tmp_path / "own", tmp_path / "out", to="dcp", model_from=folder)
    assert diff(tmp_path / "out", tmp_path / "dcp").equal
    unknown = {"own.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
    save_file(own | unknown, tmp_path / "own" / "model0-mp1.safetensors")
    convert(tmp_path / "own", tmp_path / "allowed", to="dcp", model_from=folder, allow_extra=True)
    save_file(own | {"layers.1.attn_norm.scale": torch.ones(1)}, tmp_path / "own" / "model0-mp1.safetensors")
    with pytest.raises(CheckpointError, match="layers.1.attn_norm.weight is bfloat16, which needs none"):
        convert(tmp_path / "own", tmp_path / "without", to="dcp", model_from=folder, allow_extra=True)
    del own["layers.1.attn.wkv_a.scale"]
    save_file(own, tmp_path / "own" / "model0-mp1.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing +layers.1.attn.wkv_a.scale  .*: layers.1.attn.wkv_a.weight is float8"
    ):
        convert(tmp_path / "own", tmp_path / "without", to="dcp", model_from=folder)


def _hf_name(native: str) -> str:
    rules = {rule.native: rule.foreign for rule in get_family("deepseek_v3").namings["hf"].rules}
    number = native.split(".")[1] if native.startswith("layers.") else ""
    return rules[native.replace(f"layers.{number}.", "layers.{n}.")].replace("{n}", number)
