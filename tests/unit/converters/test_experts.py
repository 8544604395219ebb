"""Mixtures of experts on disk, against what transformers writes and holds in memory: every form, every error."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import converters.engine.units as units
from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from converters.diff import diff
from converters.families.registry import get_family, read_hf_config
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint
from converters.model.model_info import read_model_info
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.verify import verify
from tests.doors import convert
from tests.models.names import native_arrays
from tests.models.qwen3_moe import write as write_experts
from titan_tools.infer.identity import origin_of

FUSED = OutputOptions(fused_experts=True)
BIAS = "layers.1.moe.expert_bias"
UP = "model.layers.1.mlp.experts.{e}.up_proj.weight"


@pytest.fixture(scope="module", params=[24, 32], ids=["I != H", "I = H"])
def source(request, tmp_path_factory):
    """The folder that transformers wrote, layer 2 dense, and the model."""
    folder = tmp_path_factory.mktemp("experts") / "hf"
    return folder, write_experts(folder, moe_intermediate_size=request.param)


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """A small folder of one tensor per expert, to be copied and changed; two of its three layers have experts."""
    folder = tmp_path_factory.mktemp("small") / "hf"
    write_experts(folder, num_hidden_layers=3, mlp_only_layers=[0])
    return folder


@pytest.fixture(scope="module")
def dcp(hf) -> Path:
    convert(hf, hf.parent / "dcp", to="dcp")
    return hf.parent / "dcp"


def changed(hf: Path, folder: Path, change) -> Path:
    """A copy of `hf` whose tensors `change` has changed."""
    shutil.copytree(hf, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_bias(dcp: Path, folder: Path, values) -> Path:
    """The model of `dcp` as a torch file in a folder, with one layer's balancing bias."""
    convert(dcp, folder, to="torch")
    state = torch.load(folder / "model.pt")
    state[BIAS] = torch.as_tensor(values)
    (folder / "titan_manifest.json").unlink()
    torch.save(state, folder / "model.pt")
    return folder


@pytest.mark.parametrize("options", [OutputOptions(), FUSED], ids=["per expert", "fused"])
def test_transformers_computes_the_same_from_what_is_written(source, options, tmp_path):
    folder, model = source
    convert(folder, tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "back", to="hf", options=options)
    tokens = torch.arange(40)[None] * 7 % 97
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
        assert torch.equal(ours(tokens).logits, model(tokens).logits)


def test_fused_names_are_those_of_transformers_in_memory(source, tmp_path):
    folder, model = source
    convert(folder, tmp_path / "fused", to="hf", options=FUSED)
    written = load_file(tmp_path / "fused" / "model.safetensors")
    held = {name: weight.numpy() for name, weight in model.state_dict().items()}
    assert written.keys() == held.keys()
    assert all(np.array_equal(written[name], held[name]) for name in held)


def test_the_fused_form_is_read_as_transformers_holds_it(source, tmp_path):
    folder, model = source
    (tmp_path / "src").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "src")
    save_file({n: w.numpy() for n, w in model.state_dict().items()}, tmp_path / "src" / "model.safetensors")
    with open_native(tmp_path / "src") as weights:
        assert weights.naming == "hf_fused"
        for name, array in native_arrays(model).items():
            assert np.array_equal(weights.read(name), array), name


def test_names_of_a_model_in_a_wrapper_are_read(dcp, tmp_path):
    torch.save({f"model.{name}": weight for name, weight in _state(dcp, tmp_path).items()}, tmp_path / "theirs.pt")
    report = convert(tmp_path / "theirs.pt", tmp_path / "out", to="dcp", model_from=dcp)
    assert report.made == {}
    assert diff(tmp_path / "out", dcp).equal


# The ledger


def test_every_wrong_expert_is_named_and_nothing_is_written(hf, tmp_path):
    def change(tensors):
        del tensors[UP.format(e=5)]  # a gap
        tensors[UP.format(e=12)] = tensors[UP.format(e=0)]  # one too many
        tensors[UP.format(e="07")] = tensors[UP.format(e=7)]  # another name of 7
        tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = tensors[UP.format(e=0)]  # of a dense layer
        tensors[UP.format(e=3)] = tensors[UP.format(e=3)].T.copy()
        tensors[UP.format(e=4)] = tensors[UP.format(e=4)].astype(ml_dtypes.bfloat16)
        tensors[UP.format(e=6)] = tensors[UP.format(e=6)].astype(np.int32)

    changed(hf, tmp_path / "src", change)
    for extra in ({}, {"allow_missing": True}):
        with pytest.raises(CheckpointError) as error:
            convert(tmp_path / "src", tmp_path / "out", to="dcp", **extra)
        assert "7 problems" in error.value.message
        part = ": only all parts of layers.1.moe.experts.w3 together may be missing" if extra else ""
        assert sorted(" ".join(line.split()) for line in error.value.message.splitlines()[1:]) == [
            "dtype model.layers.1.mlp.experts.4.up_proj.weight is bfloat16, the others that it is stacked with float32",
            "dtype model.layers.1.mlp.experts.6.up_proj.weight is int32, should be a floating type",
            f"missing model.layers.1.mlp.experts.5.up_proj.weight [24, 32]{part}",
            "shape model.layers.1.mlp.experts.3.up_proj.weight is [32, 24], should be [24, 32]",
            "unexpected model.layers.0.mlp.experts.0.up_proj.weight",
            "unexpected model.layers.1.mlp.experts.07.up_proj.weight",
            "unexpected model.layers.1.mlp.experts.12.up_proj.weight",
        ]
    assert not (tmp_path / "out").exists()


def test_experts_in_two_forms_are_one_too_many(hf, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.experts.down_proj"] = np.zeros((12, 32, 24), np.float32)

    with pytest.raises(CheckpointError, match=r"unexpected  model.layers.1.mlp.experts.down_proj") as error:
        convert(changed(hf, tmp_path / "src", change), tmp_path / "out", to="dcp")
    assert "those of 'hf_fused'" in error.value.hint


def test_a_layer_without_experts_is_missing_them_all(hf, tmp_path):
    """Folded, so that all of them fit on a page; with --allow-missing the whole stack is left out."""

    def change(tensors):
        for name in [name for name in tensors if "layers.2.mlp.experts" in name]:
            del tensors[name]

    changed(hf, tmp_path / "src", change)
    with pytest.raises(CheckpointError, match="36 problems") as error:
        convert(tmp_path / "src", tmp_path / "out", to="dcp")
    assert "missing     model.layers.2.mlp.experts.{0..11}.gate_proj.weight  [24, 32]" in error.value.message
    report = convert(tmp_path / "src", tmp_path / "out", to="dcp", allow_missing=True)
    assert len(report.missing) == 36
    assert not any("layers.2.moe.experts" in name for name in read_manifest(tmp_path / "out").tensors)


def test_half_of_a_fused_tensor_cannot_be_written(dcp, tmp_path):
    state = {name: tensor for name, tensor in _state(dcp, tmp_path).items() if name != "layers.1.moe.experts.w3"}
    torch.save(state, tmp_path / "half.pt")
    with pytest.raises(CheckpointError, match=r"gate_up_proj: layers.1.moe.experts.w1 without layers.1.moe.experts.w3"):
        convert(tmp_path / "half.pt", tmp_path / "out", to="hf", options=FUSED, model_from=dcp, allow_missing=True)


def _state(dcp: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    convert(dcp, tmp_path / "state", to="torch")
    return torch.load(tmp_path / "state" / "model.pt")


# The balancing bias


def test_zeros_come_and_go_with_a_reason(hf, dcp, tmp_path):
    report = convert(hf, tmp_path / "dcp", to="dcp", dtype="bf16")
    assert set(report.made) == {BIAS, "layers.2.moe.expert_bias"}
    assert "no such offset" in report.made[BIAS] and report.dropped == {}
    assert set(report.kept_float32) == set(report.made)
    assert read_manifest(tmp_path / "dcp").tensors[BIAS].dtype == "float32"
    back = convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    assert set(back.dropped) == set(report.made) and back.dropped[BIAS].startswith("zero; ")
    direct = convert(hf, tmp_path / "direct", to="hf")
    assert direct.dropped == direct.made == {}


@pytest.mark.parametrize("value", [1e-30, float("nan"), -1.0])
def test_values_that_are_not_zero_are_not_dropped(dcp, value, tmp_path):
    values = np.zeros(12, np.float32)
    values[11] = value
    folder = with_bias(dcp, tmp_path / "src", values)
    for dry_run in (True, False):
        with pytest.raises(CheckpointError, match=rf"not zero:\n  {BIAS}$") as error:
            convert(folder, tmp_path / "out", to="hf", dry_run=dry_run)
        assert error.value.tries == ("--drop-expert-bias",) and "--to dcp" in error.value.hint
    assert not (tmp_path / "out").exists()
    report = convert(folder, tmp_path / "out", to="hf", options=OutputOptions(drop_expert_bias=True))
    assert "not zero" in report.dropped[BIAS] and report.dropped["layers.2.moe.expert_bias"].startswith("zero")
    convert(folder, tmp_path / "dcp", to="dcp", dtype="bfloat16", allow_nonfinite=True)
    with open_native(tmp_path / "dcp") as weights:
        assert np.array_equal(weights.read(BIAS), values, equal_nan=True)


def test_a_native_source_may_lack_the_bias_in_all_layers_but_not_in_some(dcp, tmp_path):
    state = _state(dcp, tmp_path)
    none = {name: tensor for name, tensor in state.items() if "expert_bias" not in name}
    torch.save(none, tmp_path / "none.pt")
    report = convert(tmp_path / "none.pt", tmp_path / "out", to="dcp", model_from=dcp)
    assert set(report.made) == {BIAS, "layers.2.moe.expert_bias"} and diff(tmp_path / "out", dcp).equal
    torch.save(none | {BIAS: state[BIAS]}, tmp_path / "some.pt")
    with pytest.raises(CheckpointError, match=r"missing     layers.2.moe.expert_bias  \[12\]"):
        convert(tmp_path / "some.pt", tmp_path / "other", to="dcp", model_from=dcp)


@pytest.mark.parametrize(
    ("options", "said"),
    [(FUSED, "this model has no experts"), (OutputOptions(drop_expert_bias=True), "drops none")],
)
def test_options_of_experts_are_refused_for_dense_models(options, said, tmp_path):
    folder = tmp_path / "dense"
    write_experts(folder, num_hidden_layers=2, mlp_only_layers=[0, 1])
    with pytest.raises(ConfigError, match=said):
        convert(folder, tmp_path / "out", to="hf", options=options)
    with pytest.raises(ConfigError, match="is not supported by a DCP checkpoint"):
        convert(folder, tmp_path / "out", to="dcp", options=options)


# Digests


def test_digests_of_both_forms_agree(hf, dcp, tmp_path):
    convert(dcp, tmp_path / "hf", to="hf")
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "hf", tmp_path / "fused", to="hf", options=FUSED)
    convert(tmp_path / "fused", tmp_path / "again", to="dcp")
    assert read_manifest(tmp_path / "dcp").tensors == read_manifest(dcp).tensors
    assert read_manifest(tmp_path / "again").tensors == read_manifest(dcp).tensors
    identities = []
    for folder in ("hf", "fused", "dcp"):
        with open_native(tmp_path / folder) as weights:
            identities.append(origin_of(weights, tokenizer=tmp_path).weights)
    assert len(set(identities)) == 1 and identities[0].startswith("digests ")


@pytest.mark.parametrize("form", ["per expert", "fused", "stacked"])
def test_a_flipped_bit_is_found_while_copying(dcp, form, tmp_path):
    """The manifest's digests are compared in the other form; what belongs together is named."""
    src, to = tmp_path / "src", "hf" if form == "stacked" else "dcp"
    if form == "stacked":
        shutil.copytree(dcp, src)
        (file,) = src.glob("*.distcp")
        name, stored = "layers.1.moe.experts.w3", "layers.1.moe.experts.w3"
    else:
        convert(dcp, src, to="hf", options=FUSED if form == "fused" else OutputOptions())
        file = src / "model.safetensors"
        name = "model.layers.1.mlp.experts." + ("gate_up_proj" if form == "fused" else "7.up_proj.weight")
        stored = name if form == "fused" else "model.layers.1.mlp.experts.{0..11}.up_proj.weight"
    place = _place_of(src, name)
    raw = bytearray(file.read_bytes())
    raw[place + 40] ^= 1
    file.write_bytes(raw)
    said = "model.safetensors" if form == "fused" else "values are not those that titan_manifest.json lists"
    with pytest.raises(CheckpointError, match=said) as error:
        convert(src, tmp_path / "out", to=to)
    assert form == "fused" or f"\n  {stored}: " in error.value.message
    assert not (tmp_path / "out").exists()
    assert f"{name}: its values have changed (digest)" in str(verify(src).checks)


@pytest.mark.parametrize("form", ["fused", "torch"])
def test_gate_and_up_exchanged_in_a_file_with_a_manifest_are_found(dcp, form, tmp_path):
    src = tmp_path / "src"
    if form == "fused":
        convert(dcp, src, to="hf", options=FUSED)
        name, file = "model.layers.1.mlp.experts.gate_up_proj", src / "model.safetensors"
        _, rows, columns = read_manifest(src).tensors[name].shape
        num_bytes = 4 * rows // 2 * columns
        places = [_place_of(src, name), _place_of(src, name) + num_bytes]
    else:
        convert(dcp, src, to="torch")
        name = "layers.1.moe.experts.w1"
        num_bytes = 4 * prod(read_manifest(src).tensors[name].shape)
        (file,) = src.glob("*.pt*")
        places = [_place_of(src, f"layers.1.moe.experts.{w}") for w in ("w1", "w3")]
    raw = bytearray(file.read_bytes())
    gate, up = (bytes(raw[place : place + num_bytes]) for place in places)
    for place, values in zip(places, (up, gate), strict=True):
        raw[place : place + num_bytes] = values
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=file.name):
        convert(
            src,
            tmp_path / "out",
            to="dcp" if form == "fused" else "hf",
            options=OutputOptions() if form == "fused" else FUSED,
        )
    assert f"{name}: its values have changed (digest)" in str(verify(src).checks)


def _place_of(folder: Path, name: str) -> int:
    from converters.engine.read import CatalogReader
    from converters.source.open import open_checkpoint

    catalog = open_checkpoint(folder)
    with CatalogReader(catalog) as reader:
        return reader.located(name, catalog.tensors[name].chunks[0]).byte_offset


# What describes the model


@pytest.mark.parametrize(
    "numbers",
    [
        {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"norm_topk_prob": False, "num_experts_per_tok": 12},
        {"router_aux_loss_coef": 0.25, "output_router_logits": True},
        {"tie_word_embeddings": True, "num_experts": 1, "num_experts_per_tok": 1},
    ],
)
def test_config_there_and_back(numbers, tmp_path):
    model = write_experts(tmp_path / "hf", **numbers)
    report = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    assert not any("config.json: changed" in remark for remark in report.remarks)
    convert(tmp_path / "dcp", tmp_path / "back", to="hf")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    # transformers 5 names num_experts anew, version 4 and vLLM do not
    assert written["num_experts"] == model.config.num_experts and "num_local_experts" not in written
    ours, theirs = (type(model.config).from_pretrained(tmp_path / place).to_dict() for place in ("back", "hf"))
    assert {key: ours[key] for key in theirs} == theirs
    assert ours.keys() - theirs.keys() <= {"max_window_layers", "rope_theta", "rope_scaling", "torch_dtype"}
    assert read_model_info(tmp_path / "back").args == read_model_info(tmp_path / "hf").args


MOE = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [2]}
WRONG = {
    "num_experts": (0, -1, "12", True, 1.5, 10**9),
    "num_local_experts": (13, 0, "12"),
    "num_experts_per_tok": (0, 13, "3", 2.5),
    "moe_intermediate_size": (0, -4, "24"),
    "norm_topk_prob": (1, "true"),
    "decoder_sparse_step": (0, -1, "2", 1.5),
    "mlp_only_layers": (2, ["1"], [-1], [4], [1.5], [True], {"1": 1}, "12"),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_numbers_of_experts_that_cannot_be(hf, key, value, tmp_path):
    config = json.loads((hf / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises((CheckpointError, UnsupportedError), match=r"config.json"):
        read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dense_layers", 0), ("dense_layers", ["0"]), ("dense_layers", [3]), ("sparse_step", 0), ("num_experts", -1),
        ("experts_per_token", 13), ("expert_hidden", 1.5), ("normalize_weights", 1), ("balance_rate", "x"),
        ("num_experts", 65_536),
    ],
)  # fmt: skip
def test_wrong_numbers_in_titans_own_file(dcp, key, value, tmp_path):
    content = json.loads((dcp / "titan_model.json").read_text())
    content["args"] |= {key: value}
    if value == 65_536:
        content["args"] |= {"num_layers": 1000, "dense_layers": []}
    (tmp_path / "titan_model.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"titan_model.json does not describe a model"):
        read_model_info(tmp_path)


def test_a_number_of_experts_under_either_name():
    family = get_family("qwen3")
    config = family.hf_config(family.flavors["30B-A3B"])
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in config.items()}
    assert read_hf_config(config) == read_hf_config(renamed) == (family, family.flavors["30B-A3B"])
    unstated = {key: value for key, value in config.items() if key != "norm_topk_prob"}
    assert read_hf_config(unstated)[1] == replace(family.flavors["30B-A3B"], normalize_weights=False)  # as the class


# inspect, diff


@pytest.mark.parametrize("form", ["hf", "fused", "dcp"])
def test_inspect_folds_experts_and_names_them(hf, dcp, form, tmp_path):
    place = {"hf": hf, "dcp": dcp}.get(form, tmp_path / "fused")
    if form == "fused":
        convert(dcp, place, to="hf", options=FUSED)
    found = inspect_checkpoint(place)
    assert found.naming == {"hf": "hf", "fused": "hf_fused", "dcp": "native"}[form]
    assert "12 experts of 24 (3 per token) in 2 of 3 layers" in found.parts
    assert found.model["num_experts"] == 12 and found.model["dense_layers"] == (0,)
    lines = {line.name: (line.num_tensors, line.shape) for line in found.lines}
    if form == "hf":
        assert lines["model.layers.{1..2}.mlp.experts.{0..11}.gate_proj.weight"] == (24, (24, 32))
    if form == "dcp":
        assert lines["layers.{1..2}.moe.experts.w1"] == (2, (12, 24, 32))


def test_diff_names_the_expert(hf, dcp, tmp_path):
    def change(tensors):
        for e in (2, 10, 11):
            tensors[UP.format(e=e)][3, 4] += 1

    (found,) = diff(changed(hf, tmp_path / "src", change), dcp).differences
    assert found.name == "layers.1.moe.experts.w3"
    assert "3 of 9,216 values differ, first at [2, 3, 4]; in experts 2,10..11" in found.detail


def test_diff_explains_what_was_mixed_up(hf, dcp, tmp_path):
    def by_text(tensors):
        order = sorted(range(12), key=str)
        old = dict(tensors)
        for e in range(12):
            tensors[UP.format(e=e)] = old[UP.format(e=order[e])]

    def swapped(tensors):
        for e in range(12):
            gate, up = UP.format(e=e).replace("up_proj", "gate_proj"), UP.format(e=e)
            tensors[gate], tensors[up] = tensors[up], tensors[gate]

    (found,) = diff(changed(hf, tmp_path / "text", by_text), dcp).differences
    assert "in the order of text" in found.detail
    one, other = diff(changed(hf, tmp_path / "swapped", swapped), dcp).differences
    assert "equal to layers.1.moe.experts.w3: gate and up are swapped" in one.detail
    assert "equal to layers.1.moe.experts.w1: gate and up are swapped" in other.detail


# An interrupted run


@pytest.mark.parametrize("form", ["stack", "unstack", "fuse"])
def test_an_interrupted_run_goes_on_where_it_ended(hf, dcp, form, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(units, "UNIT_BYTES", 4096)
    src, to, options = {
        "stack": (hf, "dcp", OutputOptions()),
        "unstack": (dcp, "hf", OutputOptions()),
        "fuse": (dcp, "hf", FUSED),
    }[form]
    convert(src, tmp_path / "whole", to=to, options=options)
    advanced = []

    @contextmanager
    def stopping(total, what):
        def advance(num_bytes):
            advanced.append(num_bytes)
            if sum(advanced) > total / 2:
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "out", to=to, options=options, resume=True, progress=stopping)
    report = convert(src, tmp_path / "out", to=to, options=options, resume=True)
    assert report.resumed_bytes > report.num_bytes / 4
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()


def test_verify_accept_of_a_folder_of_experts(dcp, tmp_path):
    convert(dcp, tmp_path / "hf", to="hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors[UP.format(e=10)] = tensors[UP.format(e=10)] + 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert not verify(tmp_path / "hf").ok
    report = verify(tmp_path / "hf", accept=True)
    assert report.ok and list(report.changes.tensors) == [UP.format(e=10)]
    assert verify(tmp_path / "hf").verdict == "all checks passed"
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")  # its digests still add up to those of stacks


def test_a_number_that_only_training_uses_is_no_contradiction(hf, dcp, tmp_path):
    shutil.copytree(dcp, tmp_path / "dcp")
    content = json.loads((tmp_path / "dcp" / "titan_model.json").read_text())
    content["args"]["balance_rate"] = 0.01
    (tmp_path / "dcp" / "titan_model.json").write_text(json.dumps(content))
    (tmp_path / "dcp" / "titan_manifest.json").unlink()
    assert diff(tmp_path / "dcp", hf).equal
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf", model_from=hf)
    convert(tmp_path / "dcp", tmp_path / "torch", to="torch")
    assert read_model_info(tmp_path / "torch").args.balance_rate == 0.01
