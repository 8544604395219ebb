"""converters/training/: whose state is whose, in every spelling, and what is refused."""

from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.common.box import Box
from converters.common.errors import CheckpointError, UnsupportedError
from converters.containers.dcp_item import read_blob_item
from converters.engine.read import CatalogReader
from converters.families.args import DecoderArgs
from converters.families.llama3 import LLAMA3
from converters.layout.layout import local_box
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, write_model_info
from converters.source.open import open_checkpoint
from converters.training.sections import describe_loader_state
from converters.verify import verify
from tests.doors import reshard

ARGS = DecoderArgs(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=30)
SHAPES = {p.fqn: p.shape for p in LLAMA3.parameters(ARGS)}
WQ = "layers.0.attention.wq.weight"


def weights(prefix=""):
    generator = torch.Generator().manual_seed(1)
    return {prefix + fqn: torch.randn(shape, generator=generator) for fqn, shape in SHAPES.items()}


def adamw_state(fqn, shape, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return {f"state.{fqn}.{kind}": torch.rand(shape, generator=generator) for kind in ("exp_avg", "exp_avg_sq")} | {
        f"state.{fqn}.step": torch.tensor(5.0)
    }


def optimizer(spell=lambda fqn: fqn):
    return {key: value for fqn, shape in SHAPES.items() for key, value in adamw_state(spell(fqn), shape).items()}


def save(folder, state, args=ARGS):
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    write_model_info(folder, ModelInfo("llama3", args))
    return folder


def read(folder, name):
    catalog = open_checkpoint(folder)
    with CatalogReader(catalog) as reader:
        if name in catalog.values:
            return read_blob_item(reader.read_blob(name))
        return reader.read(name, Box.whole(catalog.tensors[name].shape))


def halves(tensor, heads):
    """Native rows as Hugging Face orders them (Meta's own formula)."""
    rows, columns = tensor.shape
    return tensor.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def hf_names(state):
    """A native state dict of weights as transformers names and orders it."""
    names = {rule.native: rule.foreign for rule in LLAMA3.namings["hf"].rules}
    renamed = {}
    for fqn, tensor in state.items():
        number = fqn.split(".")[1] if fqn.startswith("layers.") else ""
        name = names[fqn.replace(f"layers.{number}.", "layers.{n}.", 1)].replace("{n}", number)
        heads = {"wq": ARGS.num_heads, "wk": ARGS.num_kv_heads}.get(fqn.split(".")[-2])
        renamed[name] = halves(tensor, heads) if heads else tensor
    return renamed


# Namings


def qkv_linear(fqn):
    for w in ("wq", "wk", "wv"):
        fqn = fqn.replace(f"attention.{w}", f"attention.qkv_linear.{w}")
    return fqn.replace("output.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("model_prefix", "optimizer_prefix", "spell"),
    [
        ("", "", qkv_linear),  # torchtitan's newest layout
        ("model.", "model.", lambda fqn: fqn),  # its oldest
        ("model.", "", lambda fqn: fqn),  # weights nested, states by the names that the model itself knows
    ],
    ids=["newest", "oldest", "nested"],
)
def test_torchtitan_s_layouts_become_ours(model_prefix, optimizer_prefix, spell, tmp_path):
    state = {model_prefix + spell(fqn): tensor for fqn, tensor in weights().items()}
    if model_prefix:
        state["model.freqs_cis"] = torch.zeros(4, 2)
    names = {fqn: optimizer_prefix + spell(fqn) for fqn in SHAPES}
    groups = {f"param_groups.{name}.lr": 0.1 for name in names.values()}
    save(tmp_path / "theirs", state | {"optimizer": optimizer(names.get) | groups})
    report = reshard(tmp_path / "theirs", tmp_path / "ours", mesh=MeshShape(dp_shard=2))
    expected = weights() | {f"optimizer.{key}": value for key, value in optimizer().items()}
    catalog = open_checkpoint(tmp_path / "ours")
    assert catalog.tensors.keys() == expected.keys()
    assert catalog.values.keys() == {f"optimizer.param_groups.{fqn}.lr" for fqn in SHAPES}
    for name, tensor in expected.items():
        assert np.array_equal(read(tmp_path / "ours", name), tensor.numpy()), name
    assert read(tmp_path / "ours", f"optimizer.param_groups.{WQ}.lr") == 0.1
    assert list(report.dropped) == (["model.freqs_cis"] if model_prefix else [])
    # a stock loader with the trainer's own nesting finds everything
    loaded = {fqn: torch.zeros(shape) for fqn, shape in SHAPES.items()}
    loaded["optimizer"] = {key: torch.zeros_like(value) for key, value in optimizer().items()}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "ours"), no_dist=True)
    assert all(torch.equal(loaded["optimizer"][key], value) for key, value in optimizer().items())
    assert verify(tmp_path / "ours").ok


def test_hugging_face_rows_of_every_state_are_permuted_and_cut_with_their_weight(tmp_path):
    native = weights()
    kinds = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    moments = {kind: {fqn: tensor * (n + 2) for fqn, tensor in native.items()} for n, kind in enumerate(kinds)}
    states = {f"state.{n}.{kind}": t for kind in kinds for n, t in hf_names(moments[kind]).items()}
    save(tmp_path / "hf", {"model": hf_names(native), "optim": states})
    mesh = MeshShape(dp_shard=2, tp=2)
    reshard(tmp_path / "hf", tmp_path / "ours", mesh=mesh)
    for fqn, tensor in native.items():
        assert np.array_equal(read(tmp_path / "ours", fqn), tensor.numpy())
        for kind in kinds:
            assert np.array_equal(read(tmp_path / "ours", f"optimizer.state.{fqn}.{kind}"), moments[kind][fqn].numpy())
    wq = next(p for p in LLAMA3.parameters(ARGS) if p.fqn == WQ)
    boxes = {chunk.box for chunk in open_checkpoint(tmp_path / "ours").tensors[f"optimizer.state.{WQ}.exp_avg"].chunks}
    assert boxes == {local_box(wq, mesh, rank) for rank in range(4)}


def test_numbered_groups_are_written_for_each_parameter(tmp_path):
    hf = hf_names(weights())
    norms = [name for name in hf if "norm" in name]
    groups = [
        {"lr": torch.tensor(0.25), "weight_decay": 0.0, "betas": (0.9, 0.95), "params": norms},
        {"lr": 0.5, "weight_decay": 0.1, "betas": (0.8, 0.9), "params": [n for n in hf if n not in norms]},
    ]
    nested = {name: {"exp_avg": t, "step": 7} for name, t in hf.items()}  # old torch counts in plain numbers
    save(tmp_path / "hf", {"model": hf, "optimizer": {"state": nested, "param_groups": groups}})
    report = reshard(tmp_path / "hf", tmp_path / "ours")
    assert set(report.dropped) == {"optimizer.param_groups.0.params", "optimizer.param_groups.1.params"}
    blobs = open_checkpoint(tmp_path / "ours").values
    assert blobs.keys() == {f"optimizer.param_groups.{f}.{k}" for f in SHAPES for k in ("lr", "weight_decay", "betas")}
    assert read(tmp_path / "ours", "optimizer.param_groups.norm.weight.lr") == 0.25
    assert read(tmp_path / "ours", f"optimizer.param_groups.{WQ}.lr") == 0.5
    assert read(tmp_path / "ours", f"optimizer.param_groups.{WQ}.betas") == (0.8, 0.9)
    assert read(tmp_path / "ours", f"optimizer.state.{WQ}.step") == np.float32(7)


def test_numbered_groups_of_native_names_stay_as_they_are(tmp_path):
    """torch itself resumes from them: nothing needs translation, so nothing is."""
    groups = [{"lr": 0.5, "betas": (0.8, 0.9), "params": list(SHAPES)}]
    save(tmp_path / "in", {**weights(), "optimizer": optimizer() | {"param_groups": groups}})
    report = reshard(tmp_path / "in", tmp_path / "out", num_files=2)
    catalogs = [open_checkpoint(tmp_path / name) for name in ("in", "out")]
    assert not report.dropped
    assert catalogs[0].values.keys() == catalogs[1].values.keys() >= {"optimizer.param_groups.0.lr"}
    assert catalogs[0].planner_data == catalogs[1].planner_data
    assert read(tmp_path / "out", "optimizer.param_groups.0.params") == list(SHAPES)


def test_a_tied_model_s_second_state_is_dropped_if_it_is_the_same(tmp_path):
    tied = DecoderArgs(**{f: getattr(ARGS, f) for f in ARGS.__dataclass_fields__} | {"tied": True})
    native = {fqn: t for fqn, t in weights().items() if fqn != "output.weight"}
    hf = hf_names(native) | {"lm_head.weight": native["tok_embeddings.weight"]}
    states = {f"state.{name}.exp_avg": t + 1 for name, t in hf.items()}
    groups = {f"param_groups.{name}.lr": 0.1 for name in hf}
    save(tmp_path / "hf", hf | {"optimizer": states | groups}, tied)
    report = reshard(tmp_path / "hf", tmp_path / "ours")
    assert set(report.dropped) == {
        "lm_head.weight",
        "optimizer.state.lm_head.weight.exp_avg",
        "optimizer.param_groups.lm_head.weight.lr",
    }
    assert "optimizer.state.output.weight.exp_avg" not in open_checkpoint(tmp_path / "ours").tensors
    states["state.lm_head.weight.exp_avg"] = states["state.lm_head.weight.exp_avg"] * 2
    save(tmp_path / "bad", hf | {"optimizer": states}, tied)
    with pytest.raises(CheckpointError, match=r"lm_head.weight.exp_avg: differs from .*embed_tokens.*, but .* tied"):
        reshard(tmp_path / "bad", tmp_path / "out")


# Kinds of optimizers


def test_muon_next_to_adamw_is_one_optimizer(tmp_path):
    """Parameters with different kinds of state; a factored state of another shape lies whole with its parameter."""
    matrices = [fqn for fqn in SHAPES if "layers" in fqn and "norm" not in fqn]
    states = {f"state.{fqn}.momentum_buffer": torch.rand(SHAPES[fqn]) for fqn in matrices}
    states |= {f"state.{fqn}.row.factor": torch.rand(SHAPES[fqn][0]) for fqn in matrices}
    states |= {k: v for f in SHAPES if f not in matrices for k, v in adamw_state(f, SHAPES[f]).items()}
    save(tmp_path / "step", weights() | {"optimizer": states})
    reshard(tmp_path / "step", tmp_path / "out", mesh=MeshShape(tp=2))
    found = open_checkpoint(tmp_path / "out").tensors
    assert len(found[f"optimizer.state.{WQ}.momentum_buffer"].chunks) == 2
    assert len(found[f"optimizer.state.{WQ}.row.factor"].chunks) == 1
    for key, value in states.items():
        assert np.array_equal(read(tmp_path / "out", f"optimizer.{key}"), value.numpy())


def test_a_factored_state_is_not_permuted_by_guess(tmp_path):
    hf = hf_names(weights())
    states = {f"state.{name}.row": torch.rand(t.shape[0]) for name, t in hf.items()}
    save(tmp_path / "hf", hf | {"optimizer": states})
    with pytest.raises(CheckpointError, match="4 problems") as error:
        reshard(tmp_path / "hf", tmp_path / "out")
    assert error.value.message.count("its permutation is unknown") == 4  # q and k of two layers


def test_frozen_parameters_are_missing_unless_that_is_allowed(tmp_path):
    states = {k: v for k, v in optimizer().items() if "tok_embeddings" not in k}
    del states["state.norm.weight.step"]
    save(tmp_path / "step", weights() | {"optimizer": states})
    with pytest.raises(CheckpointError, match="2 problems") as error:
        reshard(tmp_path / "step", tmp_path / "out")
    assert "missing     optimizer.state.tok_embeddings.weight.*" in error.value.message
    assert "missing     optimizer.state.norm.weight.step" in error.value.message
    report = reshard(tmp_path / "step", tmp_path / "out", mesh=MeshShape(dp_shard=2), allow_missing=True)
    assert report.missing == ("optimizer state of tok_embeddings.weight", "optimizer state of norm.weight")
    assert len(open_checkpoint(tmp_path / "out").tensors) == len(SHAPES) + len(states)


def test_repeated_and_unknown_settings_are_refused(tmp_path):
    hf = hf_names(weights())
    states = {f"state.{name}.exp_avg": t for name, t in hf.items()}
    states["state.model.model.norm.weight.exp_avg"] = torch.ones(16)  # as the weight is called in the checkpoint
    groups = [{"lr": 0.1, "params": [*hf]}, {"lr": 0.2, "params": ["lm_head.weight", "nobody", ["a list"]]}]
    save(tmp_path / "hf", {"model": hf, "optimizer": {**states, "param_groups": groups}})
    with pytest.raises(CheckpointError, match="3 problems") as error:
        reshard(tmp_path / "hf", tmp_path / "out")
    for part in (
        "optimizer.state.model.model.norm.weight.exp_avg  and optimizer.state.model.norm.weight.exp_avg are one state",
        "twice       optimizer.param_groups.1.lr  is a repeated setting of output.weight",
        "unexpected  optimizer.param_groups.1.params  lists nobody, ['a list']",
    ):
        assert part in error.value.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_numbered_states_are_refused(tmp_path):
    """What optimizer.state_dict() returns: nothing in it says which parameter is number 0."""
    states = {"state": {0: {"exp_avg": torch.zeros(30, 16)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    save(tmp_path / "step", {"model": hf_names(weights()), "optimizer": states})
    with pytest.raises(CheckpointError, match=r"unexpected  optimizer.state.0.exp_avg") as error:
        reshard(tmp_path / "step", tmp_path / "out")
    assert "get_optimizer_state_dict" in error.value.hint


def test_two_optimizers_are_refused(tmp_path):
    save(tmp_path / "step", {"a": {"optim": optimizer()}, "b": {"optim": optimizer()}, "model": weights()})
    with pytest.raises(UnsupportedError, match=r"(?s)several optimizers.*a\.optim.*b\.optim"):
        reshard(tmp_path / "step", tmp_path / "out")


# Parts of a checkpoint


def test_an_optimizer_without_weights_is_cut_too(tmp_path):
    states = {f"state.{name}.exp_avg": t for name, t in hf_names(weights()).items()}
    save(tmp_path / "hf", {"optimizer": states})
    reshard(tmp_path / "hf", tmp_path / "ours", mesh=MeshShape(dp_shard=2, tp=2))
    tensors = open_checkpoint(tmp_path / "ours").tensors
    assert tensors.keys() == {f"optimizer.state.{fqn}.exp_avg" for fqn in SHAPES}
    assert np.array_equal(read(tmp_path / "ours", f"optimizer.state.{WQ}.exp_avg"), weights()[WQ].numpy())
    save(tmp_path / "step", weights() | {"optimizer": optimizer(), "train_state": {"step": 3}})
    report = reshard(tmp_path / "step", tmp_path / "moments", mesh=MeshShape(dp_shard=2), drop=["model"])
    assert report.dropped_sections == {"model": len(SHAPES)}
    assert set(report.sections) == {"optimizer", "train_state"}
    assert len(open_checkpoint(tmp_path / "moments").tensors[f"optimizer.state.{WQ}.exp_avg"].chunks) == 2


def test_weights_may_be_missing_too_where_that_is_allowed(tmp_path):
    """An adapter's or a stage's part of a model: what is there is cut as it would be in the whole."""
    part = {fqn: t for fqn, t in weights().items() if fqn.startswith("layers.1.")}
    states = {k: v for f in part for k, v in adamw_state(f, SHAPES[f]).items()}
    save(tmp_path / "step", part | {"optimizer": states})
    with pytest.raises(CheckpointError, match=f"{len(SHAPES) - len(part)} problems"):
        reshard(tmp_path / "step", tmp_path / "out", mesh=MeshShape(pp=2, dp_shard=2))
    report = reshard(tmp_path / "step", tmp_path / "out", mesh=MeshShape(pp=2, dp_shard=2), allow_missing=True)
    assert {"norm.weight", "optimizer state of norm.weight"} <= set(report.missing)
    catalog = open_checkpoint(tmp_path / "out")
    assert catalog.tensors.keys() == part.keys() | {f"optimizer.{key}" for key in states}
    assert {chunk.file for chunk in catalog.tensors["layers.1.attention.wq.weight"].chunks} == {
        "__2_0.distcp",
        "__3_0.distcp",
    }


def test_moments_are_cast_on_request(tmp_path):
    save(tmp_path / "step", weights() | {"optimizer": optimizer()})
    report = reshard(tmp_path / "step", tmp_path / "out", optimizer_dtype="bf16")
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert tensors[f"optimizer.state.{WQ}.exp_avg"].dtype == "bfloat16"
    assert tensors[f"optimizer.state.{WQ}.step"].dtype == tensors[WQ].dtype == "float32"
    assert report.num_cast == 2 * len(SHAPES)
    expected = optimizer()[f"state.{WQ}.exp_avg"].bfloat16()
    loaded = {f"optimizer.state.{WQ}.exp_avg": torch.zeros_like(expected)}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert torch.equal(loaded[f"optimizer.state.{WQ}.exp_avg"], expected)


def test_what_is_not_known_is_kept_and_reported(tmp_path):
    state = weights("model.") | {"optimizer": optimizer() | {"loss_scale": 128.0}, "epoch": 4, "note": {"a": [1, "b"]}}
    save(tmp_path / "step", state)
    report = reshard(tmp_path / "step", tmp_path / "out")
    assert "unknown, copied unchanged: optimizer.loss_scale, epoch, note.a" in report.remarks
    assert read(tmp_path / "out", "note.a") == [1, "b"] and read(tmp_path / "out", "epoch") == 4
    report = reshard(tmp_path / "step", tmp_path / "less", drop=["note"])
    assert report.dropped_sections == {"note": 1} and "note.a" not in open_checkpoint(tmp_path / "less").values


def test_kinds_of_loader_state():
    from trainer.data.loader import TokenLoader
    from trainer.data.stream_loader import StreamLoader

    class Index:
        fingerprint, vocab_size = "f", 10

        def tokens(self, split):
            return np.zeros(100, np.uint16)

    loader = TokenLoader(Index(), "train", seq_len=4, global_batch_size=2, dp_rank=0, dp_degree=1, seed=0)
    ours = [f"dataloader.{key}" for key in loader.state_dict()]
    assert describe_loader_state(ours, MeshShape(dp_shard=3)) == "dataloader: titan's; kept, it fits any mesh"
    stream = StreamLoader(
        Index(),
        None,
        fingerprint="f",
        num_streams=1,
        seq_len=4,
        global_batch_size=2,
        dp_rank=0,
        dp_degree=1,
        seed=0,
        on_each=lambda work: [work()],
    )
    streamed = [f"dataloader.{key}" for key in stream.state_dict()]
    assert "any mesh whose data-parallel degree divides them" in describe_loader_state(streamed, MeshShape(dp_shard=3))
    theirs = ["dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size"]
    assert "at the same dp degree" in describe_loader_state(theirs, MeshShape(dp_replicate=2, tp=2))
    with pytest.raises(UnsupportedError, match="2 data-parallel ranks"):
        describe_loader_state(theirs, MeshShape(tp=2))
    assert "unknown kind" in describe_loader_state(["dataloader.anything"], None)
    assert describe_loader_state(["train_state.step"], None) == ""


# Other tools' sections

DICTS = {name: {"exp_avg": t + 1, "step": torch.tensor(3.0)} for name, t in hf_names(weights()).items()}
NESTED = {"state": DICTS, "param_groups": [{"lr": 0.5, "params": [*DICTS]}]}
NOT_NORMS = {name: state for name, state in DICTS.items() if "norm" not in name}
NORMS = {name: state for name, state in DICTS.items() if "norm" in name}


@pytest.mark.parametrize(
    "around",
    [
        lambda model: {"app": {"model": model, "optimizers": NESTED, "progress": {"step": 2}}},  # prime-rl
        lambda model: {"state": {"model": model, "optimizers": {"DecoupledAdamW": NESTED}}},  # Composer
        lambda model: {"model": model, "optimizers": [NESTED]},
        lambda model: {"model": model, "optimizer": {"adamw": NESTED}},
        lambda model: {"model": model, "optimizer_state": NESTED},
        lambda model: {"model": model, "optimizer_0": NESTED},  # Lightning
        lambda model: {"model": model, "optimizers": [{"state": NORMS}, {"state": NOT_NORMS}]},  # Muon and AdamW
        lambda model: {"dcp": {"model": model, "optim": NESTED}},  # AReaL
    ],
    ids=["prime-rl", "composer", "list", "dict", "optimizer_state", "lightning", "two", "areal"],
)
def test_moments_of_any_place_go_with_their_weights(around, tmp_path):
    save(tmp_path / "theirs", around(hf_names(weights())))
    reshard(tmp_path / "theirs", tmp_path / "ours")
    expected = weights() | {f"optimizer.state.{fqn}.exp_avg": tensor + 1 for fqn, tensor in weights().items()}
    for name, tensor in expected.items():
        assert np.array_equal(read(tmp_path / "ours", name), tensor.numpy()), name
    assert {n for n in open_checkpoint(tmp_path / "ours").tensors if "optim" not in n} == SHAPES.keys()


COPIES = {name: state["exp_avg"] for name, state in DICTS.items()}


@pytest.mark.parametrize(
    ("sections", "dropped"),
    [
        ({"optimizer": {"exp_avg": COPIES}}, "optimizer"),  # state first, then parameter
        ({"optimizer": {"state": DICTS, "master": COPIES}}, "optimizer"),
        ({"masters": {str(i): t for i, t in enumerate(COPIES.values())}}, "masters"),  # by shape
        ({"averaged": {n: t for n, t in COPIES.items() if "norm" in n}}, "averaged"),  # by name
        ({"train_state": {"momentum": COPIES["model.layers.0.self_attn.q_proj.weight"]}}, "train_state"),
        ({"optim_states": {"flat": torch.zeros(5000)}}, "optim_states"),
        ({"adam": {"exp_avg": torch.cat([t.flatten() for t in COPIES.values()])}}, "adam"),
        ({"optim_states": PurePosixPath("an object")}, "optim_states"),  # pickled
    ],
    ids=["by kind", "masters in it", "by shape", "by name", "one", "flat", "flat, all", "pickled"],
)
def test_what_follows_a_parameter_is_refused_where_that_moves(sections, dropped, tmp_path):
    save(tmp_path / "hf", {"model": hf_names(weights()), "epoch": 3, **sections})
    with pytest.raises(CheckpointError, match="would keep their own") as error:
        reshard(tmp_path / "hf", tmp_path / "out")
    assert error.value.tries == (f"--drop {dropped}",) and not (tmp_path / "out").exists()
    reshard(tmp_path / "hf", tmp_path / "out", drop=[dropped])
    assert read(tmp_path / "out", "epoch") == 3 and np.array_equal(read(tmp_path / "out", WQ), weights()[WQ].numpy())


def test_what_follows_a_parameter_is_copied_where_nothing_moves(tmp_path):
    averaged = {fqn: t + 1 for fqn, t in weights().items() if "norm" in fqn}
    state = {"model": weights(), "optimizer": {"master": averaged}, "averaged": averaged}
    save(tmp_path / "native", state)
    reshard(tmp_path / "native", tmp_path / "out")
    for name in ("optimizer.master.norm.weight", "averaged.norm.weight"):
        assert np.array_equal(read(tmp_path / "out", name), averaged["norm.weight"].numpy())


def test_a_preconditioner_of_a_square_weight_is_not_taken_for_a_moment(tmp_path):
    """SOAP and Shampoo have a matrix for the rows of each weight; that of wq has the shape of wq."""
    hf = hf_names(weights())
    states = {f"state.{name}.GG.0": torch.rand(t.shape[0], t.shape[0]) for name, t in hf.items()}
    save(tmp_path / "hf", hf | {"optimizer": states})
    with pytest.raises(CheckpointError, match="4 problems") as error:
        reshard(tmp_path / "hf", tmp_path / "out")
    assert "self_attn.q_proj.weight.GG.0  [16, 16]: its permutation is unknown" in error.value.message


def test_two_optimizers_can_be_left_out(tmp_path):
    save(tmp_path / "step", {"a": {"optim": optimizer()}, "b": {"optim": optimizer()}, "model": weights()})
    report = reshard(tmp_path / "step", tmp_path / "out", drop=["optimizer"])
    assert report.dropped_sections == {"optimizer": 2 * len(optimizer())}
    assert open_checkpoint(tmp_path / "out").tensors.keys() == SHAPES.keys()
