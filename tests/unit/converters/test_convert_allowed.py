"""What a conversion refuses, all offenders at once, and what comes out when one of them is allowed; float32 islands."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from converters.common.box import TensorInfo
from converters.common.errors import CheckpointError, ConfigError
from converters.conversion.plan import find_casts, find_kept_float32
from converters.diff import diff
from converters.families import registry
from converters.families.llama3 import LLAMA3
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint
from converters.layout.mesh_shape import MeshShape
from converters.source.open import open_checkpoint
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.uploaded import STORES, in_store


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, writes=["convert"])


GONE = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight")
GONE_NATIVE = {"layers.0.feed_forward.w3.weight", "layers.1.attention.wk.weight", "output.weight"}


@pytest.fixture
def hf(tmp_path):
    write_llama(tmp_path / "hf", vocab_size=302, rope_scaling=None)
    return tmp_path / "hf"


def change(folder, edit):
    """Let `edit` change the tensors of a folder in place; returns them."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def without(tensors):
    for name in GONE:
        del tensors[name]


def beside(folder):
    return sorted(p.name for p in folder.parent.iterdir() if p != folder)


FORMATS = {
    "dcp": OutputOptions(),
    "dcp for a mesh": OutputOptions(mesh=MeshShape(pp=2, dp_shard=2, tp=2)),
    "hf": OutputOptions(),
    "meta": OutputOptions(),
    "meta in two": OutputOptions(num_shards=2),
    "torch": OutputOptions(),
}


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_missing_is_missing_in_the_output_too(hf, form, tmp_path):
    left = change(hf, without)
    to, options = form.split()[0], FORMATS[form]
    with pytest.raises(CheckpointError, match="3 problems") as error:
        convert(hf, tmp_path / "out", to=to, options=options)
    assert all(f"missing     {name}" in error.value.message for name in GONE)
    assert beside(hf) == []
    report = convert(hf, tmp_path / "out", to=to, options=options, allow_missing=True)
    assert sorted(report.missing) == sorted(GONE)
    written = open_checkpoint(tmp_path / "out").tensors
    assert len(written) == report.num_tensors == len(left)
    assert read_manifest(tmp_path / "out").tensors.keys() == written.keys()
    # It is no whole model, and nobody takes it for one
    checked = {check.name: check for check in verify(tmp_path / "out").checks}
    assert {name for name, check in checked.items() if check.outcome == "failed"} == {"names and shapes"}
    assert str(checked["names and shapes"]).count("missing  ") == 3
    with pytest.raises(CheckpointError, match="3 problems"):
        convert(tmp_path / "out", tmp_path / "back", to="hf")
    convert(tmp_path / "out", tmp_path / "back", to="hf", allow_missing=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == left.keys() and all(torch.equal(back[n], left[n]) for n in back)


def test_what_is_incomplete_is_compared_as_far_as_it_goes(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "whole")
    change(hf, without)
    convert(hf, tmp_path / "dcp", to="dcp", allow_missing=True)
    convert(tmp_path / "dcp", tmp_path / "back", to="hf", allow_missing=True)
    report = diff(tmp_path / "whole", tmp_path / "dcp")
    assert {(d.name, d.kind) for d in report.differences} == {(name, "only in A") for name in GONE_NATIVE}
    assert report.num_equal == 18
    report = diff(tmp_path / "dcp", tmp_path / "back")
    assert report.equal and report.num_equal == 18
    assert report.not_compared == dict.fromkeys(GONE_NATIVE, "in neither")
    with pytest.raises(CheckpointError, match="3 problems"):  # nobody said that it may be incomplete
        diff(hf, tmp_path / "whole")
    assert inspect_checkpoint(tmp_path / "back").naming == "hf"


def test_stages_are_those_of_the_whole_model(hf, tmp_path):
    """A layer that is missing altogether does not move the others to another pipeline rank."""
    mesh = OutputOptions(mesh=MeshShape(pp=2))
    convert(hf, tmp_path / "whole", to="dcp", options=mesh)
    change(hf, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.0.")])
    convert(hf, tmp_path / "part", to="dcp", options=mesh, allow_missing=True)
    whole, part = (open_checkpoint(tmp_path / name).tensors for name in ("whole", "part"))
    assert {n: t.chunks[0].file for n, t in part.items()} == {n: whole[n].chunks[0].file for n in part}
    assert len(whole) - len(part) == 9


def test_what_the_model_does_not_have_is_left_out_and_listed(hf, tmp_path):
    change(hf, lambda t: t.update({"vision.weight": torch.ones(3), "model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match="2 problems") as error:
        convert(hf, tmp_path / "dcp", to="dcp")
    assert "unexpected  vision.weight" in error.value.message and beside(hf) == []
    report = convert(hf, tmp_path / "dcp", to="dcp", allow_extra=True)
    assert sorted(report.extra) == ["model.layers.2.mlp.up_proj.weight", "vision.weight"]
    names = dcp.FileSystemReader(str(tmp_path / "dcp")).read_metadata().state_dict_metadata
    assert len(names) == 21 and verify(tmp_path / "dcp").ok


def test_all_that_is_wrong_is_reported_together_and_none_of_it_is_excused_by_another(hf, tmp_path):
    def spoil(tensors):
        without(tensors)
        tensors["vision.weight"] = torch.ones(3)
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].T.contiguous()
        tensors["model.layers.1.mlp.gate_proj.weight"] = tensors["model.layers.1.mlp.gate_proj.weight"].to(torch.int32)

    change(hf, spoil)
    kinds = {"missing": 3, "unexpected": 1, "shape": 2, "dtype": 1}
    for allowed, excused in (({}, []), ({"allow_missing": True}, ["missing"]), ({"allow_extra": True}, ["unexpected"])):
        with pytest.raises(CheckpointError) as error:
            convert(hf, tmp_path / "dcp", to="dcp", **allowed)
        lines = [line.split()[0] for line in error.value.message.splitlines()[1:]]
        assert {kind: lines.count(kind) for kind in kinds if kind not in excused} == {
            kind: number for kind, number in kinds.items() if kind not in excused
        }
        assert not set(excused) & set(lines)
    with pytest.raises(CheckpointError, match="3 problems"):  # a wrong shape or type is never allowed
        convert(hf, tmp_path / "dcp", to="dcp", allow_missing=True, allow_extra=True, allow_nonfinite=True)
    assert beside(hf) == []


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_values_that_are_no_numbers(hf, dtype, tmp_path):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = torch.nan
        tensors["model.layers.1.mlp.up_proj.weight"][2, 5:7] = torch.inf

    change(hf, spoil)
    with pytest.raises(CheckpointError, match="2 tensors hold values that are NaN or infinite") as error:
        convert(hf, tmp_path / "dcp", to="dcp", dtype=dtype)
    assert "\n  layers.1.feed_forward.w3.weight: 2 values\n  norm.weight: 1 value" in error.value.message
    assert error.value.tries == ("--allow-nonfinite",) and beside(hf) == []
    report = convert(hf, tmp_path / "dcp", to="dcp", dtype=dtype, allow_nonfinite=True)
    assert report.non_finite == {"layers.1.feed_forward.w3.weight": 2, "norm.weight": 1}


def islands_of(folder):
    """Weights in bfloat16 but for the norms and one large matrix, as whoever wrote them wanted."""
    kept = {"model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.down_proj.weight"}
    return change(
        folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items() if n not in kept})
    )


def test_float32_among_16_bit_weights_stays(hf, tmp_path):
    tensors = islands_of(hf)
    report = convert(hf, tmp_path / "half", to="hf", dtype="float16")
    written = load_file(tmp_path / "half" / "model.safetensors")
    wide = {n for n, t in written.items() if t.dtype == torch.float32}
    assert wide == {n for n, t in tensors.items() if t.dtype == torch.float32} and len(wide) == 3
    assert all(torch.equal(written[n], tensors[n]) for n in wide)
    assert set(report.kept_float32) == {
        "norm.weight", "layers.0.attention_norm.weight", "layers.1.feed_forward.w2.weight",
    }  # fmt: skip
    assert report.num_cast == len(tensors) - 3 and list(report.dtypes) == ["float16", "float32"]
    # asked for nothing, everything stays; asked for more bits, all are cast
    assert convert(hf, tmp_path / "same", to="dcp").kept_float32 == ()
    assert list(convert(hf, tmp_path / "wide", to="dcp", dtype="fp32").dtypes) == ["float32"]


def test_a_few_16_bit_tensors_make_no_islands_of_the_rest(hf, tmp_path):
    change(hf, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].bfloat16()}))
    report = convert(hf, tmp_path / "out", to="dcp", dtype="bfloat16")
    assert report.kept_float32 == () and list(report.dtypes) == ["bfloat16"]


def test_a_family_says_what_stays_float32(hf, tmp_path, monkeypatch):
    kept = ("layers.{n}.attention_norm.weight", "norm.weight")
    monkeypatch.setitem(registry._FAMILIES, "llama2", replace(registry.get_family("llama2"), keep_float32=kept))
    monkeypatch.setitem(registry._FAMILIES, "llama3", replace(LLAMA3, keep_float32=kept))
    report = convert(hf, tmp_path / "out", to="hf", dtype="bfloat16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    wide = {n for n, t in written.items() if t.dtype == torch.float32}
    assert wide == {"model.norm.weight", *(f"model.layers.{n}.input_layernorm.weight" for n in range(2))}
    assert len(report.kept_float32) == 3


def test_islands_are_judged_by_bytes():
    tensors = {
        "a": TensorInfo("bfloat16", (10, 10)),
        "b": TensorInfo("float32", (49,)),
        "n": TensorInfo("int64", (999,)),
    }
    assert find_kept_float32(tensors, "float16") == ["b"]
    assert find_casts(tensors, "float16") == {"a": "float16"}
    tensors["b"] = TensorInfo("float32", (51,))
    assert find_kept_float32(tensors, "float16") == []
    assert find_casts(tensors, "float16") == {"a": "float16", "b": "float16"}
    assert find_kept_float32(tensors, "float32") == find_kept_float32(tensors, None) == []
    with pytest.raises(ConfigError, match="unknown floating element type: 'int8'"):
        find_casts(tensors, "int8")


def test_without_digests_files_are_still_vouched_for(hf, tmp_path):
    convert(hf, tmp_path / "dcp", to="dcp", digests=False)
    manifest = read_manifest(tmp_path / "dcp")
    assert {t.digest for t in manifest.tensors.values()} == {""}
    assert verify(tmp_path / "dcp").ok
    file = tmp_path / "dcp" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert not verify(tmp_path / "dcp").ok
    shutil.rmtree(tmp_path / "dcp")
    for workers in (1, 3):
        convert(hf, tmp_path / "dcp", to="dcp", workers=workers, overwrite=True)
        assert verify(tmp_path / "dcp").ok


def test_reshard_keeps_the_same_islands_and_says_so(hf, tmp_path):
    islands_of(hf)
    convert(hf, tmp_path / "dcp", to="dcp")
    report = reshard(tmp_path / "dcp", tmp_path / "half", dtype="float16")
    assert {n for n, t in open_checkpoint(tmp_path / "half").tensors.items() if t.dtype == "float32"} == {
        "norm.weight", "layers.0.attention_norm.weight", "layers.1.feed_forward.w2.weight",
    }  # fmt: skip
    assert any("float32 stays for 3 tensors" in remark and "norm.weight" in remark for remark in report.remarks)


def test_files_that_are_longer_than_asked_are_reported(tmp_path):
    write_llama(tmp_path / "hf", vocab_size=30_000)
    (remark,) = convert(
        tmp_path / "hf", tmp_path / "out", to="hf", options=OutputOptions(shard_bytes=1_000_000)
    ).remarks
    longest = max((tmp_path / "out").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    assert remark.startswith("--shard-size: longer") and longest.name in remark
    fitting = OutputOptions(shard_bytes=50_000_000)
    assert convert(tmp_path / "hf", tmp_path / "fits", to="hf", options=fitting).remarks == ()


@pytest.mark.parametrize(("dtype", "least", "most"), [("bfloat16", 1e-3, 2**-8), ("float16", 1e-4, 1.0)])
def test_what_rounding_did_is_reported(hf, tmp_path, dtype, least, most):
    """Checked against torch's own cast; fp16 makes zeros of small values, which is a change of 1."""
    report = convert(hf, tmp_path / "out", to="hf", dtype=dtype)
    name = "model.layers.0.self_attn.q_proj.weight"
    old, new = (load_file(folder / "model.safetensors")[name].double() for folder in (hf, tmp_path / "out"))
    expected = ((new - old).abs() / old.abs())[old != 0].max().item()
    assert report.relative_error[name] == pytest.approx(expected, rel=1e-6) and least < expected <= most
