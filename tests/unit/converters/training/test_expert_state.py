"""Adam's moments of stacked experts: sharded like their stack, and stacked from any form like their weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.common.box import Box
from converters.common.errors import CheckpointError, ConfigError
from converters.engine.read import CatalogReader
from converters.families.qwen3 import FLAVORS, QWEN3
from converters.layout.layout import local_box
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, write_model_info
from converters.source.open import open_checkpoint
from converters.verify import verify
from tests.doors import reshard

ARGS = replace(
    FLAVORS["debug_moe_mixed"], dim=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=30,
    num_layers=2, dense_layers=(), expert_hidden=8,
)  # fmt: skip
PARAMETERS = {p.fqn: p for p in QWEN3.parameters(ARGS)}  # layer 0 is dense, layer 1 has 12 experts
KINDS = ("exp_avg", "exp_avg_sq")
W1, W2, W3 = (f"layers.1.moe.experts.{name}" for name in ("w1", "w2", "w3"))


def native_state() -> dict[str, torch.Tensor]:
    """Weights, moments and steps under native names."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for fqn, p in PARAMETERS.items():
        state[fqn] = torch.randn(p.shape, generator=generator) if p.is_trained else torch.zeros(p.shape)
        if p.is_trained:
            state |= {f"optimizer.state.{fqn}.{kind}": torch.rand(p.shape, generator=generator) for kind in KINDS}
            state[f"optimizer.state.{fqn}.step"] = torch.tensor(5.0)
    return state


def as_hf(state: dict[str, torch.Tensor], *, fused: bool) -> dict[str, torch.Tensor]:
    """The same as transformers names it in memory (fused), or on disk."""
    names = {rule.native: rule.foreign for rule in QWEN3.namings["hf"].rules}
    found = {}
    for key, value in state.items():
        if key.endswith("moe.expert_bias"):
            continue
        head, _, kind = key.rpartition(".")
        fqn, before, after = (
            (head.removeprefix("optimizer.state."), "optimizer.state.", f".{kind}")
            if key.startswith("optimizer.")
            else (key, "", "")
        )
        number = fqn.split(".")[1] if fqn.startswith("layers.") else ""
        name = names[fqn.replace(f"layers.{number}.", "layers.{n}.")].replace("{n}", number)
        if fqn not in (W1, W2, W3):
            found[f"{before}{name}{after}"] = value
        elif not fused:
            for e in range(12):
                found[f"{before}{name.replace('{e}', str(e))}{after}"] = value[e] if value.ndim else value
        elif fqn == W1:
            up = state[f"{before}{W3}{after}"]
            both = torch.cat([value, up], dim=1) if value.ndim else value
            found[f"{before}model.layers.1.mlp.experts.gate_up_proj{after}"] = both
        elif fqn == W2:
            found[f"{before}model.layers.1.mlp.experts.down_proj{after}"] = value
    return found


def save(folder, state):
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    write_model_info(folder, ModelInfo("qwen3", ARGS))
    return folder


def read_all(folder) -> dict[str, np.ndarray]:
    catalog = open_checkpoint(folder)
    with CatalogReader(catalog) as reader:
        return {n: reader.read(n, Box.whole(info.shape)) for n, info in reader.tensors.items()}


def assert_holds(folder, state):
    found = read_all(folder)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert np.array_equal(found[name], value.numpy()), name


@pytest.mark.parametrize("form", ["native", "per expert", "fused"])
def test_moments_follow_their_stack(form, tmp_path):
    state = native_state()
    save(tmp_path / "src", state if form == "native" else as_hf(state, fused=form == "fused"))
    mesh = MeshShape(dp_shard=5)  # 12 experts: 3, 3, 3, 3 and none
    report = reshard(tmp_path / "src", tmp_path / "out", mesh=mesh)
    assert_holds(tmp_path / "out", state)
    assert verify(tmp_path / "out").ok
    assert report.num_tensors == len(state)
    catalog = open_checkpoint(tmp_path / "out")
    for name in (W1, f"optimizer.state.{W1}.exp_avg", f"optimizer.state.{W2}.exp_avg_sq"):
        fqn = name.removeprefix("optimizer.state.").removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        boxes = {chunk.file: chunk.box for chunk in catalog.tensors[name].chunks}
        held = {f"__{rank}_0.distcp": local_box(PARAMETERS[fqn], mesh, rank) for rank in range(5)}
        assert boxes == {file: box for file, box in held.items() if box is not None} and len(boxes) == 4
    (whole,) = catalog.tensors["layers.1.moe.expert_bias"].chunks  # a buffer: every rank reads all of it
    assert whole.box.sizes == (12,) and local_box(PARAMETERS["layers.1.moe.expert_bias"], mesh, 4) == whole.box
    # and back to one file, as many times as one likes
    reshard(tmp_path / "out", tmp_path / "again", num_files=1, optimizer_dtype="bfloat16")
    assert read_all(tmp_path / "again")[f"optimizer.state.{W3}.exp_avg"].dtype.name == "bfloat16"


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_alone_is_translated_too(fused, tmp_path):
    state = native_state()
    src = save(tmp_path / "src", as_hf(state, fused=fused))
    reshard(src, tmp_path / "out", drop=["model"])
    assert_holds(tmp_path / "out", {name: value for name, value in state.items() if name.startswith("optimizer.")})
    save(tmp_path / "only", {n: v for n, v in as_hf(state, fused=fused).items() if n.startswith("optimizer.")})
    reshard(tmp_path / "only", tmp_path / "again")
    assert_holds(tmp_path / "again", {name: value for name, value in state.items() if name.startswith("optimizer.")})


def test_settings_of_all_experts_become_one(tmp_path):
    """Named settings are repeated for each expert; a group lists them."""
    state = as_hf(native_state(), fused=False)
    names = [name for name in state if not name.startswith("optimizer.")]
    settings = {f"optimizer.param_groups.{name}.lr": 1e-3 for name in names}
    reshard(save(tmp_path / "src", state | settings), tmp_path / "out")
    lr = f"optimizer.param_groups.{W1}.lr"
    assert lr in open_checkpoint(tmp_path / "out").values
    group = {"optimizer.param_groups.0.params": names, "optimizer.param_groups.0.lr": 1e-3}
    reshard(save(tmp_path / "grouped", state | group), tmp_path / "out2")
    assert lr in open_checkpoint(tmp_path / "out2").values
    settings["optimizer.param_groups.model.layers.1.mlp.experts.7.gate_proj.weight.lr"] = 2e-3
    with pytest.raises(
        CheckpointError, match=r"differs     .*experts.7.gate_proj.weight.lr .* other parts of"
    ) as error:
        reshard(save(tmp_path / "other", state | settings), tmp_path / "out3")
    assert "1 problem:" in error.value.message


def test_every_wrong_state_of_an_expert_is_named(tmp_path):
    state = as_hf(native_state(), fused=False)
    name = "optimizer.state.model.layers.1.mlp.experts.{}.up_proj.weight.{}".format
    del state[name(3, "exp_avg")]
    state[name(12, "exp_avg")] = state[name(0, "exp_avg")]
    state[name(4, "exp_avg_sq")] = state[name(4, "exp_avg_sq")].T.contiguous()
    state[name(5, "step")] = torch.tensor(6.0)
    state["optimizer.state.layers.1.moe.expert_bias.exp_avg"] = torch.zeros(12)
    with pytest.raises(CheckpointError) as error:
        reshard(save(tmp_path / "src", state), tmp_path / "out")
    assert sorted(" ".join(line.split()) for line in error.value.message.splitlines()[1:]) == [
        f"differs {name(5, 'step')} has another value than {name(0, 'step')}, and {W3} needs one for both",
        f"missing {name(3, 'exp_avg')}",
        f"shape {name(4, 'exp_avg_sq')} is [16, 8], its parameter [8, 16]",
        "unexpected optimizer.state.layers.1.moe.expert_bias.exp_avg",
        f"unexpected {name(12, 'exp_avg')}",
    ]
    assert not (tmp_path / "out").exists()


def test_a_mesh_that_training_does_not_support_is_refused(tmp_path):
    src = save(tmp_path / "src", native_state())
    with pytest.raises(ConfigError, match=r"ep=5 does not divide 12 experts; possible: 1$"):
        reshard(src, tmp_path / "out", mesh=MeshShape(dp_shard=5, ep=5))
