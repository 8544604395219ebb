"""converters/diff.py: equal is said of equal things only, and every planted difference is found and measured."""

import json
import math
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from converters.common.errors import CheckpointError
from converters.diff import diff, in_both
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import read_model_info, write_model_info
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.uploaded import STORES, in_store

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, reads=["diff"])


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff") / "hf"
    write_llama(folder)
    return folder


@pytest.fixture
def changed(hf, tmp_path):
    """A function that writes the HF folder with some tensors changed."""

    def write(change):
        shutil.copytree(hf, tmp_path / "changed", dirs_exist_ok=True)
        tensors = load_file(hf / "model.safetensors")
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "changed" / "model.safetensors")
        return tmp_path / "changed"

    return write


def test_equal_across_formats_and_layouts(hf, tmp_path):
    convert(hf, tmp_path / "a", to="dcp")
    reshard(tmp_path / "a", tmp_path / "b", mesh=MeshShape(pp=2, dp_shard=3))
    for one, other in ((hf, tmp_path / "a"), (tmp_path / "a", tmp_path / "b"), (tmp_path / "b", hf)):
        report = diff(one, other)
        assert report.equal and report.num_equal == 21 and report.by == "native names"


def test_values(hf, changed):
    def change(tensors):
        tensors["model.norm.weight"][5] += 0.5
        tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = math.nan

    report = diff(hf, changed(change))
    assert [d.name for d in report.differences] == ["layers.0.feed_forward.w3.weight", "norm.weight"]
    nan, norm = report.differences
    assert math.isnan(nan.max_abs) and "first at [3, 4]" in nan.detail and "1 of 2,880" in nan.detail
    assert norm.max_abs == 0.5 and norm.relative == pytest.approx(0.5 / 32**0.5) and "first at [5]" in norm.detail
    assert report.num_equal == 19 and not report.equal


def test_a_wrong_permutation_is_named(hf, changed):
    def interleave(tensors):
        rows, dim = tensors[Q].shape
        tensors[Q] = tensors[Q].view(4, 2, rows // 8, dim).transpose(1, 2).reshape(rows, dim)

    (found,) = diff(hf, changed(interleave)).differences
    assert found.name == "layers.1.attention.wq.weight" and found.detail.startswith("equal after the RoPE permutation")
    (found,) = diff(changed(interleave), hf).differences
    assert found.detail.startswith("equal after the RoPE permutation")


def test_a_transpose_is_named(hf, changed):
    name = "model.layers.0.self_attn.o_proj.weight"
    (found,) = diff(hf, changed(lambda tensors: tensors.update({name: tensors[name].T}))).differences
    assert found.detail.startswith("equal after a transpose")


def test_nothing_is_explained_that_is_not_so(hf, changed):
    square = "model.layers.0.self_attn.o_proj.weight"

    def all_but_equal(tensors):
        rows, dim = tensors[Q].shape
        tensors[Q] = tensors[Q].view(4, 2, rows // 8, dim).transpose(1, 2).reshape(rows, dim)
        tensors[square] = tensors[square].T.contiguous()
        tensors[Q][-1, -1] += 1
        tensors[square][-1, -1] += 1

    def one_value(tensors):
        tensors[Q][0, 0] += 1
        tensors[square][0, 0] += 1

    for change in (all_but_equal, one_value):
        found = diff(hf, changed(change)).differences
        assert [d.name for d in found] == ["layers.0.attention.wo.weight", "layers.1.attention.wq.weight"]
        assert not any("equal after" in d.detail for d in found), found


def test_dtypes_and_signs_of_zero(hf, changed, tmp_path):
    convert(hf, tmp_path / "bf16", to="dcp", dtype="bf16")
    report = diff(hf, tmp_path / "bf16")
    kinds = {d.name: d for d in report.differences}
    assert kinds["norm.weight"].kind == "dtype" and "values are equal" in kinds["norm.weight"].detail  # ones
    rounded = kinds["output.weight"]
    assert rounded.kind == "dtype" and 0 < rounded.relative < 2**-8 and "B is A, cast to bfloat16" in rounded.detail
    back = {d.name: d for d in diff(tmp_path / "bf16", hf).differences}["output.weight"]
    assert back.kind == "dtype" and "A is B, cast to bfloat16" in back.detail and back.max_abs == rounded.max_abs
    tensors = load_file(hf / "model.safetensors")
    tensors["lm_head.weight"][7, 3] += 1
    other = changed(lambda t: t.update({n: v.bfloat16() for n, v in tensors.items()}))
    found = {d.name: d for d in diff(hf, other).differences}["output.weight"]  # a cast, and one value more
    assert found.kind == "values" and found.max_abs == pytest.approx(1, abs=0.02)
    zero = changed(lambda tensors: tensors["model.norm.weight"].zero_())
    shutil.copytree(zero, tmp_path / "plus")
    minus = changed(lambda tensors: tensors["model.norm.weight"].zero_().neg_())
    (found,) = diff(tmp_path / "plus", minus).differences
    assert (found.kind, found.max_abs) == ("dtype", 0.0) and "-0.0" in found.detail


def test_numbers_that_no_shape_shows(hf, tmp_path):
    shutil.copytree(hf, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    path.write_text(json.dumps(config))
    (found,) = diff(hf, tmp_path / "other").differences
    assert (found.name, found.kind) == ("rope_theta", "model")


def test_one_side_that_does_not_say_what_it_is(hf, tmp_path):
    convert(hf, tmp_path / "dcp", to="dcp")
    (tmp_path / "dcp" / "titan_model.json").unlink()
    (tmp_path / "dcp" / "titan_manifest.json").unlink()
    assert diff(hf, tmp_path / "dcp").equal and diff(tmp_path / "dcp", hf).equal


def test_a_limit_is_no_difference(hf, tmp_path):
    """Meta's params.json and torchtune's files do not know max_seq_len, and it changes nothing that is computed."""
    shutil.copytree(hf, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 512}))
    report = diff(hf, tmp_path / "other")
    assert report.equal and report.notes[0].startswith("max_seq_len: 256 in A, 512 in B")


def test_shapes_that_are_each_others_transpose(tmp_path):
    weight = torch.randn(5, 3)
    for name, tensor in (("a", weight), ("b", weight.T.contiguous()), ("c", weight.T.contiguous() + 1)):
        torch.save({"w": tensor}, tmp_path / f"{name}.pt")
    (found,) = diff(tmp_path / "a.pt", tmp_path / "b.pt").differences
    assert found.kind == "shape" and found.detail.startswith("equal after a transpose; [5, 3] in A")
    (found,) = diff(tmp_path / "a.pt", tmp_path / "c.pt").differences
    assert found.kind == "shape" and found.detail == "[5, 3] in A, [3, 5] in B"


def test_gaps_against_torch(tmp_path):
    """Every number that is reported, over several blocks, dtypes and special values, against torch's own."""
    generator = torch.Generator().manual_seed(0)
    size = (3 << 20) + 5
    a = {
        "bf16": torch.randn(size, generator=generator).bfloat16(),
        "fp32": torch.randn(70, 50, generator=generator),
        "big": torch.tensor([2**62, 2**62, 5]),
        "inf": torch.tensor([math.inf, 1.0, math.nan, 2.0]),
        "z": torch.tensor([1 + 2j, 3j]),
        "scalar": torch.tensor(2.0),
        "flag": torch.tensor([True, False]),
    }
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["bf16"][size - 3 :] += 1
    b["fp32"][60:, 7] *= 1.5
    b["big"][1] += 1
    b["inf"][3] = 2.5
    b["z"][1] = 7j
    b["scalar"] += 1
    b["flag"][1] = True
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert report.first_tensor == "bf16" and [d.name for d in report.differences] == list(a)
    for found in report.differences:
        left, right = a[found.name], b[found.name]
        exact = torch.complex128 if left.is_complex() else torch.float64
        number = int((left.nan_to_num() != right.nan_to_num() if left.is_floating_point() else left != right).sum())
        assert found.detail.startswith(f"{number:,} of {left.numel():,} values differ")
        gaps = (left.to(exact) - right.to(exact)).nan_to_num() if found.name != "inf" else torch.tensor([0.5])
        assert found.max_abs == pytest.approx(float(gaps.abs().max()), rel=1e-12)
        if found.name != "inf":
            assert found.relative == pytest.approx(float(gaps.abs().norm() / left.to(exact).abs().norm()), rel=1e-9)
    firsts = {d.name: d.detail.rpartition("first at ")[2] for d in report.differences}
    assert firsts["bf16"] == f"[{size - 3}]" and firsts["fp32"] == "[60, 7]" and firsts["scalar"] == "[]"


def test_the_rest_of_nested_state_dicts_is_compared(tmp_path):
    state = {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.zeros(3), "lr": 0.1}, "epoch": 3}
    other = {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3), "lr": 0.2}, "epoch": 4}
    torch.save(state, tmp_path / "a.pt")
    torch.save(other, tmp_path / "b.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert {d.name for d in report.differences} == {"optimizer.m", "optimizer.lr", "epoch"} and report.num_equal == 1
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert diff(tmp_path / "a.pt", tmp_path / "dcp").equal
    torch.save(state["model"], tmp_path / "weights.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "weights.pt")
    assert set(report.not_compared) == {"optimizer", "epoch"}


def test_names_as_stored(tmp_path):
    for name, extra in (("a", {"only_a": torch.zeros(2)}), ("b", {"w": torch.ones(3, 2)})):
        state = {"w": torch.ones(2, 3), "same": torch.arange(4), "v": torch.arange(3)} | extra
        torch.save(state, tmp_path / f"{name}.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert report.by == "names as stored" and report.num_equal == 2
    assert {(d.name, d.kind) for d in report.differences} == {("w", "shape"), ("only_a", "only in A")}


def test_sections(hf, tmp_path):
    convert(hf, tmp_path / "dcp", to="dcp")
    weights = {n: torch.zeros(t.shape) for n, t in _stock_shapes(tmp_path / "dcp").items()}

    def save(name, **changes):
        state = weights | {
            "optimizer": {"state.norm.weight.exp_avg": torch.full((32,), changes.get("moment", 1.0))},
            "train_state": {"step": changes.get("step", 3)},
        }
        dcp.save(state, checkpoint_id=str(tmp_path / name), no_dist=True)
        write_model_info(tmp_path / name, read_model_info(hf))
        return tmp_path / name

    a = save("a")
    same = diff(a, save("same"))
    assert same.equal and same.to_json()["first_tensor"] is None
    found = {d.name: d for d in diff(a, save("b", moment=1.5, step=4)).differences}
    assert found.keys() == {"optimizer.state.norm.weight.exp_avg", "train_state.step"}
    assert found["optimizer.state.norm.weight.exp_avg"].max_abs == 0.5
    assert found["train_state.step"].detail == "3 in A, 4 in B"
    reshard(a, tmp_path / "weights", drop=["optimizer", "train_state"])
    report = diff(a, tmp_path / "weights")
    assert report.equal and report.not_compared == {"optimizer": "only in A", "train_state": "only in A"}


@pytest.mark.parametrize(
    ("left", "right", "detail"),
    [
        (0.1, 0.30000000000000004, "0.1 in A, 0.30000000000000004 in B"),
        (400.0, 1e-5, "400 in A, 1e-05 in B"),
        (3, 3.0000000000000004, "3 in A, 3.0000000000000004 in B"),
        (2, 2.0, "int 2 in A, float 2 in B"),
        ("x" * 90 + "left" + "z" * 90, "x" * 90 + "right", f"…{'x' * 13}left{'z' * 23}… in A, …{'x' * 13}right' in B"),
        ([*range(99)], [*range(98), 7], "… 95, 96, 97, 98] in A, … 95, 96, 97, 7] in B"),
        (
            json.dumps({"job.name": "a" * 80, "training.steps": 400, "deep": {"lr": 1e-3}, "gone": None}),
            json.dumps({"job.name": "a" * 80, "training.steps": 100, "deep": {"lr": 2e-3}, "new": True}),
            "training.steps: 400 in A, 100 in B; deep.lr: 0.001 in A, 0.002 in B; gone: only in A; new: only in B",
        ),
        ({str(n): n for n in range(9)}, {str(n): -n for n in range(9)}, "4: 4 in A, -4 in B; … and 4 more keys"),
        ('{"a": 1}', '{"a":  1}', """'{"a": 1}' in A, '{"a":  1}' in B"""),
    ],
)
def test_what_differs_of_two_values_is_shown(left, right, detail):
    assert in_both(left, right).endswith(detail)


def test_long_settings_that_differ_in_one_key(tmp_path):
    for name, steps in (("a", 400), ("b", 100)):
        settings = json.dumps({"job.description": "x" * 80, "training.steps": steps})
        torch.save({"model": {"w": torch.ones(3)}, "train_state": {"settings": settings}}, tmp_path / f"{name}.pt")
    (found,) = diff(tmp_path / "a.pt", tmp_path / "b.pt").differences
    assert (found.name, found.detail) == ("train_state.settings", "training.steps: 400 in A, 100 in B")


def _stock_shapes(folder):
    metadata = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(entry.size) for name, entry in metadata.items()}


def test_missing_input(hf, tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        diff(hf, tmp_path / "nowhere")
