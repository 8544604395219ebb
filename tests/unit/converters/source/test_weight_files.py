"""Folders with several sets of weights: what transformers takes is read, the rest is named."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from converters.common.box import Box
from converters.common.errors import CheckpointError, UnsupportedError
from converters.diff import diff
from converters.formats.base import OutputOptions
from converters.inspect import inspect_checkpoint
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert
from tests.unit.converters.samples import save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG)


def put(folder, kind: str, seed: int) -> None:
    """Weights of their own values in `folder`, as transformers' and other tools' writers call them."""
    made, state = model(seed), model(seed).state_dict()
    state = {name: tensor.clone() for name, tensor in state.items()}
    match kind:
        case "single":
            made.save_pretrained(folder)
        case "sharded":
            extra = folder / "_sharded"
            made.save_pretrained(extra, max_shard_size="6KB")
            for path in extra.glob("model*"):
                shutil.move(path, folder / path.name)
            shutil.rmtree(extra)
        case "bin":
            torch.save(state, folder / "pytorch_model.bin")
        case "sharded bin":
            names = sorted(state)
            files = {name: f"pytorch_model-0000{1 + (i % 2)}-of-00002.bin" for i, name in enumerate(names)}
            for file in set(files.values()):
                torch.save({n: state[n] for n in names if files[n] == file}, folder / file)
            index = {"metadata": {}, "weight_map": files}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        case "variant" | "consolidated.safetensors" | "own.safetensors" | "original":
            name = {"variant": "model.fp16.safetensors", "original": "consolidated.00.pth"}.get(kind, kind)
            if kind == "original":
                (folder / "original").mkdir()
                torch.save(state, folder / "original" / name)
            else:
                safetensors.torch.save_file(state, folder / name, metadata={"format": "pt"})
        case "consolidated.00.pth":
            torch.save(state, folder / kind)
        case "tf_model.h5" | "flax_model.msgpack" | "model.gguf" | "model.onnx":
            (folder / kind).write_bytes(b"other weights")
        case _:
            raise AssertionError(kind)


def embedding(folder) -> torch.Tensor:
    """What titan reads."""
    with open_native(folder) as weights:
        shape = weights.source.tensors["tok_embeddings.weight"].shape
        return torch.from_numpy(weights.source.read("tok_embeddings.weight", Box.whole(shape)))


SETS = [
    ("single", "bin"),
    ("single", "sharded bin"),
    ("sharded", "bin"),
    ("sharded", "sharded bin"),
    ("sharded", "variant"),
    ("bin", "variant"),
    ("bin", "own.safetensors"),
    ("single", "consolidated.safetensors"),
    ("sharded bin", "consolidated.safetensors"),
    ("single", "consolidated.00.pth"),
    ("bin", "consolidated.00.pth"),
    ("sharded", "original"),
    ("bin", "model.gguf"),
    ("single", "tf_model.h5"),
    ("single", "flax_model.msgpack"),
    ("single", "model.onnx"),
    ("single", "bin", "sharded bin", "variant", "consolidated.00.pth"),
]


@pytest.mark.parametrize("kinds", SETS, ids="+".join)
def test_what_transformers_takes_is_read_and_the_rest_named(tmp_path, kinds):
    for seed, kind in enumerate(kinds):
        put(tmp_path, kind, seed)
    CONFIG.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight.detach()
    assert torch.equal(embedding(tmp_path), theirs)
    files = {path.name for path in tmp_path.iterdir() if path.name not in ("config.json", "generation_config.json")}
    catalog = open_checkpoint(tmp_path)
    read = {chunk.file for entry in catalog.tensors.values() for chunk in entry.chunks}
    output = " ".join(catalog.notes)
    entry = next(f for f in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                             "pytorch_model.bin.index.json") if f in files)  # fmt: skip
    for name in files - read - {entry}:
        assert name in output or "-of-" in name, (name, output)
    assert f"transformers takes {entry}" in output


def put_shards(folder, seed: int, *, of: int = 1) -> None:
    """As DCP's HuggingFaceStorageWriter(save_distributed=True) writes them on two ranks: each tensor in two parts."""
    state, half = model(seed).state_dict(), len(model(seed).state_dict()) // 2
    for rank in range(2):
        for number in range(1, of + 1):
            names = list(state) if of == 1 else [*state][(number - 1) * half :] if number == of else [*state][:half]
            parts = {name: torch.chunk(state[name], 2)[rank].clone() for name in names}
            info = {n: {"saved_offsets": [rank * len(p), *[0] * (p.dim() - 1)]} for n, p in parts.items()}
            metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
            name = f"shard-{rank + 1:05}-model-{number:05}-of-{of:05}.safetensors"
            safetensors.torch.save_file(parts, folder / name, metadata=metadata)
    CONFIG.save_pretrained(folder)


MIXTURES = [("single", "sharded"), ("bin", "sharded bin"), ("shards", "single"), ("shards", "sharded")]
MIXTURES += [("shards", "bin"), ("shards", "own.safetensors"), ("single", "sharded", "bin")]


@pytest.mark.parametrize("kinds", MIXTURES, ids="+".join)
def test_whole_and_sharded_files_are_not_chosen_between(tmp_path, kinds):
    folder = tmp_path / "src"
    folder.mkdir()
    for seed, kind in enumerate(kinds):
        put_shards(folder, seed) if kind == "shards" else put(folder, kind, seed)
    CONFIG.save_pretrained(folder)
    for command in (open_checkpoint, inspect_checkpoint, lambda path: convert(path, tmp_path / "out", to="dcp")):
        with pytest.raises(CheckpointError, match="holds the weights twice, whole and in parts"):
            command(folder)
    assert not verify(folder).ok
    if "shards" not in kinds:  # what transformers would take can be named
        path = next(p for p in (folder / "model.safetensors", folder / "pytorch_model.bin") if p.exists())
        assert torch.equal(embedding(path), model(0).model.embed_tokens.weight)


def test_parts_without_an_index_are_a_series_too(tmp_path):
    put(tmp_path, "single", 0)
    put(tmp_path, "sharded", 1)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)model.safetensors\n  model-00001-of-.* to model-"):
        open_checkpoint(tmp_path)


def test_an_index_without_parts_decides_nothing(tmp_path):
    """Some published folders have one that names the whole file."""
    put(tmp_path, "single", 0)
    index = {"metadata": {}, "weight_map": dict.fromkeys(model(0).state_dict(), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(embedding(tmp_path), model(0).model.embed_tokens.weight)


@pytest.mark.parametrize("of", [1, 2])
def test_shards_alone_are_joined(tmp_path, of):
    put_shards(tmp_path, 0, of=of)
    assert torch.equal(embedding(tmp_path), model(0).model.embed_tokens.weight)
    assert inspect_checkpoint(tmp_path).model_problem == ""


def test_shards_whose_names_contradict_one_another(tmp_path):
    put_shards(tmp_path, 0, of=2)
    last = tmp_path / "shard-00002-model-00002-of-00002.safetensors"
    last.rename(tmp_path / "shard-00002-model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="shards of several saves, by their names: -of-00002, -of-00003"):
        inspect_checkpoint(tmp_path)
    for path in tmp_path.glob("*-model-00002-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"shards are missing:\n  shard-\*-model-00002-of-00002.safetensors"):
        inspect_checkpoint(tmp_path)


def test_inspect_reports_tensors_that_contradict_the_config(tmp_path):
    """Without the last rank's file every tensor is smaller, and nothing in the files says so."""
    put_shards(tmp_path, 0)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    found = inspect_checkpoint(tmp_path)
    assert found.naming == "hf" and found.model is not None
    assert "model.embed_tokens.weight  is [16, 16], should be [32, 16]" in found.model_problem


@pytest.mark.parametrize("kind", ["bin", "sharded bin"])
def test_torch_files_of_another_model_beside_safetensors(tmp_path, kind):
    other = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 3})
    put(tmp_path, "single", 0)
    if kind == "bin":
        torch.save(LlamaForCausalLM(other).state_dict(), tmp_path / "pytorch_model.bin")
    else:
        put(tmp_path, kind, 1)
        path = tmp_path / "pytorch_model-00001-of-00002.bin"
        torch.save({n: t[:1].clone() for n, t in torch.load(path).items()}, path)
    with pytest.raises(CheckpointError, match="holds other weights as safetensors than as torch files"):
        open_checkpoint(tmp_path)


def test_a_file_that_the_config_names_comes_first(tmp_path):
    put(tmp_path, "single", 0)
    put(tmp_path, "own.safetensors", 1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "own.safetensors"}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight.detach()
    assert torch.equal(embedding(tmp_path), theirs) and torch.equal(theirs, model(1).model.embed_tokens.weight)
    (tmp_path / "own.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"transformers_weights is own.safetensors, and there is no such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "own.bin").touch()
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "own.bin"}))
    with pytest.raises(ValueError, match="neither a safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"transformers_weights is own.bin, and transformers takes only"):
        open_checkpoint(tmp_path)


def test_metas_files_in_original_are_named_once(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    put(folder, "single", 0)
    put(folder, "original", 1)
    (remark,) = [text for text in convert(folder, tmp_path / "dcp", to="dcp").remarks if "original" in text]
    assert remark.startswith("original/consolidated.00.pth is not read")


def test_every_command_names_what_it_does_not_read(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    put(folder, "single", 0)
    put(folder, "sharded bin", 1)
    output = "pytorch_model.bin.index.json is not read: transformers takes model.safetensors"
    series = "pytorch_model-00001-of-"
    for notes in (
        convert(folder, tmp_path / "dcp", to="dcp").remarks,
        inspect_checkpoint(folder).notes,
        [line for check in verify(folder).checks if check.outcome == "warning" for line in check.problems],
    ):
        assert output in notes and any(note.startswith(series) and " to pytorch_model-" in note for note in notes)
    report = diff(folder, tmp_path / "dcp")
    assert report.equal and f"{folder}: {output}" in report.remarks


@pytest.mark.parametrize("second", ["single", "bin", "sharded bin", "consolidated.00.pth"])
def test_nothing_decides_between_dcp_and_other_weights(tmp_path, second):
    folder = save_dcp(tmp_path / "dcp", model(0).state_dict())
    put(folder, second, 1)
    CONFIG.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"more than one checkpoint:\n  DCP \(.metadata\)"):
        open_checkpoint(folder)


@pytest.mark.parametrize("first", ["bin", "own.safetensors", "single"])
def test_nothing_decides_between_meta_s_shards_and_others_without_a_config(tmp_path, first):
    put(tmp_path, first, 0)
    put(tmp_path, "consolidated.00.pth", 1)
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="more than one checkpoint"):
        open_checkpoint(tmp_path)


def test_files_of_no_usual_name_are_not_chosen_between(tmp_path):
    put(tmp_path, "own.safetensors", 0)
    torch.save(model(1).state_dict(), tmp_path / "own.pt")
    with pytest.raises(CheckpointError, match=r"more than one checkpoint:\n  own.safetensors\n  own.pt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("name", "kind"), [("model.gguf", "GGUF"), ("tf_model.h5", "TensorFlow")])
def test_weights_of_other_frameworks_alone(tmp_path, name, kind):
    put(tmp_path, name, 0)
    with pytest.raises(UnsupportedError, match=f"its weights are {kind} files, which are not supported:\n  {name}"):
        open_checkpoint(tmp_path)


def test_weights_saved_into_titan_s_folder_later(tmp_path):
    """They come first for transformers, and the manifest says nothing about them."""
    (tmp_path / "src").mkdir()
    put(tmp_path / "src", "single", 0)
    convert(tmp_path / "src", tmp_path / "hf", to="hf", options=OutputOptions(shard_bytes=4000))
    put(tmp_path / "hf", "bin", 1)
    assert torch.equal(embedding(tmp_path / "hf"), model(0).model.embed_tokens.weight)
    put(tmp_path / "hf", "own.safetensors", 1)
    shutil.move(tmp_path / "hf/own.safetensors", tmp_path / "hf/model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)weights twice, whole and in parts.*model-00001-of-"):
        open_checkpoint(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()  # the hint's way out
    assert torch.equal(embedding(tmp_path / "hf"), model(0).model.embed_tokens.weight)


# ---- LoRA adapters

PEFT_NAMES = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 16)}
TORCHTUNE_NAMES = {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, 16)}


def test_an_adapter_that_transformers_adds_is_refused(tmp_path):
    """transformers 5.23 with PEFT 0.21 gives the logits of the adapted model for such a folder."""
    put(tmp_path, "single", 0)
    safetensors.torch.save_file(PEFT_NAMES, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "base_model_name_or_path": "x"}')
    with pytest.raises(UnsupportedError, match=r"transformers adds the LoRA adapter \(adapter_model.safetensors\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()  # transformers: FileNotFoundError
    with pytest.raises(UnsupportedError, match="whose file is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").unlink()  # the hint's way out
    assert torch.equal(embedding(tmp_path), model(0).model.embed_tokens.weight)


def test_an_adapter_without_its_config_is_not_added(tmp_path):
    put(tmp_path, "single", 0)
    safetensors.torch.save_file(PEFT_NAMES, tmp_path / "adapter_model.safetensors")
    assert open_checkpoint(tmp_path).unread == {
        "adapter_model.safetensors": "a LoRA adapter without adapter_config.json: transformers does not apply it"
    }


def test_torchtune_s_epoch_folder_is_known_by_its_own_adapter(tmp_path):
    put(tmp_path, "single", 0)
    safetensors.torch.save_file(PEFT_NAMES, tmp_path / "adapter_model.safetensors")
    torch.save(TORCHTUNE_NAMES, tmp_path / "adapter_model.pt")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    unread = open_checkpoint(tmp_path).unread
    assert set(unread) == {"adapter_model.safetensors", "adapter_model.pt", "adapter_config.json"}
    assert "torchtune's" in unread["adapter_model.pt"] and "not checked here" in unread["adapter_model.pt"]
    assert "remove this file" in unread["adapter_config.json"]
    torch.save(PEFT_NAMES, tmp_path / "adapter_model.pt")  # not torchtune's names: nothing says it is merged
    with pytest.raises(UnsupportedError, match="adds the LoRA adapter"):
        open_checkpoint(tmp_path)
