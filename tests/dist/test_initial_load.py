"""Runs that start from other tools' weights, in any format: the first loss is that of the native ones."""

import io
import pickle
import shutil
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.families.llama3 import FLAVORS
from converters.formats.base import OutputOptions
from converters.model.model_info import ModelInfo, write_hf_config
from converters.source.models_inside import SeveralModels
from converters.source.weights import open_native
from tests.dist import runs
from tests.dist.test_stock_training import adamw, hf_model, native, renamed, step_of
from tests.doors import convert
from tests.fp8_folders import write_fp8
from tests.pretend_store import ROOT
from tests.tiny_infer import CPU, complete
from tests.uploaded import upload
from titan_tools.infer.model.load import load_model
from trainer.job.inputs import check_run
from trainer.job.job import resolve_job
from trainer.ranks.machine import HOST_CPU

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # stock DCP, in this process
FLAVOR = "debug_gqa"
INFO = ModelInfo("llama3", FLAVORS[FLAVOR])
make_config = partial(runs.make_config, flavor=FLAVOR)
FSDP2_TP2 = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
FSDP2 = runs.FSDP2


def _newest(name):
    if ".wo." not in name:
        name = name.replace("attention.w", "attention.qkv_linear.w")
    return name.replace("output.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def formats(tmp_path_factory, data):
    """The same weights as everybody writes them, by format; native ones first."""
    root = tmp_path_factory.mktemp("formats")
    model = hf_model(FLAVOR)
    for parameter in model.parameters():
        parameter.data *= 5  # a permuted row shows
    weights = {k: v.clone() for k, v in (native(n, p.detach(), FLAVOR) for n, p in model.named_parameters())}

    def save_dcp(name, state):
        dcp.save(state, checkpoint_id=str(root / name), no_dist=True)

    save_dcp("native DCP", weights)
    save_dcp("torchtitan's older DCP", {"model": weights | {"freqs_cis": torch.zeros(4)}})
    save_dcp("torchtitan's newest DCP", {_newest(name): tensor for name, tensor in weights.items()})
    model.save_pretrained(root / "safetensors")
    shutil.copy(data / "tokenizer.json", root / "safetensors")
    (root / "bin").mkdir()
    torch.save(model.state_dict(), root / "bin" / "pytorch_model.bin")
    write_hf_config(root / "bin", INFO, dtype="float32")
    cache = root / "models--org--name"
    shutil.copytree(root / "safetensors", cache / "blobs")
    (cache / "snapshots" / "0a1b").mkdir(parents=True)
    for file in (cache / "blobs").iterdir():
        (cache / "snapshots" / "0a1b" / file.name).symlink_to(f"../../blobs/{file.name}")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0a1b")
    convert(root / "safetensors", root / "meta", to="meta", options=OutputOptions(num_shards=2))
    torch.save({"model": weights, "step": 3}, root / "weights.pt")
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in weights.items()}
    torch.save({"state_dict": wrapped, "optimizer_states": [{"state": {0: torch.ones(2)}}]}, root / "wrapped.ckpt")
    convert(root / "safetensors", root / "torchtune", to="torchtune", options=OutputOptions(style="torchtune"))
    names = ("native DCP", "torchtitan's older DCP", "torchtitan's newest DCP", "safetensors", "bin", cache.name)
    return {name: root / name for name in (*names, "meta", "weights.pt", "wrapped.ckpt", "torchtune")}


@pytest.mark.parametrize(
    ("num_ranks", "parallelism"),
    [(1, {}), pytest.param(4, FSDP2_TP2, marks=pytest.mark.slow)],
    ids=["1 rank", "4 ranks"],
)
def test_the_first_loss_is_that_of_native_weights(pools, data, formats, tmp_path, num_ranks, parallelism):
    config = make_config(data, tmp_path, parallelism=parallelism)
    losses = pools[num_ranks].run(runs.first_losses, config, formats)
    expected = losses[0]["native DCP"]
    assert expected > 8 and all(rank == dict.fromkeys(formats, expected) for rank in losses), losses


def test_a_run_starts_from_weights_in_an_object_store(pools, data, formats, tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT, str(tmp_path / "objects"))
    places = {name: upload(formats[name]) for name in ("safetensors", "native DCP")}
    config = make_config(data, tmp_path, **FSDP2)
    (expected, _) = pools[2].run(runs.first_losses, config, {"": formats["native DCP"]})
    losses = pools[2].run(runs.in_store, tmp_path / "objects", runs.first_losses, config, places)
    assert losses == [dict.fromkeys(places, expected[""])] * 2


def test_a_run_starts_from_the_hf_folder_that_the_model_names(pools, data, formats, tmp_path):
    config = make_config(
        data,
        tmp_path,
        steps=1,
        model={"hf_assets_path": str(formats["safetensors"])},
        checkpoint={"initial_load_in_hf": True},
    )
    assert pools[1].run(runs.run, config) == [""]
    begun = pools[1].run(runs.first_losses, make_config(data, tmp_path), {"": formats["native DCP"]})[0][""]
    assert runs.read_losses(tmp_path) == {1: begun}

    named = make_config(data, tmp_path / "other", steps=1, checkpoint={"initial_load_in_hf": True})
    named = runs.replace(named, checkpoint=runs.replace(named.checkpoint, initial_load_path=str(formats["bin"])))
    (tmp_path / "other" / "checkpoint").mkdir(parents=True)  # a folder without a checkpoint is no reason to begin anew
    assert pools[1].run(runs.run, named) == [""]
    assert runs.read_losses(tmp_path / "other") == {1: begun}


def test_a_run_starts_from_an_fp8_folder_where_it_is_asked_to(pools, data, formats, tmp_path):
    """Its weights are the float32 products, as in torchtitan: those of a DCP that is converted to float32."""
    fp8 = write_fp8(tmp_path / "fp8", formats["safetensors"], files=2)
    shutil.copy(data / "tokenizer.json", fp8)
    convert(fp8, tmp_path / "float32", to="dcp", dtype="float32")
    keys = {"initial_load_in_hf": True, "initial_load_in_hf_quantized": True, "initial_load_path": str(fp8)}
    config = make_config(data, tmp_path / "run", **FSDP2, steps=1, checkpoint=keys)
    assert pools[2].run(runs.run, config) == ["", ""]
    plain = make_config(data, tmp_path / "plain", **FSDP2)
    begun = pools[2].run(runs.first_losses, plain, {"": tmp_path / "float32"})[0][""]
    assert runs.read_losses(tmp_path / "run") == {1: begun}
    for given in ({"initial_load_path": str(fp8)}, keys | {"initial_load_in_hf_quantized": False}):
        config = make_config(data, tmp_path / "refused", **FSDP2, checkpoint=given)
        (output, _) = pools[2].run(runs.run, config)
        assert output.startswith(f"CheckpointError: {fp8} holds 28 weights in fp8 (e4m3)"), output


@pytest.mark.parametrize("container", ["dcp", pytest.param("torch", marks=pytest.mark.slow)])
def test_of_several_models_the_selected_one_is_trained_and_read(pools, data, formats, tmp_path, container):
    """It gives the loss and the tokens of the same weights alone, and the other model gives others."""
    alone = formats["weights.pt"]
    weights = torch.load(alone)["model"]
    content = {"policy": {"model": weights}, "ema": {name: tensor * 0.9 for name, tensor in weights.items()}}
    path = tmp_path / ("both" if container == "dcp" else "both.pt")
    if container == "dcp":
        dcp.save(content, checkpoint_id=str(path), no_dist=True)
    else:
        torch.save(content, path)

    def begin(select):
        keys = {"initial_load_path": str(path), "initial_load_select": select}
        config = make_config(data, tmp_path / str(select), steps=1, checkpoint=keys)
        return config, pools[1].run(runs.run, config)

    config, (output,) = begin(None)
    assert output.startswith(f"SeveralModels: {path} holds 2 models:")
    with pytest.raises(SeveralModels) as error:
        check_run(resolve_job(runs.replace(config, origins={"checkpoint.initial_load_path": "the test"}), 1), HOST_CPU)
    tries = [f"--checkpoint.initial_load_select {name}" for name in ("policy.model", "ema")]
    assert sorted(error.value.tries) == sorted(tries)

    losses, tokens = {}, {}
    begun = pools[1].run(runs.first_losses, make_config(data, tmp_path), {"": alone})[0][""]
    for name in ("policy", "ema"):
        assert begin(name)[1] == [""]
        losses[name] = runs.read_losses(tmp_path / name)[1]
        tokens[name] = _continued(open_native(path, select=name, otherwise=INFO))
    assert losses["policy"] == begun != losses["ema"]
    assert tokens["policy"] == _continued(open_native(alone, otherwise=INFO)) != tokens["ema"]


def _continued(opened) -> tuple:
    """Greedy tokens and the log probabilities of each."""
    with opened as weights:
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=CPU, tp=1, rank=0)
        (said,) = complete(model, [[1, 2, 3]], max_new_tokens=4, logprobs=1)
    return said.tokens, said.logprobs


@pytest.mark.parametrize("name", ["native DCP", "meta"])
def test_what_is_not_hf_is_refused_where_hf_was_asked_for(pools, data, formats, tmp_path, name):
    checkpoint = {"initial_load_in_hf": True, "initial_load_path": str(formats[name])}
    (output,) = pools[1].run(runs.run, make_config(data, tmp_path, checkpoint=checkpoint))
    assert output.startswith("CheckpointError: checkpoint.initial_load_in_hf") and "names" in output


@pytest.fixture(scope="module")
def torchtitan(tmp_path_factory):
    """What runs of torchtitan on two data-parallel ranks leave, of two ages: (the last TOML release's, an early one's).

    Counters are tensors, the data position is a pickle per rank, and early on the losses are a torch.save in a BytesIO.
    """
    model = hf_model(FLAVOR)
    optimizer = adamw(model.parameters())
    tokens = torch.arange(64).view(2, 32)
    for _ in range(3):
        step_of(model, optimizer, tokens, tokens + 1, 64)
    module, theirs = renamed(model, FLAVOR), dict(model.named_parameters())
    states = {}
    for name, parameter in theirs.items():
        state = optimizer.state[parameter]
        for kind in ("exp_avg", "exp_avg_sq"):
            fqn, moment = native(name, state[kind], FLAVOR)
            states[f"state.{fqn}.{kind}"] = moment.clone()
        states[f"state.{fqn}.step"] = state["step"]
        states[f"param_groups.{fqn}.lr"] = 0.01
    losses = io.BytesIO()
    torch.save([1.0, 2.0], losses)
    common = {
        **{fqn: p.detach() for fqn, p in module.named_parameters()},
        "optimizer": states,
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": pickle.dumps({"_index": 1}), "dp_rank_1": pickle.dumps({}), "world_size": 2},
    }
    step = torch.tensor(3, dtype=torch.int32)
    counters = {
        "late": {"step": step, "ntokens_seen": torch.tensor(99)},
        "early": {"step": step, "global_avg_losses": losses},
    }
    root = tmp_path_factory.mktemp("torchtitan")
    for age, train_state in counters.items():
        dcp.save(common | {"train_state": train_state}, checkpoint_id=str(root / age / "step-3"), no_dist=True)
    return {age: root / age / "step-3" for age in counters}


def _resume(data, dump, path, *, exclude=("dataloader",)):
    checkpoint = {"initial_load_path": str(path), "initial_load_model_only": False, "exclude_from_loading": exclude}
    return make_config(data, dump, steps=4, checkpoint=checkpoint, **FSDP2)


def test_torchtitans_data_position_is_refused_with_the_way_out(pools, data, torchtitan, tmp_path):
    for output in pools[2].run(runs.run, _resume(data, tmp_path, torchtitan["late"], exclude=())):
        assert output.startswith("CheckpointError") and "a pickle for each of 2 data-parallel ranks" in output
        assert "everything else can be resumed" in output


@pytest.mark.parametrize(("age", "ntokens"), [("late", 99), pytest.param("early", 0, marks=pytest.mark.slow)])
def test_the_rest_of_torchtitans_state_is_resumed(pools, data, torchtitan, tmp_path, age, ntokens):
    path = torchtitan[age]
    config = _resume(data, tmp_path, path)
    progress = pools[2].run(runs.copy_step, config, path, tmp_path / "copy")
    assert {(p.step, p.units_seen, p.skipped_steps) for p in progress} == {(3, ntokens, 0)}
    loaded, stored = ({}, {})
    for state, folder in ((loaded, tmp_path / "copy"), (stored, path)):
        for fqn, p in hf_model(FLAVOR).named_parameters():
            name, values = native(fqn, p.detach(), FLAVOR)
            state[name] = torch.zeros_like(values)
            state |= {f"optimizer.state.{name}.{kind}": torch.zeros_like(values) for kind in ("exp_avg", "exp_avg_sq")}
            state[f"optimizer.state.{name}.step"] = torch.tensor(0.0)
        state["lr_scheduler.last_epoch"] = 0
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    assert all(torch.equal(torch.as_tensor(loaded[k]), torch.as_tensor(stored[k])) for k in stored)
    assert loaded["optimizer.state.norm.weight.step"] == loaded["lr_scheduler.last_epoch"] == 3

    (error, talk), _ = pools[2].run(runs.run_and_hear, config)
    assert error == "" and "dataloader" in talk and runs.read_losses(tmp_path).keys() == {4}
    assert ("train_state.global_avg_losses" in talk) == ("has no train_state.ntokens_seen" in talk)
    assert ("train_state.global_avg_losses" in talk) == (age == "early")


def test_an_older_layout_is_sent_to_reshard(pools, data, formats, tmp_path):
    (output,) = pools[1].run(runs.run, _resume_on_one(data, tmp_path, formats["torchtitan's older DCP"]))
    assert "names for weights and optimizer; a run resumes from native names" in output


def _resume_on_one(data, dump, path):
    checkpoint = {"initial_load_path": str(path), "initial_load_model_only": False}
    return make_config(data, dump, steps=4, checkpoint=checkpoint)
