"""Remarks on files and fields that are not weights: which are copied along with the weights, and which are not."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from converters.tokenizers import reader
from converters.tokenizers.assets import find_assets, find_documents
from tests.checkpoint_forms import FORMS, write_byte_ranks
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.models.llama import write_tokenizer

DOCUMENTS = {
    "README.md": b"# A card\r\n",
    "LICENSE": b"terms",
    "LICENSE.txt": b"more terms",
    "NOTICE": b"notice",
    "USE_POLICY.md": b"policy",
    "model_card.md": "ünï".encode(),
}


@pytest.fixture
def hf(hf, tmp_path):
    return shutil.copytree(hf, tmp_path / "hf")


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# Licence and model card


@pytest.mark.parametrize("via", ["dcp", "torch", "meta", "torchtune"])
def test_licence_and_model_card_go_along_and_come_back(tmp_path, via):
    write_llama(tmp_path / "hf", vocab_size=512, rope_scaling=None)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    write_byte_ranks(tmp_path / "hf" / "tokenizer.model")
    for name, content in DOCUMENTS.items():
        (tmp_path / "hf" / name).write_bytes(content)
    convert(tmp_path / "hf", tmp_path / "via", to=via)
    report = convert(tmp_path / "via", tmp_path / "back", to="hf")
    assert {name: (tmp_path / "back" / name).read_bytes() for name in DOCUMENTS} == DOCUMENTS
    assert set(DOCUMENTS) <= set(report.other_files)


def test_the_documents_of_a_snapshot_in_the_hub_s_cache_are_links_and_go_along(hf, tmp_path):
    (hf / "LICENSE").write_text("terms")
    convert(FORMS["hf cache, repository"].write(hf, tmp_path), tmp_path / "dcp", to="dcp")
    assert (tmp_path / "dcp" / "assets" / "LICENSE").read_text() == "terms"


def test_a_readme_without_weights_in_its_folder_is_not_the_model_s(hf, tmp_path):
    (hf / "README.md").write_text("a project")
    assert find_documents(hf).keys() == {"README.md"}
    (hf / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert find_documents(hf) == {} and "README.md" not in find_assets(hf)


def test_files_that_are_not_carried_are_listed(hf, tmp_path):
    (hf / "images").mkdir()
    (tmp_path / "elsewhere.md").write_text("another's")
    (hf / "README.md").symlink_to(tmp_path / "elsewhere.md")
    for name in ("preprocessor_config.json", "modeling_own.py", "training_args.bin", "LICENSE.py", ".gitattributes"):
        (hf / name).write_text("{}")
    (remark,) = convert(hf, tmp_path / "dcp", to="dcp").remarks
    assert remark == (
        "files that are not copied: LICENSE.py, README.md, images/, modeling_own.py, preprocessor_config.json, "
        "training_args.bin"
    )
    assert convert(tmp_path / "dcp", tmp_path / "back", to="hf").remarks == ()
    (tmp_path / "dcp" / "assets" / "notes.txt").write_text("mine")
    (remark,) = convert(tmp_path / "dcp", tmp_path / "again", to="hf").remarks
    assert remark == "files that are not copied: assets/notes.txt"


# The element type


def test_a_dtype_that_the_weights_do_not_have_is_named(hf, tmp_path):
    edit(hf / "config.json", dtype="bfloat16")
    (remark,) = convert(hf, tmp_path / "dcp", to="dcp").remarks
    assert remark == "config.json says dtype bfloat16, the weights are float32: the output says float32"
    report = convert(hf, tmp_path / "back", to="hf")
    assert report.remarks == (remark,)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"
    assert convert(hf, tmp_path / "cast", to="hf", dtype="bfloat16").remarks == ()
    edit(hf / "config.json", dtype=None, torch_dtype="torch.float16")
    assert "float16" in convert(hf, tmp_path / "other", to="dcp").remarks[0]


def test_weights_of_several_dtypes_are_named(hf, tmp_path):
    weights = load_file(hf / "model.safetensors")
    weights = {name: t if "norm" in name else t.to(torch.bfloat16) for name, t in weights.items()}
    save_file(weights, hf / "model.safetensors")
    edit(hf / "config.json", dtype="bfloat16")
    assert convert(hf, tmp_path / "dcp", to="dcp").remarks == ()  # nothing there says a dtype
    (remark,) = convert(hf, tmp_path / "back", to="hf").remarks
    assert "bfloat16 and float32; config.json says dtype bfloat16" in remark


# The tokenizer


def test_no_tokenizer_is_named(hf, tmp_path):
    (hf / "tokenizer.json").unlink()
    (remark,) = convert(hf, tmp_path / "dcp", to="dcp").remarks
    assert remark.startswith("no tokenizer: the source has none") and "--model-from" in remark


def test_a_tokenizer_larger_than_the_embedding_is_named(titan, tmp_path):
    write_llama(tmp_path / "hf", vocab_size=258)
    assert convert(tmp_path / "hf", tmp_path / "fits", to="dcp").remarks == ()
    (tmp_path / "hf").rename(tmp_path / "old")
    write_llama(tmp_path / "hf", vocab_size=250)
    code, out, _ = titan("convert", "hf-to-dcp", tmp_path / "hf", tmp_path / "dcp")
    assert code == 0 and "tokenizer.json has 258 token ids (the largest is 257), the embedding 250 rows" in out


def test_tokens_of_tokenizer_config_count(tmp_path):
    write_llama(tmp_path / "hf", vocab_size=258)
    edit(tmp_path / "hf" / "tokenizer_config.json", added_tokens_decoder={"300": {"content": "<a>"}})
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == 259
    assert "has 259 token ids" in convert(tmp_path / "hf", tmp_path / "dcp", to="dcp").remarks[0]


def test_tiktoken_s_ranks_count(tmp_path):
    write_llama(tmp_path / "hf", vocab_size=255, bos_token_id=0, eos_token_id=1)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    write_byte_ranks(tmp_path / "hf" / "tokenizer.model")
    remarks = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp").remarks
    assert any("tokenizer.model has 258 token ids (the largest is 257), the embedding 255 rows" in r for r in remarks)
    report = convert(tmp_path / "dcp", tmp_path / "back", to="hf")  # for which no tokenizer.json can be made
    assert any("tokenizer.model has 258 token ids" in remark for remark in report.remarks)
    assert "tokenizer.model" in report.other_files and "tokenizer.json" not in report.other_files


def test_a_tokenizer_that_cannot_be_read_goes_along_with_a_remark(tmp_path):
    write_llama(tmp_path / "plain", rope_scaling=None)
    (tmp_path / "plain" / "tokenizer.json").write_text("{")
    for to, name in (("dcp", "assets/tokenizer.json"), ("meta", "tokenizer.json"), ("hf", "tokenizer.json")):
        report = convert(tmp_path / "plain", tmp_path / to, to=to)
        assert name in report.other_files
        assert any("tokenizer.json is copied unread" in remark for remark in report.remarks)


def test_the_tokenizer_is_parsed_once(hf, tmp_path, monkeypatch):
    """It may be 30 MB of JSON; the token ids come from it too, where there is no generation config."""
    (hf / "generation_config.json").unlink()
    edit(hf / "config.json", bos_token_id=None, eos_token_id=None)
    read, parsed = reader.read_tokenizer_json, []
    monkeypatch.setattr(reader, "read_tokenizer_json", lambda path: parsed.append(path) or read(path))
    convert(hf, tmp_path / "dcp", to="dcp")
    assert parsed == [hf / "tokenizer.json"]
    write_tokenizer(hf)  # changed: read again
    edit(hf / "tokenizer.json", truncation=None, padding=None)
    convert(hf, tmp_path / "other", to="dcp")
    assert len(parsed) == 2
