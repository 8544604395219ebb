"""Commands on a folder with two sets of weights and two tokenizers: the choice of transformers, and notes."""

import base64
import json
import shutil

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.greedy_reference import greedy
from tests.tiny_llama import write_llama

PROMPT = "import os, 12"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model.safetensors beside an index with other values; a tokenizer.model in another order than tokenizer.json's."""
    folder = tmp_path_factory.mktemp("two")
    write_llama(folder, vocab_size=302, rope_scaling=None)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    other = {name: tensor.flip(0).contiguous() for name, tensor in state.items()}
    safetensors.torch.save_file(other, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(state, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    lines = [b"%s %d\n" % (base64.b64encode(bytes([255 - rank])), rank) for rank in range(256)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


def test_infer_reports_which_files_it_reads(titan, folder):
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids
    (said,) = greedy(AutoModelForCausalLM.from_pretrained(folder).eval(), [prompt], 6)
    code, out, err = titan("infer", folder, "--prompt", PROMPT, "--max-new-tokens", 6, "--ignore-eos", "--json")
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert (result["prompt_tokens"], result["tokens"]) == (prompt, said.tokens)
    assert "model.safetensors.index.json is not read: transformers takes model.safetensors" in err
    assert "tokenizer.json and tokenizer.model give other ids" in err and "tokenizer.json is read" in err


def test_convert_reports_which_files_it_reads(titan, folder, tmp_path):
    code, out, err = titan("convert", "auto", folder, tmp_path / "meta", "--to", "meta", "--dry-run")
    assert code == 0, err
    assert "model-00001-of-00001.safetensors is not read: transformers takes model.safetensors" in out
    assert "give other ids" in out and "Meta's code reads tokenizer.model" in out


def test_data_prepare_reports_which_tokenizer_it_reads(titan, folder, tmp_path):
    (tmp_path / "text.txt").write_text("some words and more of them\n\n" * 400)
    code, _, err = titan("data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "data", "--tokenizer", folder)
    assert code == 0 and "tokenizer.json is read" in err, err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_other_commands_name_the_unread_files(titan, folder, command):
    code, out, _ = titan(command, folder)
    assert code == 0 and "model.safetensors.index.json is not read" in out


def test_names_of_wrappers_and_a_file_s_own_name(titan, folder, tmp_path):
    state = safetensors.torch.load_file(folder / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    torch.save({f"module._orig_mod.{name}": tensor for name, tensor in state.items()}, tmp_path / "ddp.pt")
    code, out, _ = titan("inspect", tmp_path)
    assert code == 0 and f"note:  names: removed the prefix `module.` ({len(state)} tensors)" in out
    code, out, _ = titan("diff", folder, tmp_path)
    assert code == 0 and f"note: {tmp_path}: names: removed the prefix `_orig_mod.`" in out
    code, _, err = titan("infer", tmp_path / "ddp.pt", "--prompt", "a", "--max-new-tokens", 1)
    assert code == 0 and "names: removed the prefix `module.`" in err
