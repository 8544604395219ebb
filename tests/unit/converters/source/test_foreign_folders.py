"""Folders as other tools leave them: the message names the tool, and the path that it names works."""

import shlex
import socket
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from converters.common.box import Box
from converters.common.errors import TitanError
from converters.containers.base import Container, Listing
from converters.containers.registry import CONTAINERS
from converters.engine.read import CatalogReader
from converters.source.open import open_checkpoint
from converters.source.weights import native_weights
from converters.verify import verify
from converters.views.catalog import Catalog, Chunk, TensorEntry

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=70
    )
    return LlamaForCausalLM(config)


def shards(model, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(model.state_dict()), folder / SHARD)


def fsdp(model, folder: Path) -> None:
    dcp.save({"model": dict(model.state_dict())}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": {"lr": torch.ones(1)}}, checkpoint_id=folder / "optimizer_0")


def automodel(model, folder: Path, *, latest: str = "link") -> None:
    for step in (1, 2, 10):
        shards(model, folder / f"epoch_0_step_{step}/model")
        model.config.save_pretrained(folder / f"epoch_0_step_{step}/model/.hf_metadata")
        dcp.save({"optim": {"lr": torch.ones(1)}}, checkpoint_id=folder / f"epoch_0_step_{step}/optim")
    (folder / "epoch_0_step_10/.incomplete").touch()
    if latest == "link":
        (folder / "LATEST").symlink_to("epoch_0_step_1")
    elif latest:
        (folder / "LATEST.txt").write_text("epoch_0_step_1\n")


def trainer(model, folder: Path) -> None:
    for step in (9, 10):
        model.save_pretrained(folder / f"checkpoint-{step}")


def trainer_fsdp(model, folder: Path) -> None:
    model.config.save_pretrained(folder)
    for step in (9, 10):
        fsdp(model, folder / f"checkpoint-{step}")


def torchtitan(model, folder: Path) -> None:
    shards(model, folder / "step-2/sharded")
    model.save_pretrained(folder / "step-2")


def deepspeed(model, folder: Path) -> None:
    step = folder / "global_step4"
    step.mkdir(parents=True)
    model.config.save_pretrained(folder)
    (folder / "latest").write_text("global_step4")
    state = {"module": dict(model.state_dict()), "ds_version": "0.17.0", "global_steps": 4}
    torch.save(state, step / "mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save({"optimizer_state_dict": {}}, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def universal(model, folder: Path) -> None:
    """As ds_to_universal.py writes it of ZeRO 3, without the moments."""
    for name, tensor in model.state_dict().items():
        place = folder / "global_step4_universal/zero" / name
        place.mkdir(parents=True)
        torch.save({"param": tensor}, place / "fp32.pt")
    torch.save({"param_groups": []}, folder / "global_step4_universal/zero/optimizer_state.pt")
    model.config.save_pretrained(folder)


def ranks(model, folder: Path, name: str) -> None:
    """The files of the one rank of a job."""
    (folder / "run").mkdir()
    torch.save(dict(model.state_dict()), folder / "run" / name)
    model.config.save_pretrained(folder / "FOLDER")


def torch_checkpointing(model, folder: Path) -> None:
    ranks(model, folder, "model_0.pt")
    torch.save({"step": 1}, folder / "run/step_0.pt")
    torch.save({}, folder / "run/metadata.pkl")


# kind → how it is made, the folder that the user gives, where the last `try:` leads
LEADS = {
    "Automodel": (automodel, "", "epoch_0_step_1/model"),
    "Automodel, LATEST.txt": (lambda m, f: automodel(m, f, latest="text"), "", "epoch_0_step_1/model"),
    "Automodel, no LATEST": (lambda m, f: automodel(m, f, latest=""), "", "epoch_0_step_2/model"),
    "Automodel, a step": (automodel, "epoch_0_step_2", "epoch_0_step_2/model"),
    "Trainer": (trainer, "", "checkpoint-10"),
    "Trainer, FSDP": (trainer_fsdp, "", "checkpoint-10/pytorch_model_fsdp_0"),
    "torchtitan, last step for Hugging Face": (torchtitan, "", "step-2"),
    "DeepSpeed, ZeRO 2": (deepspeed, "", "global_step4/mp_rank_00_model_states.pt"),
    "DeepSpeed, universal": (universal, "global_step4_universal", "global_step4_universal.pt"),
    "DeepSpeed, universal, zero": (universal, "global_step4_universal/zero", "global_step4_universal.pt"),
    "DeepSpeed, universal, a run": (universal, "", "global_step4_universal.pt"),
    "Accelerate, ranks": (lambda m, f: ranks(m, f, "pytorch_model_fsdp_0_rank0.bin"), "run", "run-joined"),
    "torch_checkpointing": (torch_checkpointing, "run", "run-joined"),
    "DeepSpeed, ZeRO 2, a step": (deepspeed, "global_step4", "global_step4/mp_rank_00_model_states.pt"),
}


def run_here(command: str, monkeypatch) -> None:
    """Run the Python code of a command in this process, as the one rank where torchrun would start it."""
    *start, code = shlex.split(command)
    if start[0] == "torchrun":
        assert start[1:] == ["--nproc_per_node", "1", "--no-python", "python", "-c"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
    try:
        exec(code, {})
    finally:
        if start[0] == "torchrun":
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", LEADS)
def test_the_path_that_the_message_names_works(kind, model, tmp_path, monkeypatch):
    make, given, expected = LEADS[kind]
    make(model, tmp_path)
    with pytest.raises(TitanError) as caught:
        open_checkpoint(tmp_path / given)
    *commands, last = caught.value.tries
    place, *option = shlex.split(last.replace("FOLDER", str(tmp_path / "FOLDER")))
    if commands and not Path(place).exists():
        run_here(commands[-1], monkeypatch)
    assert place == str(tmp_path / expected)
    assert option[:1] in ([], ["--model-from"])
    with native_weights(open_checkpoint(place), model_from=option[1] if option else None) as weights:
        assert weights.info.args.num_layers == 2 and len(weights.tensors) == len(model.state_dict())


def test_shards_find_the_config_of_the_folder_above(model, tmp_path):
    torchtitan(model, tmp_path)
    with native_weights(open_checkpoint(tmp_path / "step-2/sharded")) as weights:
        assert weights.info.args.dim == 32


def zero_3(folder: Path) -> None:
    for rank in range(2):
        state = {"module": {"w": torch.empty(0)}, "param_shapes": [{"w": torch.Size([4])}]}
        (folder / "global_step4").mkdir(exist_ok=True)
        torch.save(state, folder / f"global_step4/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def names(*files: str):
    def make(folder: Path) -> None:
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            torch.save({"w": torch.ones(2)}, folder / name)

    return make


REFUSED = {
    "DeepSpeed, ZeRO 3": (zero_3, "ZeRO-3", "zero_to_fp32.py"),
    "torch_checkpointing": (
        names("metadata.pkl", "model_0.pt", "model_1.pt", "step_0.pt"),
        "torch_checkpointing",
        "--nproc_per_node 2",
    ),
    "steps of torch_checkpointing": (
        names("step-1/metadata.pkl", "step-1/model_0.pt", "step-2/metadata.pkl", "step-2/model_0.pt"),
        "torch_checkpointing",
        "",
    ),
    "verl": (names("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"), "verl", "verl.model_merger"),
    "Accelerate": (
        names("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin"),
        "Accelerate",
        "--nproc_per_node 2",
    ),
    "PEFT": (names("adapter_model.bin"), "LoRA adapter", "merge_and_unload"),
    "PEFT, a run": (
        names("checkpoint-2/adapter_model.bin", "checkpoint-10/adapter_model.bin"),
        "PEFT",
        "checkpoint-10",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_read_is_refused_by_its_tools_name(kind, tmp_path):
    make, called, tried = REFUSED[kind]
    make(tmp_path)
    with pytest.raises(TitanError) as caught:
        open_checkpoint(tmp_path)
    assert called in caught.value.message
    assert caught.value.hint
    assert tried in " ".join(caught.value.tries)


@pytest.mark.parametrize("key", ["optimizer", "optim", "optimizers"])
def test_an_optimizer_alone_is_called_so(key, model, tmp_path):
    """As Accelerate, transformers and Automodel write it beside the weights."""
    states = {f"state.{name}.exp_avg": tensor for name, tensor in model.state_dict().items()}
    dcp.save({key: states}, checkpoint_id=tmp_path, no_dist=True)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(TitanError, match="the state of an optimizer, without weights"):
        native_weights(open_checkpoint(tmp_path))


def test_names_of_litgpt_lead_to_its_converter(tmp_path):
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path / "lit")
    names("lit_model.pth")(tmp_path / "lit")
    torch.save({"model": {"transformer.h.0.attn.qkv.weight": torch.ones(2, 2)}}, tmp_path / "lit/lit_model.pth")
    with pytest.raises(TitanError, match="litgpt's names") as caught:
        native_weights(open_checkpoint(tmp_path / "lit"))
    assert caught.value.tries[0] == f"litgpt convert_from_litgpt {tmp_path / 'lit'} {tmp_path / 'lit-hf'}"


def test_a_file_with_one_ranks_part_is_called_so(tmp_path):
    path = tmp_path / "part.bin"
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as source:
        raw = {name: source.read(name) for name in source.namelist()}
    pickle = next(name for name in raw if name.endswith("data.pkl"))
    raw[pickle] = b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\nctorch.distributed.tensor\nDTensor\n."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for name, content in raw.items():
            target.writestr(name, content)
    with pytest.raises(TitanError, match="holds a DTensor, of which a file has only one rank's part"):
        open_checkpoint(path)


def test_storages_with_numbers_for_names_as_litgpt_writes(tmp_path):
    saved, path = tmp_path / "saved.pth", tmp_path / "lit_model.pth"
    torch.save({"lm_head.weight": torch.arange(6.0)}, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            raw = source.read(name)
            if name.endswith("data.pkl"):  # the text "0" becomes the number 0
                assert raw.count(b"X\x01\x00\x00\x000") == 1
                raw = raw.replace(b"X\x01\x00\x00\x000", b"K\x00")
            target.writestr(name, raw)
    assert torch.load(path, weights_only=True)["lm_head.weight"].tolist() == [0, 1, 2, 3, 4, 5]
    catalog = open_checkpoint(path)
    with CatalogReader(catalog) as reader:
        assert reader.read("lm_head.weight", Box.whole((6,))).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_found", [True, False])
def test_a_container_from_outside_is_asked_before_the_tools_name_is_told(is_found, tmp_path, monkeypatch):
    names("metadata.pkl", "model_0.pt")(tmp_path)
    (tmp_path / "model_0.pt").write_bytes(torch.arange(4.0).numpy().tobytes())

    def open_folder(files: Listing) -> Catalog:
        chunk = Chunk(Box.whole((4,)), "model_0.pt", 0, (1,))
        return Catalog(files.store, "of_ranks", {"w": TensorEntry("w", "float32", (4,), (chunk,))})

    container = Container(
        name="of_ranks",
        called="files of ranks",
        title="Files of ranks",
        suffixes=(".pt",),
        find=lambda files: "metadata.pkl" if is_found else "",
        open_folder=open_folder,
        keeps_state=True,  # its chunks are located, in no items
    )
    monkeypatch.setitem(CONTAINERS, "of_ranks", container)
    if not is_found:
        with pytest.raises(TitanError, match="torch_checkpointing"):
            open_checkpoint(tmp_path)
        return
    with CatalogReader(open_checkpoint(tmp_path)) as reader:
        assert reader.read("w", Box.whole((4,))).tolist() == [0, 1, 2, 3]
    statuses = {check.name: check.outcome for check in verify(tmp_path).checks}
    assert statuses["structure"] == "ok" and "failed" not in statuses.values(), statuses
