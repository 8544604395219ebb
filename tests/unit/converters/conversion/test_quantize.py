"""--quantize: codes and scales of DeepGEMM's formula, readable by others, and the same bytes again with kept scales."""

import json

import pytest
import torch

from converters.common.errors import CheckpointError, ConfigError, TitanError
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint
from converters.quantized.fp8_encoder import Fp8Encoder
from converters.quantized.quantization import Fp8Scheme, read_quantization
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.store.output import write_manifest
from converters.verify import verify
from tests.doors import convert
from tests.fp8_folders import E4M3, dequantize, is_quantized, quantize, read_folder, save, write_fp8
from tests.models.dense import write as write_tiny
from tests.models.qwen3_moe import write as write_experts
from tests.unit.converters.samples import assert_same
from titan_tools.infer.identity import origin_of

SHAPES = {"hidden_size": 192, "intermediate_size": 576, "moe_intermediate_size": 129, "num_attention_heads": 8}
GATE = "model.layers.1.mlp.experts.10.gate_proj.weight"
SCHEMES = ["fp8", "fp8:ue8m0"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Qwen 3 MoE in bfloat16: 576 and 129 rows, 192 columns."""
    folder = tmp_path_factory.mktemp("fp8") / "bf16"
    write_experts(folder, dtype="bfloat16", **SHAPES)
    return folder


@pytest.fixture(scope="module")
def native(plain):
    convert(plain, plain.parent / "dcp", to="dcp")
    return plain.parent / "dcp"


def out(src, dst, how="fp8", *, scales_from=None, **options):
    output = {key: options.pop(key) for key in ("shard_bytes", "fused_experts") if key in options}
    return convert(src, dst, to="hf", options=OutputOptions(quantize=how, scales_from=scales_from, **output), **options)


def expected_from(folder, how):
    """By the formula, from values in the dtype that they are stored in."""
    made = {}
    for name, tensor in read_folder(folder).items():
        made[name] = tensor
        if is_quantized(name):
            made[name], made[f"{name}_scale_inv"] = quantize(tensor, ue8m0=how.endswith("ue8m0"))
    return made


@pytest.mark.parametrize(("how", "workers"), [("fp8", 1), ("fp8:ue8m0", 3)])
def test_codes_and_scales_are_the_formulas(plain, native, tmp_path, how, workers):
    report = out(native, tmp_path / "fp8", how, workers=workers, shard_bytes=1 << 20)
    assert_same(read_folder(tmp_path / "fp8"), expected_from(plain, how))
    assert report.num_scales == 494 and report.moved_scales is None and report.num_files == 5
    total = sum(tensor.nbytes for tensor in read_folder(tmp_path / "fp8").values())
    assert json.loads((tmp_path / "fp8/model.safetensors.index.json").read_text())["metadata"]["total_size"] == total
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    stays = ("lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.3.mlp.gate")
    assert read_quantization(config) == Fp8Scheme(power_of_two=how.endswith("ue8m0"), stays=stays)
    assert config["dtype"] == "bfloat16" and not any("dtype" in remark for remark in report.remarks)
    assert all(check.outcome == "ok" for check in verify(tmp_path / "fp8").checks)
    assert inspect_checkpoint(tmp_path / "fp8").quantization["num_weights"] == 127


@pytest.mark.parametrize("name", ["llama3_tied", "qwen3"])
def test_from_float32_values_and_other_families(tmp_path, name):
    """What stays is cast, what is quantized is not: rows of heads in the order of Hugging Face."""
    write_tiny(tmp_path / "f32", name)
    convert(tmp_path / "f32", tmp_path / "dcp", to="dcp")
    out(tmp_path / "dcp", tmp_path / "fp8", dtype="bf16")
    expected = expected_from(tmp_path / "f32", "fp8")
    stays = {n: t.bfloat16() for n, t in expected.items() if n in read_folder(tmp_path / "f32") and t.dtype != E4M3}
    assert_same(read_folder(tmp_path / "fp8"), expected | stays)
    scheme = read_quantization(json.loads((tmp_path / "fp8/config.json").read_text()))
    assert scheme is not None and scheme.stays == ("lm_head",)


@pytest.mark.parametrize(("how", "scale_dtype"), [("fp8", torch.float32), ("fp8:ue8m0", torch.bfloat16)], ids=str)
def test_kept_scales_give_the_same_bytes(plain, tmp_path, how, scale_dtype):
    """fp8 → bf16 DCP → fp8, with scales that no formula of ours gives: larger than needed."""
    published = write_fp8(tmp_path / "a", plain, ue8m0=how.endswith("ue8m0"), files=2)
    held = read_folder(published)
    for name in held:
        if name.endswith("_scale_inv"):
            held[name] = (held[name] * (2.0 if how.endswith("ue8m0") else 1.1)).to(scale_dtype)
    config = json.loads((published / "config.json").read_text())["quantization_config"]
    published = save(tmp_path / "b", held, plain, config, files=2)
    convert(published, tmp_path / "dcp", to="dcp")
    report = out(tmp_path / "dcp", tmp_path / "fp8", how, scales_from=published)
    assert_same(read_folder(tmp_path / "fp8"), held)
    assert report.moved_scales == 0 and report.scales_of == str(published)
    digests = read_manifest(tmp_path / "dcp").tensors, read_manifest(tmp_path / "fp8").tensors
    names = "layers.0.attention.wq.weight", "model.layers.0.self_attn.q_proj.weight"
    assert digests[0][names[0]].digest == digests[1][names[1]].digest
    assert digests[1][names[1]].digest_dtype == "bfloat16"


@pytest.mark.parametrize("how", [pytest.param("fp8", marks=pytest.mark.slow), "fp8:ue8m0"])
def test_the_second_generation_is_the_same_bytes(plain, tmp_path, how):
    published = write_fp8(tmp_path / "published", plain, ue8m0=how.endswith("ue8m0"))
    held = read_folder(published)
    for name in held:
        if name.endswith("_scale_inv"):
            held[name] = held[name] * (2.0 if how.endswith("ue8m0") else 1.1)
    config = json.loads((published / "config.json").read_text())["quantization_config"]
    source, folders, moved = save(tmp_path / "0", held, plain, config), [], []
    for number in (1, 2, 3):
        report = out(source, tmp_path / str(number), how)
        source = tmp_path / str(number)
        folders.append(read_folder(source))
        moved.append(report.moved_scales)
    # Scales of 1.1 times what is needed all move; of two, those whose largest code rounds to a power of two halve
    assert moved[1:] == [0, 0] and moved[0] > (400 if how == "fp8" else 10)
    assert_same(folders[1], folders[0])
    assert_same(folders[2], folders[0])
    if how == "fp8:ue8m0":  # then the codes double: the values stay
        for name in (name for name, tensor in held.items() if tensor.dtype == E4M3):
            values = [dequantize(each[name], each[f"{name}_scale_inv"]) for each in (held, folders[0])]
            assert torch.equal(*values)


def test_values_that_outgrow_a_kept_scale_get_a_new_one(plain, tmp_path):
    published = write_fp8(tmp_path / "published", plain)
    convert(published, tmp_path / "values", to="hf")
    held = read_folder(tmp_path / "values")
    held[GATE][128, 130] = 100.0  # in the last block
    held[GATE][0, 0] /= 4
    tuned = save(tmp_path / "tuned", held, tmp_path / "values", None)
    report = out(tuned, tmp_path / "fp8", scales_from=published)
    before, after = read_folder(published), read_folder(tmp_path / "fp8")
    scales = f"{GATE}_scale_inv"
    assert report.moved_scales == 1 and (after[scales] != before[scales]).nonzero().tolist() == [[1, 1]]
    assert dequantize(after[GATE], after[scales])[128, 130] == 100.0
    del before[GATE], before[scales], after[GATE], after[scales]
    assert_same(after, before)


@pytest.mark.parametrize("how", ["fp8", pytest.param("fp8:ue8m0", marks=pytest.mark.slow)])
def test_known_scales_that_are_far_too_large_are_not_kept(plain, tmp_path, how):
    """One block's, and all: most codes would be zero. Up to twice the formula's they are kept."""
    published = write_fp8(tmp_path / "published", plain, ue8m0=how.endswith("ue8m0"))
    convert(published, tmp_path / "dcp", to="dcp")
    held, config = read_folder(published), json.loads((published / "config.json").read_text())["quantization_config"]
    names = [name for name in held if name.endswith("_scale_inv")]
    for name in names:
        held[name] *= 2.0**16
    wrong = save(tmp_path / "wrong", held, plain, config)
    report = out(tmp_path / "dcp", tmp_path / "all", how, scales_from=wrong)
    assert report.moved_scales == report.num_scales == 494
    found, values = read_folder(tmp_path / "all"), read_folder(published)
    for name in (name.removesuffix("_scale_inv") for name in names):
        expected = dequantize(values[name], values[f"{name}_scale_inv"])
        assert torch.equal(dequantize(found[name], found[f"{name}_scale_inv"]), expected)
    held, scales = read_folder(published), f"{GATE}_scale_inv"
    held[scales][1, 0] *= 2.0**16
    wrong = save(tmp_path / "one", held, plain, config)
    report = out(tmp_path / "dcp", tmp_path / "moved", how, scales_from=wrong)
    moved = (read_folder(tmp_path / "moved")[scales] != held[scales]).nonzero().tolist()
    assert report.moved_scales == 1 and moved == [[1, 0]]
    # values that no scale gives back, as after training: a published scale may be twice the formula's
    tuned = save(tmp_path / "tuned", {n: t * 0.6 for n, t in read_folder(plain).items()}, plain, None)
    assert out(tuned, tmp_path / "kept", how, scales_from=published).moved_scales == 0


def test_a_kept_scale_that_is_no_power_of_two_is_replaced_where_the_config_says_they_are(plain, tmp_path):
    """Readers of `scale_fmt: ue8m0` may keep the exponent alone."""
    published = write_fp8(tmp_path / "published", plain, ue8m0=True)
    held = read_folder(published)
    config = json.loads((published / "config.json").read_text())["quantization_config"]
    scales = f"{GATE}_scale_inv"
    held[scales][1, 0] *= 1.5
    wrong = save(tmp_path / "wrong", held, plain, config)
    convert(wrong, tmp_path / "dcp", to="dcp")
    report = out(tmp_path / "dcp", tmp_path / "fp8", "fp8:ue8m0", scales_from=wrong)
    found = read_folder(tmp_path / "fp8")
    assert report.moved_scales == 1 and (found[scales] != held[scales]).nonzero().tolist() == [[1, 0]]
    assert torch.frexp(found[scales]).mantissa.unique().tolist() == [0.5]


def test_transformers_dequantizes_it_to_the_same_logits(tmp_path):
    """Where no block is partial: transformers cannot read those. Its own module, because loading needs accelerate."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    write_tiny(tmp_path / "bf16", "qwen3", dtype=torch.bfloat16, numbers=WHOLE_BLOCKS)
    out(tmp_path / "bf16", tmp_path / "fp8")
    held, read = read_folder(tmp_path / "fp8"), Fp8Dequantize(None)
    theirs = {n: t for n, t in held.items() if not n.endswith("_scale_inv")}
    for name in [name for name, tensor in theirs.items() if tensor.dtype == E4M3]:
        inputs = {"weight": theirs[name], "weight_scale_inv": held[f"{name}_scale_inv"]}
        theirs[name] = read.convert(inputs)["weight"].bfloat16()
    save(tmp_path / "theirs", theirs, tmp_path / "bf16", None)
    convert(tmp_path / "fp8", tmp_path / "ours", to="hf")
    tokens = torch.arange(24)[None] * 7 % 97
    with torch.no_grad():
        ours, other, before = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)(tokens).logits.float()
            for name in ("ours", "theirs", "bf16")
        )
    assert torch.equal(ours, other)
    assert not torch.equal(ours, before)
    assert (ours - before).norm() < 0.2 * before.norm()


def test_the_dtype_that_config_json_gets_is_the_one_that_is_reported(plain, tmp_path):
    """It is that of what stays: of values in bfloat16 and norms, embedding and output in float32, the second."""
    published = write_fp8(tmp_path / "fp8", plain)
    held = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in read_folder(published).items()}
    config = json.loads((published / "config.json").read_text())
    mixed = save(tmp_path / "mixed", held, plain, config["quantization_config"])
    (mixed / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    remark = next(each for each in out(mixed, tmp_path / "out").remarks if "the output says" in each)
    assert remark == "config.json says dtype float16, the weights are bfloat16: the output says float32"
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"


WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}


def test_values_that_are_not_finite_are_refused_with_all_offenders(plain, tmp_path):
    held = read_folder(plain)
    held[GATE][3, 3], held[GATE][4, 4] = float("nan"), float("inf")
    held["model.norm.weight"][0] = float("inf")
    src = save(tmp_path / "src", held, plain, None)
    with pytest.raises(CheckpointError, match="NaN or infinite") as caught:
        out(src, tmp_path / "fp8")
    assert f"{GATE}: 2 values" in caught.value.message and "model.norm.weight: 1 value" in caught.value.message
    assert not (tmp_path / "fp8").exists()
    with pytest.raises(ConfigError, match="cannot be quantized"):
        out(src, tmp_path / "fp8", allow_nonfinite=True)


def test_what_cannot_be_asked_for(plain, native, tmp_path):
    fp8 = write_fp8(tmp_path / "fp8", plain)
    refused = {
        "is not supported by": lambda: convert(plain, tmp_path / "x", to="dcp", options=OutputOptions(quantize="fp8")),
        "unknown quantization": lambda: out(native, tmp_path / "x", "int4"),
        "--scales-from needs --quantize": lambda: convert(
            native, tmp_path / "x", to="hf", options=OutputOptions(scales_from=fp8)
        ),
        "its weights are not quantized": lambda: out(native, tmp_path / "x", scales_from=plain),
        "cannot be combined": lambda: out(native, tmp_path / "x", fused_experts=True),
        "has fp8": lambda: out(native, tmp_path / "x", "fp8:ue8m0", scales_from=fp8),
    }
    for text, ask in refused.items():
        with pytest.raises(TitanError, match=text):
            ask()
    write_tiny(tmp_path / "other", "qwen3")
    write_fp8(tmp_path / "other_fp8", tmp_path / "other")
    with pytest.raises(ConfigError, match="another model") as caught:
        out(native, tmp_path / "x", scales_from=tmp_path / "other_fp8")
    assert "num_experts" in caught.value.message
    assert not (tmp_path / "x").exists()


def test_a_resumed_run_writes_the_same_bytes(native, tmp_path, monkeypatch):
    """Codes and scales of a unit are journaled together."""
    out(native, tmp_path / "expected", shard_bytes=1 << 20)
    calls, encode = [], Fp8Encoder.encode

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 70:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(Fp8Encoder, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out(native, tmp_path / "x", shard_bytes=1 << 20, resume=True, workers=1)
    report = out(native, tmp_path / "x", shard_bytes=1 << 20, resume=True, workers=1)
    assert report.resumed_bytes > 100_000 and len(calls) == 70 + 127 - 69
    for path in sorted((tmp_path / "expected").iterdir()):
        assert (tmp_path / "x" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_changed_folder_is_accepted_with_digests_of_its_values(native, tmp_path):
    out(native, tmp_path / "fp8")
    before = read_manifest(tmp_path / "fp8").tensors
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    (tmp_path / "fp8/config.json").write_text(json.dumps(config | {"my_key": 1}))
    assert not verify(tmp_path / "fp8").ok
    assert verify(tmp_path / "fp8", accept=True).ok
    assert read_manifest(tmp_path / "fp8").tensors == before
    assert verify(tmp_path / "fp8").ok
    del config["quantization_config"]
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    assert not verify(tmp_path / "fp8", accept=True).ok  # codes without their scales


def test_its_identity_is_that_of_its_values(native, tmp_path):
    """For inference on several machines: some may read the fp8 folder, others the DCP that was made from it."""
    out(native, tmp_path / "fp8")
    convert(tmp_path / "fp8", tmp_path / "dcp", to="dcp")
    (tmp_path / "empty").mkdir()
    found = []
    for folder in (tmp_path / "fp8", tmp_path / "dcp", native):
        with open_native(folder) as weights:
            found.append(origin_of(weights, tokenizer=tmp_path / "empty").weights)
    assert found[0] == found[1] != found[2]


def test_damage_is_found_before_an_fp8_output_of_titan_is_converted(native, tmp_path):
    out(native, tmp_path / "fp8")
    convert(tmp_path / "fp8", tmp_path / "a", to="dcp", dtype="float32")  # digests are of bfloat16: files are compared
    path = tmp_path / "fp8/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1  # a code of the last weights
    path.write_bytes(data)
    for dtype in (None, "float32"):
        with pytest.raises(CheckpointError, match="changed or damaged"):
            convert(tmp_path / "fp8", tmp_path / "b", to="dcp", dtype=dtype)
    failed = [check for check in verify(tmp_path / "fp8").checks if check.outcome == "failed"]
    assert [check.name for check in failed] == ["files", "values"] and "digest" in failed[1].problems[0]


def test_a_dry_run_plans_codes_and_scales(native, tmp_path):
    report = out(native, tmp_path / "x", dry_run=True)
    assert report.num_tensors == 276 and report.num_scales == 494 and not (tmp_path / "x").exists()
    done = out(native, tmp_path / "y")
    assert (report.num_bytes, report.dtypes) == (done.num_bytes, done.dtypes)


@pytest.mark.parametrize("kept", [True, False], ids=["kept scales", "own scales"])
def test_scales_that_change_during_the_copy_are_seen_before_the_output_appears(native, tmp_path, monkeypatch, kept):
    """As late as can be: after every tensor is written."""
    out(native, tmp_path / "fp8")

    def change_and_write(*arguments, **options):
        with (tmp_path / "fp8/model.safetensors").open("ab") as file:
            file.write(b" ")
        return write_manifest(*arguments, **options)

    monkeypatch.setattr("converters.conversion.execute.write_manifest", change_and_write)
    with pytest.raises(CheckpointError, match=r"fp8/model.safetensors: changed while it was being read"):
        out(native if kept else tmp_path / "fp8", tmp_path / "x", scales_from=tmp_path / "fp8" if kept else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8"]


def test_damaged_scales_are_not_kept(native, tmp_path):
    """A kept scale that is twice as large would cost every value of its block a bit."""
    out(native, tmp_path / "fp8")
    path = tmp_path / "fp8/model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header[f"{GATE}_scale_inv"]["data_offsets"][0]
    data[start + 2] ^= 0x80  # the last bit of an exponent
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"changed or damaged") as caught:
        out(native, tmp_path / "x", scales_from=tmp_path / "fp8")
    assert f"{GATE}_scale_inv" in caught.value.message and not (tmp_path / "x").exists()


def test_the_folder_of_the_scales_is_not_replaced(native, tmp_path):
    out(native, tmp_path / "fp8")
    before = (tmp_path / "fp8/model.safetensors").read_bytes()
    for dst in (tmp_path / "fp8", tmp_path / "fp8" / "inside"):
        with pytest.raises(CheckpointError, match=r"is the source itself|one is inside the other"):
            out(native, dst, scales_from=tmp_path / "fp8", overwrite=True)
    assert (tmp_path / "fp8/model.safetensors").read_bytes() == before
