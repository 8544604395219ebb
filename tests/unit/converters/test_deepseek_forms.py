"""DeepSeek in every format, layout and naming: values, moments, errors, and headers of the 671B."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from converters.common.box import Box
from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from converters.diff import diff
from converters.engine.read import CatalogReader
from converters.families.registry import get_family
from converters.inspect import inspect_checkpoint
from converters.layout.layout import boxes_for_mesh, local_box
from converters.layout.mesh_check import check_mesh
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, write_model_info
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from tests.doors import convert, reshard
from tests.models.deepseek import write as write_deepseek
from tests.models.names import native_arrays

FAMILY = get_family("deepseek_v3")


@pytest.fixture(scope="module", params=["v3", "v2_lite"])
def source(request, tmp_path_factory):
    """(name, model, root): root/hf as transformers wrote it, with sizes that tensor parallelism divides; root/dcp."""
    root = tmp_path_factory.mktemp(request.param)
    model = write_deepseek(root / "hf", request.param, vocab_size=98)
    convert(root / "hf", root / "dcp", to="dcp")
    return request.param, model, root


# Names of the code that DeepSeek publishes with its models

OWN = {
    "tok_embeddings": "embed",
    "attention_norm": "attn_norm",
    "attention": "attn",
    "feed_forward": "ffn",
    "moe.router.gate": "ffn.gate",
    "moe.expert_bias": "ffn.gate.bias",
    "moe.shared_experts": "ffn.shared_experts",
}


def own_names(native: dict[str, torch.Tensor], *, has_bias: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in native.items():
        if ".moe.experts." in name:
            layer, w = name.split(".moe.experts.")
            found |= {f"{layer}.ffn.experts.{e}.{w}.weight": one.clone() for e, one in enumerate(weight)}
        elif not name.endswith("expert_bias") or has_bias:
            for ours, theirs in OWN.items():
                name = re.sub(rf"(^|\.){ours}($|\.)", rf"\1{theirs}\2", name)
            found["head.weight" if name == "output.weight" else name] = weight
    return found


def test_deepseeks_own_names_are_read(source, tmp_path):
    """As its convert.py writes them for one rank: model0-mp1.safetensors, and no config.json."""
    name, _, root = source
    convert(root / "dcp", tmp_path / "native", to="torch")
    tensors = own_names(torch.load(tmp_path / "native" / "model.pt"), has_bias=name != "v2_lite")
    assert "layers.1.ffn.experts.11.w2.weight" in tensors and "layers.0.ffn.w1.weight" in tensors
    assert ("layers.2.ffn.gate.bias" in tensors) == (name != "v2_lite")
    (tmp_path / "own").mkdir()
    save_file(tensors, tmp_path / "own" / "model0-mp1.safetensors")
    report = convert(tmp_path / "own", tmp_path / "out", to="hf", model_from=root / "hf")
    assert report.source_format == "safetensors, deepseek names"
    assert diff(tmp_path / "out", root / "hf").equal


def test_deepseeks_own_files_of_several_ranks_are_refused(source, tmp_path):
    """Each holds other experts and other rows under the same names."""
    name, _, root = source
    convert(root / "dcp", tmp_path / "native", to="torch")
    tensors = own_names(torch.load(tmp_path / "native" / "model.pt"), has_bias=name != "v2_lite")
    (tmp_path / "own").mkdir()
    for rank in range(2):
        save_file(tensors, tmp_path / "own" / f"model{rank}-mp2.safetensors")
    with pytest.raises(UnsupportedError, match="shards of 2 ranks") as error:
        convert(tmp_path / "own", tmp_path / "out", to="hf", model_from=root / "hf")
    assert "--model-parallel 1" in error.value.hint


# What training reads: layouts and moments


ARGS = replace(FAMILY.flavors["debug_v3"], vocab_size=96)
MESHES = [MeshShape(dp_shard=5), MeshShape(pp=2, dp_shard=3, tp=2), MeshShape(dp_shard=4, tp=2, ep=4, etp=1)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_moments_follow_their_weights(mesh, tmp_path):
    generator, state = torch.Generator().manual_seed(1), {}
    parameters = {p.fqn: p for p in FAMILY.parameters(ARGS)}
    for fqn, p in parameters.items():
        state[fqn] = torch.randn(p.shape, generator=generator)
        if p.is_trained:
            for kind in ("exp_avg", "exp_avg_sq"):
                state[f"optimizer.state.{fqn}.{kind}"] = torch.rand(p.shape, generator=generator)
            state[f"optimizer.state.{fqn}.step"] = torch.tensor(5.0)
    dcp.save(state, checkpoint_id=str(tmp_path / "src"), no_dist=True)
    write_model_info(tmp_path / "src", ModelInfo("deepseek_v3", ARGS))
    reshard(tmp_path / "src", tmp_path / "out", mesh=mesh)
    catalog = open_checkpoint(tmp_path / "out")
    with CatalogReader(catalog) as reader:
        assert reader.tensors.keys() == state.keys()
        for name, value in state.items():
            assert np.array_equal(reader.read(name, Box.whole(value.shape)), value.numpy()), name
    # each rank of the first stage finds its part of a latent, a head's column and a shared expert as one chunk
    for fqn in ("attention.wkv_a.weight", "attention.wkv_b.weight", "attention.kv_norm.weight", "attention.wo.weight"):
        p = parameters[f"layers.0.{fqn}"]
        held = {local_box(p, mesh, rank) for rank in range(mesh.world_size // mesh.pp)} - {None}
        for name in (p.fqn, f"optimizer.state.{p.fqn}.exp_avg"):
            assert {chunk.box for chunk in catalog.tensors[name].chunks} == held


def test_the_latent_is_whole_on_every_rank_of_tensor_parallelism():
    parameters, mesh = {p.fqn: p for p in FAMILY.parameters(ARGS)}, MeshShape(tp=2)
    boxes = {fqn: local_box(p, mesh, 1).sizes for fqn, p in parameters.items()}
    assert boxes["layers.1.attention.wkv_a.weight"] == (32 + 8, 128) and boxes["layers.1.attention.wq_a.weight"] == (
        48,
        128,
    )
    assert boxes["layers.1.attention.wkv_b.weight"] == (4 * (16 + 20) // 2, 32)
    assert boxes["layers.1.attention.wo.weight"] == (128, 4 * 20 // 2)
    assert boxes["layers.1.moe.shared_experts.w1.weight"] == (96 // 2, 128)


def test_a_mesh_that_does_not_divide():
    with pytest.raises(ConfigError, match="tp=3 .*4 attention heads"):
        check_mesh(MeshShape(tp=3), FAMILY, ARGS)
    odd = replace(ARGS, expert_hidden=30, num_shared_experts=3, num_heads=8, num_kv_heads=8)
    with pytest.raises(ConfigError, match="tp=4 does not divide the 90 columns of the shared expert"):
        check_mesh(MeshShape(tp=4, dp_shard=1, ep=4), FAMILY, odd)
    check_mesh(MeshShape(pp=3, dp_shard=6, tp=4, ep=12), FAMILY, ARGS)
    parameters = FAMILY.parameters(FAMILY.flavors["671B"])
    files = boxes_for_mesh(parameters, MeshShape(dp_shard=64, ep=32), itemsizes={p.fqn: 2 for p in parameters})
    assert len(files) == 64


def test_inspect_says_what_it_is(source):
    name, _, root = source
    found = inspect_checkpoint(root / "dcp")
    assert "latent attention (16 + 6 values per token)" in found.parts
    groups = ", 2 of 4 groups" if name == "v3" else ""
    shared = 24 if name == "v3" else 48
    assert f"12 experts of 24 (3 per token){groups}, a shared one of {shared} in 2 of 3 layers" in found.parts
    assert "layers.{1..2}.moe.experts.w1" in {line.name for line in found.lines}


def test_swapped_gate_and_up_are_named(source, tmp_path):
    _, _, root = source
    shutil.copytree(root / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for kind in ("shared_experts", "experts.3"):
        gate, up = (f"model.layers.1.mlp.{kind}.{name}_proj.weight" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    found = {one.name: one.detail for one in diff(tmp_path / "hf", root / "dcp").differences}
    assert found.keys() == {f"layers.1.moe.{k}" for k in ("experts.w1", "experts.w3")} | {
        f"layers.1.moe.shared_experts.{w}.weight" for w in ("w1", "w3")
    }
    assert "in experts 3" in found["layers.1.moe.experts.w1"]


def test_a_checkpoint_without_offsets_or_with_some(source, tmp_path):
    """torchtitan does not save them where it does not balance; a Hugging Face V3 has all of them."""
    name, model, root = source
    arrays = {fqn: torch.as_tensor(a) for fqn, a in native_arrays(model).items() if not fqn.endswith("expert_bias")}
    torch.save(arrays, tmp_path / "model.pt")
    report = convert(tmp_path / "model.pt", tmp_path / "dcp", to="dcp", model_from=root / "hf")
    assert set(report.made) == {f"layers.{n}.moe.expert_bias" for n in (1, 2)}
    if name != "v2_lite":
        shutil.copytree(root / "hf", tmp_path / "hf")
        tensors = load_file(tmp_path / "hf" / "model.safetensors")
        biases = [n for n in tensors if n.endswith("e_score_correction_bias")]
        for gone in (biases[:1], biases):
            kept = {n: t for n, t in tensors.items() if n not in gone}
            save_file(kept, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises(CheckpointError, match="missing     .*e_score_correction_bias"):
                convert(tmp_path / "hf", tmp_path / "out", to="dcp")
    with open_native(root / "dcp") as weights:
        assert weights.tensors["layers.1.moe.expert_bias"].dtype == "float32"
