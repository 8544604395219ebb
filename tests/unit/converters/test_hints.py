"""Hints lead somewhere: each suggestion is taken, and what it leads to is accepted."""

import gzip
import json
import subprocess

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from converters.common.errors import CheckpointError, TitanError, UnsupportedError
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from tests.doors import convert
from tests.unit.converters.samples import raw, read_all, save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
)  # fmt: skip


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in LlamaForCausalLM(CONFIG).state_dict().items()}


def several_torch_files(folder, state):
    torch.save(state, folder / "b.pt")
    torch.save({"seed": 5}, folder / "a.pt")
    CONFIG.save_pretrained(folder)


def accelerate_s(folder, state):
    """As save_state writes it under FSDP; config.json is the user's."""
    save_dcp(folder / "pytorch_model_fsdp_0", {"model": state})
    save_dcp(folder / "optimizer_0", {"optimizer": {"state": {"lm_head.weight": {"exp_avg": torch.zeros(3)}}}})
    torch.save({"last_epoch": 1}, folder / "scheduler.bin")
    torch.save({"epoch": 1}, folder / "sampler_1.bin")
    CONFIG.save_pretrained(folder)


def trainer_s(folder, state):
    for step in (500, 1000):
        place = folder / f"checkpoint-{step}"
        place.mkdir()
        safetensors.torch.save_file(state, place / "model.safetensors", metadata={"format": "pt"})
        CONFIG.save_pretrained(place)
    CONFIG.save_pretrained(folder)


def index_alone(folder, state):
    LlamaForCausalLM(CONFIG).save_pretrained(folder, max_shard_size="6KB")
    return folder / "model.safetensors.index.json"


def metadata_alone(folder, state):
    save_dcp(folder, state)
    CONFIG.save_pretrained(folder)
    return folder / "__0_0.distcp"


def one_shard(folder, state):
    for rank, name in enumerate(("shard-00001-model-00001-of-00001", "shard-00002-model-00001-of-00001")):
        part = {n: t.chunk(2)[rank].contiguous() for n, t in state.items()}
        offsets = {n: {"saved_offsets": [len(p) * rank, *(0 for _ in p.shape[1:])]} for n, p in part.items()}
        info = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
        safetensors.torch.save_file(part, folder / f"{name}.safetensors", metadata=info)
    CONFIG.save_pretrained(folder)
    return folder / "shard-00002-model-00001-of-00001.safetensors"


def wrong_name(folder, state):
    (folder / "model").mkdir()
    safetensors.torch.save_file(state, folder / "model/model.safetensors")
    CONFIG.save_pretrained(folder / "model")
    return folder / "modle"


def linked_out(folder, state):
    (folder / "real").mkdir()
    (folder / "linked").mkdir()
    safetensors.torch.save_file(state, folder / "real/model.safetensors")
    CONFIG.save_pretrained(folder / "real")
    for name in ("model.safetensors", "config.json"):
        (folder / "linked" / name).symlink_to(folder / "real" / name)
    return folder / "linked"


PLACES = [
    several_torch_files,
    accelerate_s,
    trainer_s,
    index_alone,
    metadata_alone,
    one_shard,
    wrong_name,
    linked_out,
]


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_every_place_that_is_suggested_opens(state, tmp_path, make):
    path = make(tmp_path, state) or tmp_path
    with pytest.raises(TitanError) as caught:
        open_checkpoint(path)
    assert caught.value.tries
    for suggestion in caught.value.tries:
        if suggestion.startswith("cp "):
            subprocess.run(suggestion.split(), check=True)
            suggestion = suggestion.split()[-1]
        place, _, model = suggestion.partition(" --model-from ")
        with open_native(place, model_from=model or None) as weights:
            assert weights.naming == "hf"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.gz"])
def test_what_is_compressed(state, tmp_path, name):
    safetensors.torch.save_file(state, tmp_path / "plain")
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    (tmp_path / "plain").unlink()
    with pytest.raises(CheckpointError, match="compressed with gzip") as caught:
        open_checkpoint(tmp_path / name)
    (suggestion,) = caught.value.tries
    subprocess.run(suggestion, shell=True, check=True)
    assert open_checkpoint(suggestion.split(" > ")[1]).tensors.keys() == state.keys()


def test_a_legacy_torch_file(state, tmp_path):
    """The hint: load it once with torch.load(weights_only=True) and save it again with torch.save."""
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="x.pt: a legacy torch file"):
        open_checkpoint(tmp_path / "x.pt")
    torch.save(torch.load(tmp_path / "x.pt", weights_only=True), tmp_path / "x.pt")
    assert open_checkpoint(tmp_path / "x.pt").tensors.keys() == state.keys()


def test_files_of_ranks_are_not_suggested(tmp_path):
    """Each holds a DTensor, of which one file has one rank's part: that is the error, not the one after it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        (tmp_path / "x").mkdir()
        for rank in range(2):
            torch.save({"w": tensor}, tmp_path / f"x/rank_{rank}.pt")
    finally:
        dist.destroy_process_group()
    with pytest.raises(UnsupportedError, match="rank_0.pt.*DTensor") as caught:
        open_checkpoint(tmp_path / "x")
    assert caught.value.tries == ()


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/model.safetensors").symlink_to(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match=r"broken links:\n  model.safetensors → ") as caught:
        open_checkpoint(tmp_path / "x")
    assert caught.value.tries == ()


def test_dcp_data_alone_is_not_sent_to_its_folder(tmp_path):
    folder = save_dcp(tmp_path / "x", {"w": torch.zeros(3)})
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="a part of a checkpoint") as caught:
        open_checkpoint(folder / "__0_0.distcp")
    assert caught.value.tries == () and ".metadata, which lists its contents, is missing" in caught.value.hint


# ---- shards of DCP's HuggingFaceStorageWriter, which were suggested one by one


def test_shards_of_dcp_s_safetensors_writer_are_joined(state, tmp_path):
    one_shard(tmp_path, state)
    catalog = open_checkpoint(tmp_path)
    assert read_all(catalog) == {name: raw(tensor) for name, tensor in state.items()}
    (tmp_path / "single").mkdir()
    safetensors.torch.save_file(state, tmp_path / "single/model.safetensors", metadata={"format": "pt"})
    CONFIG.save_pretrained(tmp_path / "single")
    convert(tmp_path / "single", tmp_path / "a", to="dcp")
    shards = tmp_path / "shards"
    shards.mkdir()
    one_shard(shards, state)
    convert(shards, tmp_path / "b", to="dcp")
    assert read_manifest(tmp_path / "a").tensors == read_manifest(tmp_path / "b").tensors
    (shards / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="do not cover these tensors"):
        open_checkpoint(shards)


def test_what_the_writer_itself_makes(state, tmp_path):
    folder = tmp_path / "x"
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True)
    assert read_all(open_checkpoint(folder)) == {name: raw(tensor) for name, tensor in state.items()}
