"""Models with experts of every family in every form that titan writes: native values, there and back, other names."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from converters.common.errors import UnsupportedError
from converters.diff import diff
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert
from tests.models import deepseek, gpt_oss, llama4, qwen3_moe
from tests.models.names import native_arrays

# Vocabularies that two tensor-parallel ranks divide
MODELS = {
    "qwen3 I != H": partial(qwen3_moe.write, vocab_size=98),
    "qwen3 I = H": partial(qwen3_moe.write, vocab_size=98, moe_intermediate_size=32),
    "deepseek_v3 v3": partial(deepseek.write, name="v3", vocab_size=98),  # and others in families/test_deepseek.py
    "deepseek_v3 v2_lite": partial(deepseek.write, name="v2_lite", vocab_size=98),
    **{f"llama4 {name}": partial(llama4.write, name=name) for name in llama4.NUMBERS},
    "gpt_oss": partial(gpt_oss.write, vocab_size=98),
}
EVERY = ("qwen3", "deepseek_v3", "llama4", "gpt_oss")
FORMS = {  # form → target, options, and the families that have it
    "dcp": ("dcp", OutputOptions(), EVERY),
    "dcp for a mesh": ("dcp", OutputOptions(mesh=MeshShape(pp=2, dp_shard=5)), EVERY),  # 12 experts on 5 ranks
    "dcp for experts": ("dcp", OutputOptions(mesh=MeshShape(dp_shard=4, tp=2, ep=4)), EVERY),
    "torch": ("torch", OutputOptions(), EVERY),
    "hf": ("hf", OutputOptions(shard_bytes=60_000), EVERY),
    "hf fused": ("hf", OutputOptions(fused_experts=True), ("qwen3", "deepseek_v3")),
    "meta": ("meta", OutputOptions(), ("llama4",)),
    "meta, 2 shards": ("meta", OutputOptions(num_shards=2), ("llama4",)),
    "meta, 4 shards": ("meta", OutputOptions(num_shards=4), ("llama4",)),
}
CALLED = {"meta": "Meta's format", "torchtune": "torchtune 0.6.1"}
QKV = {f"attention.w{x}": f"attention.qkv_linear.w{x}" for x in "qkv"}
EXPERTS = {
    "moe.experts.w1": "moe.routed_experts.inner_experts.w1_EFD",
    "moe.experts.w2": "moe.routed_experts.inner_experts.w2_EDF",
    "moe.experts.w3": "moe.routed_experts.inner_experts.w3_EFD",
    "moe.expert_bias": "moe.expert_bias_E",
}
NEWEST = {  # torchtitan's newest names of each family's weights; the output's is lm_head
    "qwen3": QKV | EXPERTS,
    "deepseek_v3": EXPERTS,
    "llama4": QKV,
    "gpt_oss": QKV
    | {"moe.expert_bias": "moe.expert_bias_E"}
    | {
        f"moe.experts.{ours}": f"moe.routed_experts.inner_experts.{ours}_{letters}"
        for ours, letters in {"mlp1_weight": "EGD", "mlp1_bias": "EG", "mlp2_weight": "EDF", "mlp2_bias": "ED"}.items()
    },
}


def family_of(model: str) -> str:
    return model.partition(" ")[0]


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    """(family, model, root): root/hf, a folder that transformers wrote, and root/dcp."""
    root = tmp_path_factory.mktemp("source")
    model = MODELS[request.param](root / "hf")
    convert(root / "hf", root / "dcp", to="dcp")
    return family_of(request.param), model, root


def stored(folder):
    """Every tensor of an HF folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert [n for n, t in tensors.items() if t.dtype != expected[n].dtype or not torch.equal(t, expected[n])] == []


def test_native_values_are_those_that_transformers_holds(source):
    _, model, root = source
    expected = native_arrays(model)
    for form in ("hf", "dcp"):
        with open_native(root / form) as weights:
            assert weights.tensors.keys() == expected.keys()
            for fqn, array in expected.items():
                assert np.array_equal(weights.read(fqn).astype(np.float32), array), fqn
                assert weights.tensors[fqn].dtype == "float32" or not fqn.endswith("expert_bias")


@pytest.mark.parametrize(
    ("source", "form"),
    [(model, form) for model in MODELS for form in FORMS if family_of(model) in FORMS[form][2]],
    indirect=["source"],
)
def test_there_and_back(source, form, tmp_path):
    _, _, root = source
    to, options, _ = FORMS[form]
    convert(root / "hf", tmp_path / "out", to=to, options=options)
    assert verify(tmp_path / "out").verdict == "all checks passed" and diff(tmp_path / "out", root / "dcp").equal
    convert(tmp_path / "out", tmp_path / "hf", to="hf")
    assert_equal(stored(tmp_path / "hf"), stored(root / "hf"))


def test_torchtitans_newest_names_are_read(source, tmp_path):
    family, _, root = source
    convert(root / "dcp", tmp_path / "native", to="torch")
    newest = {}
    for name, weight in torch.load(tmp_path / "native" / "model.pt").items():
        for ours, theirs in NEWEST[family].items():
            name = name.replace(ours, theirs) if f".{ours}." in f"{name}." else name
        newest["lm_head.weight" if name == "output.weight" else name] = weight
    assert family == "llama4" or not any(name.endswith(("experts.w1", "experts.mlp1_weight")) for name in newest)
    torch.save(newest, tmp_path / "theirs.pt")
    report = convert(tmp_path / "theirs.pt", tmp_path / "out", to="dcp", model_from=root / "dcp")
    assert report.made == {} and report.source_format == "torch, titan_qkv_linear names"
    assert diff(tmp_path / "out", root / "dcp").equal


@pytest.mark.parametrize(
    ("source", "to"),
    [(model, to) for model in MODELS for to in CALLED if (family_of(model), to) != ("llama4", "meta")],
    indirect=["source"],
)
def test_formats_without_such_models_say_so(source, to, tmp_path):
    family, _, root = source
    with pytest.raises(UnsupportedError, match=f"{CALLED[to]} has no {family} models"):
        convert(root / "dcp", tmp_path / "out", to=to)
