"""Layers for multi-token prediction: left out and counted, or kept and written back as they were."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from converters import api
from converters.common.errors import CheckpointError, ConfigError
from converters.diff import diff
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info
from converters.model.mtp import MTP_REASON
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert, reshard
from tests.models.deepseek import write as write_deepseek
from tests.models.deepseek import write_mtp

NUM_IN_LAYER = 9 + 2 + 3 * (12 + 1) + 4  # attention and norms, router, experts, what only such a layer has


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def source(request, tmp_path_factory):
    """(count, root, tensors): root/hf as published, root/kept a DCP with the layers."""
    root = tmp_path_factory.mktemp("mtp")
    _, tensors = write_mtp(root / "hf", count=request.param)
    convert(root / "hf", root / "kept", to="dcp", mtp="keep")
    return request.param, root, tensors


def test_they_are_left_out_and_counted(source, tmp_path):
    count, root, tensors = source
    report = convert(root / "hf", tmp_path / "dcp", to="dcp")
    left_out = {name for name, reason in report.dropped.items() if reason == MTP_REASON}
    assert len(left_out) == count * NUM_IN_LAYER
    copies = {name: reason for name, reason in report.dropped.items() if name not in left_out}
    assert len(copies) == 2 * count
    assert copies["model.layers.3.shared_head.head.weight"] == "a copy of output.weight"
    assert any(f"({count * NUM_IN_LAYER:,} tensors)" in remark and "--mtp keep" in remark for remark in report.remarks)
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == {name for name in tensors if not name.startswith(("model.layers.3.", "model.layers.4."))}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_kept_they_come_back_as_they_were(source, tmp_path):
    count, root, tensors = source
    assert read_model_info(root / "kept").args.num_mtp_layers == count
    report = convert(root / "kept", tmp_path / "hf", to="hf", mtp="keep")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert not report.dropped and written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == count
    assert verify(tmp_path / "hf").verdict == verify(root / "kept").verdict == "all checks passed"
    assert diff(tmp_path / "hf", root / "kept").equal


def test_transformers_finds_the_same_layers_in_what_is_written(source, tmp_path):
    count, root, _ = source
    convert(root / "kept", tmp_path / "hf", to="hf", mtp="keep")
    states = []
    for folder in (root / "hf", tmp_path / "hf"):
        main = AutoModelForCausalLM.from_pretrained(folder)
        main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]  # the class has layer 61's, of the 671B
        states.append(MtpModel.from_pretrained(main).state_dict())
    assert states[0].keys() == states[1].keys() and len([k for k in states[0] if "eh_proj" in k]) == count
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_fused_experts_and_a_torch_file(source, tmp_path):
    count, root, tensors = source
    convert(root / "kept", tmp_path / "fused", to="hf", options=OutputOptions(fused_experts=True), mtp="keep")
    convert(tmp_path / "fused", tmp_path / "pt", to="torch", mtp="keep")
    state = torch.load(tmp_path / "pt" / "model.pt")
    assert state[f"mtp_layers.{count - 1}.moe.experts.w3"].shape == (12, 24, 32)
    up = torch.stack([tensors[f"model.layers.{2 + count}.mlp.experts.{e}.up_proj.weight"] for e in range(12)])
    assert torch.equal(state[f"mtp_layers.{count - 1}.moe.experts.w3"], up)
    assert diff(tmp_path / "pt", root / "kept").equal


def test_other_commands(source, tmp_path):
    count, root, _ = source
    with open_native(root / "kept") as weights:  # what training and inference read
        assert not any("mtp" in fqn for fqn in weights.tensors) and weights.info.args.num_mtp_layers == 0
        assert set(weights.source.ledger.dropped.values()) == {MTP_REASON}
        assert weights.notes == [f"layers for multi-token prediction are not read: {count}"]  # logged by both
    reshard(root / "kept", tmp_path / "cut", mesh=MeshShape(pp=2, dp_shard=3))
    assert diff(tmp_path / "cut", root / "kept").equal
    assert verify(tmp_path / "cut").verdict == "all checks passed"
    convert(
        root / "hf", tmp_path / "mesh", to="dcp", options=OutputOptions(mesh=MeshShape(pp=2, dp_shard=3)), mtp="keep"
    )
    assert diff(tmp_path / "mesh", root / "kept").equal
    assert verify(root / "hf").ok
    convert(root / "kept", tmp_path / "without", to="dcp")
    found = diff(root / "hf", tmp_path / "without").differences
    assert len(found) == count * 21 and {one.kind for one in found} == {"only in A"}
    assert (
        f"{count} layer{'s' if count > 1 else ''} for multi-token prediction" in inspect_checkpoint(root / "hf").parts
    )


def changed(root, folder, change):
    shutil.copytree(root / "hf", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_layer_that_config_json_states_and_nobody_has(source, tmp_path):
    count, root, _ = source
    folder = changed(root, tmp_path / "src", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": count + 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{count} of {count + 1} layers for multi-token prediction are there"):
        convert(folder, tmp_path / "dcp", to="dcp", mtp="keep")
    convert(folder, tmp_path / "dcp", to="dcp", mtp="keep", allow_missing=True)
    assert read_model_info(tmp_path / "dcp").args.num_mtp_layers == count


def test_copies_that_are_not_equal(source, tmp_path):
    _, root, _ = source

    def change(tensors):
        tensors["model.layers.3.embed_tokens.weight"][5, 2] += 1

    src = changed(root, tmp_path / "src", change)
    said = r"model.layers.3.embed_tokens.weight is not model.embed_tokens.weight: they differ in row"
    with pytest.raises(CheckpointError, match=said):
        convert(src, tmp_path / "dcp", to="dcp", mtp="keep")
    assert any(
        "model.layers.3.embed_tokens.weight is not" in line for line in convert(src, tmp_path / "dcp", to="dcp").remarks
    )


def test_copies_need_not_be_there(source, tmp_path):
    _, root, _ = source

    def change(tensors):
        for name in [n for n in tensors if n.endswith(("3.embed_tokens.weight", "shared_head.head.weight"))]:
            del tensors[name]

    src = changed(root, tmp_path / "src", change)
    convert(src, tmp_path / "dcp", to="dcp", mtp="keep")
    assert diff(tmp_path / "dcp", root / "kept").equal


def test_an_incomplete_one_cannot_be_kept(source, tmp_path):
    _, root, _ = source
    src = changed(root, tmp_path / "src", lambda tensors: tensors.pop("model.layers.3.hnorm.weight"))
    with pytest.raises(CheckpointError, match=r"missing     model.layers.3.hnorm.weight  \[32\]"):
        convert(src, tmp_path / "dcp", to="dcp", mtp="keep")
    convert(src, tmp_path / "dcp", to="dcp")


def test_a_layer_too_many_is_not_taken_for_one(source, tmp_path):
    """Without the projection that only such a layer has, it is a layer that config.json does not count."""
    _, root, _ = source
    src = changed(root, tmp_path / "src", lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    with pytest.raises(CheckpointError, match=r"unexpected  model.layers.(3|\{3..4\}).input_layernorm.weight"):
        convert(src, tmp_path / "dcp", to="dcp")


def test_nothing_to_keep(tmp_path):
    """A config as transformers writes it states a layer that is not there."""
    write_deepseek(tmp_path / "hf", num_mtp_layers=1)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(ConfigError, match="has no layers for multi-token prediction"):
        convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", mtp="keep")
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "back", to="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_torchtitans_newest_names(source, tmp_path):
    count, root, _ = source
    convert(root / "kept", tmp_path / "native", to="torch", mtp="keep")
    found = {}
    for name, weight in torch.load(tmp_path / "native" / "model.pt").items():
        for w in ("w1_EFD", "w2_EDF", "w3_EFD"):
            name = name.replace(f"moe.experts.{w[:2]}", f"moe.routed_experts.inner_experts.{w}")
        name = name.replace("expert_bias", "expert_bias_E")
        found["lm_head.weight" if name == "output.weight" else name] = weight
    torch.save(found, tmp_path / "theirs.pt")
    options = {"to": "dcp", "model_from": root / "hf", "trained_by": "titan"}
    convert(tmp_path / "theirs.pt", tmp_path / "out", mtp="keep", **options)
    assert diff(tmp_path / "out", root / "kept").equal
    assert MTP_REASON in convert(tmp_path / "theirs.pt", tmp_path / "without", **options).dropped.values()


def test_a_folder_with_a_manifest_is_checked_in_both_ways(source, tmp_path):
    """Digests of experts are those of their stack, also in a layer that is dropped or kept."""
    _, root, _ = source
    convert(root / "kept", tmp_path / "hf", to="hf", mtp="keep")
    for mtp in ("keep", "drop"):
        report = convert(tmp_path / "hf", tmp_path / mtp, to="dcp", mtp=mtp)
        assert not any("manifest" in remark for remark in report.remarks)
    assert diff(tmp_path / "keep", root / "kept").equal


def test_the_projection_is_not_quantized(source, tmp_path):
    count, root, tensors = source
    convert(root / "kept", tmp_path / "fp8", to="hf", mtp="keep", options=OutputOptions(quantize="fp8"))
    written = load_file(tmp_path / "fp8" / "model.safetensors")
    names = [f"model.layers.{3 + k}.eh_proj" for k in range(count)]
    assert all(torch.equal(written[f"{name}.weight"], tensors[f"{name}.weight"]) for name in names)
    assert written["model.layers.3.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert set(names) < set(config["quantization_config"]["modules_to_not_convert"])
    convert(tmp_path / "fp8", tmp_path / "again", to="dcp", mtp="keep")
    assert read_model_info(tmp_path / "again").args.num_mtp_layers == count


def test_layers_that_a_folder_of_scales_lacks_are_not_quantized_and_counted(source, tmp_path):
    count, root, tensors = source
    convert(root / "kept", tmp_path / "without", to="hf", options=OutputOptions(quantize="fp8"))
    options = OutputOptions(quantize="fp8", scales_from=tmp_path / "without")
    said = f"has 0 of {count} layers for multi-token prediction: the weights of the others are not quantized"
    assert any(
        said in remark
        for remark in convert(root / "kept", tmp_path / "a", to="hf", mtp="keep", options=options).remarks
    )
    written = load_file(tmp_path / "a" / "model.safetensors")
    name = "model.layers.3.mlp.experts.0.up_proj"
    assert torch.equal(written[f"{name}.weight"], tensors[f"{name}.weight"])
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert name in config["quantization_config"]["modules_to_not_convert"]
    report = convert(root / "kept", tmp_path / "b", to="hf", options=options)
    assert not any("are not quantized" in remark for remark in report.remarks)


def test_a_choice_that_is_none_is_refused(source, tmp_path):
    """In Python, where nothing else checks it: a misspelled "keep" must not drop them."""
    _, root, _ = source
    for text, wrong in (("'Keep'", {"mtp": "Keep"}), ("'torchtitan'", {"trained_by": "torchtitan"})):
        with pytest.raises(ConfigError, match=f"unknown .* {text}"):
            api.convert(root / "hf", tmp_path / "out", to="dcp", **wrong)
    assert not (tmp_path / "out").exists()
    report = api.convert(root / "hf", tmp_path / "out", to="dcp", mtp="keep")
    assert MTP_REASON not in report.dropped.values()
