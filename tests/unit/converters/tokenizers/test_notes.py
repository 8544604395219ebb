"""Begin and end tokens that only tokenizer_config.json names get the ids that transformers gives them."""

import json

import pytest
from transformers import AutoTokenizer

from converters.common.errors import CheckpointError
from converters.tokenizers.assets import find_assets, read_token_ids
from converters.tokenizers.notes import tokenizer_notes
from converters.tokenizers.tokenizer import load_tokenizer
from tests.models.llama import write_tokenizer as write_llama3_tokenizer
from tests.torchtitan_release import BEGIN, END, torchtitan, write_tokenizer

TEXTS = ["", "the other", "in, 1 2\n\t!", f"the {BEGIN} end {END}", "é漢字 on\x00", "  the  "]
CONFIGS = {  # what stands in tokenizer_config.json → begin and end ids; 263 tokens are in the table
    "as torchtitan's": ({}, 263, 264),
    "ids of the table": ({"added_tokens_decoder": {"5": {"content": BEGIN}, "6": {"content": END}}}, 263, 264),
    "no ids": ({"added_tokens_decoder": {}}, 263, 264),
    "objects": (
        {"added_tokens_decoder": {}, "eos_token": {"__type": "AddedToken", "content": END, "special": True}},
        263,
        264,
    ),
    "one of them in the table": ({"added_tokens_decoder": {}, "bos_token": "<|image|>"}, 261, 263),
    "another before them": ({"added_tokens_decoder": {}, "pad_token": "[PAD]", "bos_token": None}, None, 263),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_ids_are_those_of_transformers(tmp_path, name):
    config, bos, eos = CONFIGS[name]
    folder = write_tokenizer(tmp_path, **config)
    reference = AutoTokenizer.from_pretrained(folder)
    assert (reference.bos_token_id, reference.eos_token_id) == (bos, eos)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.ends.begin, tokenizer.ends.end) == (bos, eos)
    assert tokenizer.vocab_size == len(reference)
    for text in TEXTS:
        assert tokenizer.encode(text, special=True) == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.decode([eos]) == reference.decode([eos])
    assert read_token_ids(find_assets(folder), vocab_size=2048).get("eos_token_id") == eos


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_documents_are_those_of_torchtitan(tmp_path, name):
    folder = write_tokenizer(tmp_path, **CONFIGS[name][0])
    with torchtitan("components.tokenizer") as (module,):
        reference = module.HuggingFaceTokenizer(str(folder))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.ends.begin, tokenizer.ends.end) == (reference.bos_id, reference.eos_id)
    assert tokenizer.vocab_size == reference.vocab_size
    for text in TEXTS:
        ours = tokenizer.encode(text, bos=True, eos=True, special=True)
        assert ours == reference.encode(text, add_bos=True, add_eos=True)


@pytest.mark.parametrize(("last", "added", "end"), [(262, [263], 264), (262, [5], 263), (500, [], 263)])
def test_ids_follow_the_library_with_added_tokens_and_gaps(tmp_path, last, added, end):
    folder = write_tokenizer(tmp_path, added_tokens_decoder={}, bos_token=None)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["<|pad|>"] = last
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [{"id": id, "content": chr(5) if id == 5 else "<|added|>"} | flags for id in added]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder).ends.end == end
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == end


def test_notes_say_which_ids_and_what_is_left_out(tmp_path):
    folder = write_tokenizer(tmp_path)
    ids, dropped = tokenizer_notes(find_assets(folder))
    assert ids.endswith(
        "tokenizer.json lacks tokens that the files beside it declare; their ids, as in transformers:"
        " <|begin_of_text|> 263, <|end_of_text|> 264"
    )
    reference = AutoTokenizer.from_pretrained(folder)
    lost = [value for value in range(128) if not reference(chr(value)).input_ids]
    assert ord(" ") in lost and "has no token for 162 of the 256 bytes, the space among them," in dropped
    write_tokenizer(tmp_path, bos_token="<|image|>", eos_token="<|pad|>", added_tokens_decoder={})
    assert tokenizer_notes(find_assets(tmp_path)) == [dropped]
    (tmp_path / "llama3").mkdir()
    write_llama3_tokenizer(tmp_path / "llama3")
    assert tokenizer_notes(find_assets(tmp_path / "llama3")) == []


def test_ids_that_torchtitan_numbers_differently_are_those_of_transformers(tmp_path):
    declared = {"added_tokens_decoder": {"1": {"content": "<|other|>"}, "2": {"content": END}}, "bos_token": None}
    folder = write_tokenizer(tmp_path, **declared)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 264
    assert load_tokenizer(folder).ends.end == 264


def test_an_unreadable_list_is_reported(tmp_path):
    folder = write_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {"x": {}}}))
    with pytest.raises(CheckpointError, match="tokenizer_config.json: its tokens cannot be read"):
        load_tokenizer(folder)
