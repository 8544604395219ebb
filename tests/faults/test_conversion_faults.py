"""The fault matrix of conversions (C1–C7, C17, C20): what is wrong is reported, and nothing is written of it."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.conftest import DATA, INDEX, Q, change_tensors, shard_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("damage", ["cut", "emptied", "missing"])
@pytest.mark.parametrize("kind", DATA)
def test_c1_a_file_that_is_not_whole(copy_of, refused, kind, damage):
    source = copy_of(kind)
    file = sorted(source.glob(DATA[kind]))[-1]
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, int(file.stat().st_size * 0.9) if damage == "cut" else 0)
    alone = kind in ("hf_single", "meta", "torch")  # then nothing tells which file it was
    refused(source, str(source) if damage == "missing" and alone else file.name)


def test_c1_all_that_are_not_whole_are_listed(copy_of, refused):
    source = copy_of("hf")
    first, *_, last = sorted(source.glob(DATA["hf"]))
    os.truncate(first, first.stat().st_size - 1)
    last.unlink()
    refused(source, first.name, f"{last.name}: missing")


def test_c2_an_index_that_disagrees(index, refused, titan, tmp_path):
    folder, weight_map, write = index
    files = sorted(set(weight_map.values()))
    write(weight_map | {Q: "model-00077-of-00077.safetensors"})
    refused(folder, "model-00077-of-00077.safetensors: missing", Q)
    write({name: file for name, file in weight_map.items() if file != files[1]})
    refused(folder, f"{files[1]}: of the same series", INDEX)
    write(weight_map, total_size=1)
    code, out, _ = titan("verify", folder)
    assert code == 0 and "warning" in out and "says total_size 1, the tensors take" in out
    code, out, _ = titan("convert", "auto", folder, tmp_path / "dcp", "--to", "dcp")
    assert code == 0 and "says total_size 1, the tensors take" in out
    write(weight_map)
    shutil.copy(folder / files[0], folder / "consolidated.safetensors")
    code, out, _ = titan("verify", folder)
    assert code == 0 and "consolidated.safetensors is not read" in out and "with warnings: index, reading" in out


def test_c3_a_tensor_in_two_shards(index, refused):
    folder, weight_map, _ = index
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[Q])
    tensor = load_file(folder / weight_map[Q])[Q]
    change_tensors(folder / other, lambda tensors: tensors.update({Q: tensor}))
    refused(folder, f"{Q}: in both")


def test_c4_missing_and_extra_tensors(index, refused, titan, tmp_path):
    folder, weight_map, write = index
    change_tensors(folder / weight_map[Q], lambda tensors: tensors.pop(Q))
    refused(folder, f"{Q}: not in {weight_map[Q]}")  # the index still has it
    write({name: file for name, file in weight_map.items() if name != Q})
    refused(folder, f"missing     {Q}")
    lost = load_file(next((folder.parent).glob("*/" + weight_map[Q])))  # as it is now
    change_tensors(
        folder / weight_map[Q], lambda tensors: tensors.update({Q: torch.zeros(32, 32), "odd": torch.ones(2)})
    )
    assert Q not in lost
    refused(folder, "odd: in ", "but not in the index")
    write(weight_map | {"odd": weight_map[Q]})
    refused(folder, "unexpected  odd")
    code, out, _ = titan("convert", "auto", folder, tmp_path / "out", "--to", "dcp", "--allow-extra", "--json")
    assert code == 0 and "odd" in json.loads(out)["extra"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.reshape(16, 64), f"shape       {Q}  is [16, 64], should be [32, 32]"),
        (lambda t: t[:, :31], f"shape       {Q}  is [32, 31], should be [32, 32]"),
        (lambda t: t.int(), f"dtype       {Q}  is int32, should be a floating type"),
        (lambda t: t > 0, f"dtype       {Q}  is bool, should be a floating type"),
    ],
)
def test_c5_wrong_shape_and_dtype(copy_of, refused, change, message):
    source = copy_of("hf")
    change_tensors(shard_of(source, Q), lambda tensors: tensors.update({Q: change(tensors[Q])}))
    refused(source, message)


def test_c5_a_transpose_is_refused_and_no_cast_is_silent(copy_of, refused, titan, tmp_path):
    source, down = copy_of("hf"), "model.layers.1.mlp.down_proj.weight"
    change_tensors(shard_of(source, down), lambda tensors: tensors.update({down: tensors[down].T}))
    refused(source, f"shape       {down}  is [90, 32], should be [32, 90]")
    change_tensors(shard_of(source, down), lambda tensors: tensors.update({down: tensors[down].T.half()}))
    assert titan("convert", "auto", source, tmp_path / "out", "--to", "hf")[0] == 0
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert kept[down].dtype == torch.float16 and kept[Q].dtype == torch.float32  # each as it was
    assert titan("convert", "auto", source, tmp_path / "cast", "--to", "hf", "--dtype", "bf16")[0] == 0
    assert load_file(tmp_path / "cast" / "model.safetensors")[down].dtype == torch.bfloat16


def test_c6_values_that_are_no_numbers(copy_of, refused, titan, tmp_path):
    source, norm = copy_of("hf"), "model.norm.weight"
    change_tensors(shard_of(source, Q), lambda tensors: tensors[Q].view(-1)[:3].fill_(float("nan")))
    change_tensors(shard_of(source, norm), lambda tensors: tensors[norm][:1].fill_(float("-inf")))
    err = refused(source, "--allow-nonfinite")
    lines = [line for line in err.splitlines() if "attention.wq" in line or "norm.weight" in line or "q_proj" in line]
    assert len(lines) == 2 and any("3" in line for line in lines) and any("1" in line for line in lines), err
    code, out, _ = titan("convert", "auto", source, tmp_path / "out", "--to", "dcp", "--allow-nonfinite", "--json")
    assert code == 0 and sorted(json.loads(out)["non_finite"].values()) == [1, 3]


@pytest.mark.parametrize(("dtype", "value"), [("fp16", 1e6), ("bf16", 3.4e38), ("fp16", -7e4)])
def test_c7_a_cast_that_overflows(copy_of, refused, dtype, value):
    source = copy_of("hf")
    change_tensors(shard_of(source, Q), lambda tensors: tensors[Q].view(-1)[5:6].fill_(value))
    refused(source, "overflow", "attention.wq", options=("--dtype", dtype))


@pytest.mark.parametrize(("dtype", "least", "most"), [("bfloat16", 1e-3, 2**-8), ("float16", 1e-4, 1.0)])
def test_c7_what_rounding_did_is_reported(sources, titan, tmp_path, dtype, least, most):
    """Checked against torch's own cast; fp16 makes zeros of small values, which is a change of 1."""
    out = tmp_path / "out"
    code, text, _ = titan("convert", "auto", sources / "hf", out, "--to", "hf", "--dtype", dtype)
    assert code == 0 and "rounding changes values by at most" in text
    code, report, _ = titan(
        "convert", "auto", sources / "hf", out, "--to", "hf", "--dtype", dtype, "--overwrite", "--json"
    )
    message = json.loads(report)["relative_error"]
    old, new = (load_file(shard_of(folder, Q))[Q].double() for folder in (sources / "hf", out))
    expected = ((new - old).abs() / old.abs())[old != 0].max().item()
    assert message[Q] == pytest.approx(expected, rel=1e-6) and least < message[Q] <= most


def test_c17_an_output_that_exists(sources, copy_of, titan, tmp_path):
    out = tmp_path / "out"
    convert = ("convert", "auto", sources / "hf", out, "--to", "dcp")
    assert titan(*convert)[0] == 0
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    code, _, err = titan(*convert)
    assert code == 2 and "exists already" in err and "--overwrite" in err
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before
    for name in sorted(before)[: len(before) // 2]:  # half of one
        (out / name).unlink()
    assert titan(*convert)[0] == 2
    assert titan(*convert, "--overwrite")[0] == 0
    assert titan("verify", out)[0] == 0 and titan("diff", sources / "hf", out)[0] == 0
    shutil.rmtree(out)
    shutil.copytree(sources / "meta", out)  # another checkpoint
    assert titan(*convert)[0] == 2 and titan(*convert, "--overwrite")[0] == 0 and not list(out.glob("*.pth"))
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.txt").write_text("ten years of work")  # somebody's folder
    for options in ((), ("--overwrite",)):
        code, _, err = titan(*convert, *options)
        assert code == 2 and "is not what would be written" in err
    assert (out / "thesis.txt").read_text() == "ten years of work"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp-")] == []


def test_c20_tied_weights(copy_of, refused, titan, tmp_path, sources):
    source = copy_of("hf_single")
    config, file, head = source / "config.json", source / "model.safetensors", "lm_head.weight"
    untied = json.loads(config.read_text())
    config.write_text(json.dumps(untied | {"tie_word_embeddings": True}))
    refused(
        source, "the model is tied, but lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings"
    )
    change_tensors(file, lambda tensors: tensors.update({head: tensors["model.embed_tokens.weight"].clone()}))
    code, out, _ = titan("convert", "auto", source, tmp_path / "tied", "--to", "dcp")
    assert code == 0 and "tied: equal to the embedding" in out  # both there, and equal
    change_tensors(file, lambda tensors: tensors.pop(head))
    assert titan("convert", "auto", source, tmp_path / "one", "--to", "dcp")[0] == 0  # one absent, as usual
    assert titan("diff", tmp_path / "tied", tmp_path / "one")[0] == 0
    config.write_text(json.dumps(untied))
    refused(source, "there is no output weight (lm_head.weight)", "set tie_word_embeddings: true in config.json if")
