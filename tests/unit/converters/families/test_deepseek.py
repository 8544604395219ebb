"""DeepSeek V3, V2 and what shares their classes: names, values and logits against transformers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from converters.common.box import TensorInfo
from converters.common.errors import CheckpointError
from converters.families.registry import get_family
from converters.formats.base import OutputOptions
from converters.model.model_info import ModelInfo
from converters.naming.foreign_view import foreign_view
from converters.source.weights import open_native
from tests.doors import convert
from tests.fp8_folders import read_folder
from tests.models.deepseek import NUMBERS, native_logits
from tests.models.deepseek import write as write_deepseek

FAMILY = get_family("deepseek_v3")
TOKENS = torch.arange(40)[None] * 7 % 97  # longer than YaRN's original length


def logits(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module", params=NUMBERS)
def written(request, tmp_path_factory):
    """(name, model, root): root/hf as transformers wrote it, root/dcp converted from it."""
    root = tmp_path_factory.mktemp(request.param)
    model = write_deepseek(root / "hf", request.param, dtype="bfloat16")
    convert(root / "hf", root / "dcp", to="dcp")
    return request.param, model, root


def test_offsets_stay_float32(written, tmp_path):
    name, model, root = written
    convert(root / "dcp", tmp_path / "wide", to="torch", dtype="float32")  # where they are not the only ones
    convert(tmp_path / "wide", tmp_path / "half", to="hf", dtype="float16")
    kinds = {key: tensor.dtype for key, tensor in read_folder(tmp_path / "half").items()}
    biases = {key for key in kinds if key.endswith("e_score_correction_bias")}
    assert len(biases) == (0 if name.startswith("v2") else 2)
    assert all(kind == (torch.float32 if key in biases else torch.float16) for key, kind in kinds.items())


def test_no_remark_on_offsets_that_transformers_keeps_in_float32(written, tmp_path):
    name, model, root = written
    for quantize in (None, "fp8"):
        report = convert(root / "dcp", tmp_path / f"{quantize}", to="hf", options=OutputOptions(quantize=quantize))
        assert not [remark for remark in report.remarks if "float32" in remark]


def test_v2_has_no_offsets(tmp_path):
    """A file that has them is not a V2's, and a V2 whose offsets are not zero cannot be written."""
    write_deepseek(tmp_path / "hf", "v2")
    convert(tmp_path / "hf", tmp_path / "pt", to="torch")
    tensors = read_folder(tmp_path / "hf")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file(tensors | {name: torch.ones(12)}, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"unexpected  {name}"):
        convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    native = torch.load(tmp_path / "pt" / "model.pt")
    native["layers.1.moe.expert_bias"][3] = 1
    torch.save(native, tmp_path / "pt" / "model.pt")
    (tmp_path / "pt" / "titan_manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no place for these, and they are not zero"):
        convert(tmp_path / "pt", tmp_path / "back", to="hf")
    options = OutputOptions(drop_expert_bias=True)
    assert len(convert(tmp_path / "pt", tmp_path / "back", to="hf", options=options).dropped) == 2


@pytest.mark.parametrize("flavor", FAMILY.flavors)
def test_transformers_builds_the_same_parameters(flavor, tmp_path):
    """Names and shapes of every flavor, with dense and sparse layers, on the meta device."""
    args = FAMILY.flavors[flavor]
    args = replace(args, num_layers=args.num_dense_layers + 1, num_experts=args.num_groups * 2, experts_per_token=2)
    (tmp_path / "config.json").write_text(json.dumps(FAMILY.hf_config(args)))
    assert FAMILY.args_from_hf_config(json.loads((tmp_path / "config.json").read_text())) == args
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    native = SimpleNamespace(tensors={p.fqn: TensorInfo("float32", p.shape) for p in FAMILY.parameters(args)})
    view = foreign_view(native, ModelInfo(FAMILY.name, args), FAMILY.namings["hf_fused"])
    assert {name: info.shape for name, info in view.tensors.items()} == shapes


def test_kimi_k2_is_read_as_its_class(tmp_path):
    """Its config.json has a type that transformers does not know, and names code for it."""
    write_deepseek(tmp_path / "hf", "kimi")
    before, path = logits(tmp_path / "hf"), tmp_path / "hf" / "config.json"
    auto = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.X"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2", "auto_map": auto}))
    report = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    assert any("model_type 'kimi_k2', now 'deepseek_v3'" in remark for remark in report.remarks)
    assert any("auto_map names Python code, which is dropped" in remark for remark in report.remarks)
    convert(tmp_path / "dcp", tmp_path / "back", to="hf")
    assert torch.equal(logits(tmp_path / "back"), before)


def test_native_weights_in_the_papers_formulas_give_transformers_logits(written):
    """Rotated features are pairs, which no naming moves; with halves every logit is far off."""
    _, _, root = written
    with open_native(root / "dcp") as weights:
        arrays = {fqn: weights.read(fqn) for fqn in weights.tensors}
        arrays = {
            fqn: a if a.dtype == np.float32 else (a.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            for fqn, a in arrays.items()
        }
        args = weights.info.args
    exact = logits(root / "hf", dtype=torch.float32)[0]
    ours, scale = native_logits(arrays, TOKENS[0], args), exact.abs().max()
    assert (ours - exact).abs().max() < 1e-4 * scale
    halves = dict(arrays)
    for fqn in (fqn for fqn in arrays if fqn.endswith(("wkv_a.weight",))):
        rotated = np.arange(args.rotary_dim).reshape(2, -1).T.reshape(-1)
        halves[fqn] = np.concatenate([arrays[fqn][: args.kv_rank], arrays[fqn][args.kv_rank :][rotated]])
    assert (native_logits(halves, TOKENS[0], args) - exact).abs().max() > 1e-2 * scale
