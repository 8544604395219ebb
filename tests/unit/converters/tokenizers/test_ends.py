"""What frames a prompt equals transformers' AutoTokenizer; what documents begin and end with is one rule."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from converters.common.errors import CheckpointError, DataError
from converters.tokenizers.tiktoken_model import write_hf_tokenizer
from converters.tokenizers.tokenizer import load_tokenizer
from tests.models.llama import BOS, EOS, write_tokenizer
from tests.tiny_sentencepiece import write_sentencepiece

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
NAMED = {"bos_token": BEGIN, "eos_token": END}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def template(*parts, **ids):
    """A TemplateProcessing, as JSON; `A` is the text."""
    said = [
        {"Sequence": {"id": "A", "type_id": 0}} if part == "A" else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in parts
    ]
    special = {part: {"id": part, "ids": [BOS if part == BEGIN else EOS], "tokens": [part]} for part in parts}
    special.pop("A")
    return {"type": "TemplateProcessing", "single": said, "pair": said, "special_tokens": special}


OBJECTS = {key: {"__type": "AddedToken", "content": text} for key, text in NAMED.items()}
BEGINS, ENDS = template(BEGIN, "A"), template("A", END)
# What tokenizer.json and tokenizer_config.json say, and whether a text begins with BOS: in a prompt, in a document
KINDS = {
    "Llama 3": ({"type": "Sequence", "processors": [BYTES, BEGINS]}, NAMED, True, True),
    "Llama 2": (BEGINS, NAMED | {"add_bos_token": True, "add_eos_token": False, "legacy": False}, True, True),
    "a BOS with no name": (BEGINS, {"eos_token": END}, True, False),
    "BOS and EOS": (template(BEGIN, "A", END), NAMED | {"add_eos_token": True}, True, True),
    "EOS alone": (ENDS, NAMED, False, True),
    "Qwen 3": (BYTES, NAMED | {"bos_token": None, "add_bos_token": False}, False, False),
    "SmolLM2": (BYTES, NAMED, False, True),  # names a BOS that it adds to no text
    "nothing is added": (None, NAMED, False, True),
    "tokens as objects": (BEGINS, OBJECTS, True, True),
    # transformers reads these two beside a tokenizer.model alone
    "said to be added": (BYTES, NAMED | {"add_bos_token": True, "add_eos_token": True}, False, True),
    "said not to be": (BEGINS, NAMED | {"add_bos_token": False}, True, False),
}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_begins_as_in_transformers(tmp_path, kind, model_type):
    post_processor, config, in_prompt, in_document = KINDS[kind]
    write_tokenizer(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": post_processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 301}))
    ours = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "a b"):
        assert theirs(text).input_ids == [*ours.prefix_ids, *ours.encode(text), *ours.suffix_ids]
    assert ours.prefix_ids == ((BOS,) if in_prompt else ())
    assert ours.encode("a", bos=True, eos=True) == [*([BOS] if in_document else []), *ours.encode("a"), EOS]


def test_several_tokens_may_stand_around_a_text(tmp_path):
    both = processors.TemplateProcessing(single="[g] <s> $A </s>", special_tokens=[("[g]", 5), ("<s>", 7), ("</s>", 9)])
    bert = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 4))
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for post_processor, around in ((both, ((5, 7), (9,))), (bert, ((4,), (3,))), (processors.ByteLevel(), ((), ()))):
        tokenizer.post_processor = post_processor
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        assert (ours.prefix_ids, ours.suffix_ids) == around


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    """Meta's tokenizer.model."""
    folder = tmp_path_factory.mktemp("llama 2")
    lines = Path(__file__).read_text().splitlines()
    write_sentencepiece(folder / "tokenizer.model", lines=lines, vocab_size=500)
    return folder / "tokenizer.model"


FLAGS = {
    "added": ({"add_bos_token": True}, True),
    "added, and EOS": ({"add_bos_token": True, "add_eos_token": True}, True),
    "added, legacy": ({"add_bos_token": True, "legacy": True}, True),
    "not added": ({"add_bos_token": False}, False),
    "not named": ({"bos_token": None}, False),
}


@pytest.mark.parametrize("called", FLAGS)
def test_a_lone_sentencepiece_file_begins_as_in_transformers(llama2, tmp_path, called):
    flags, has_bos = FLAGS[called]
    shutil.copy(llama2, tmp_path)
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"} | flags
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 500}))
    ours = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)("def").input_ids
    assert theirs == [*ours.prefix_ids, *ours.encode("def"), *ours.suffix_ids]
    assert ours.prefix_ids == ((1,) if has_bos else ())


def test_a_release_of_meta_begins_as_in_meta_s_code(llama2, tmp_path):
    """llama and llama-models encode prompts with bos=True; so did transformers 4 where no flag stands (5 adds none)."""
    assert load_tokenizer(llama2.parent).prefix_ids == (1,)
    lines = b"".join(b"%s %d\n" % (base64.b64encode(bytes([value])), value) for value in range(256))
    (tmp_path / "tokenizer.model").write_bytes(lines)
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.prefix_ids) == BEGIN
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert load_tokenizer(tmp_path).prefix_ids == ()


@pytest.mark.parametrize("post_processor, expected", [(BEGINS, (BOS,)), (BYTES, ()), (None, ())])
def test_a_tiktoken_file_next_to_a_tokenizer_json_begins_as_that(tmp_path, post_processor, expected):
    """Llama 3's repositories hold original/tokenizer.model too."""
    write_tokenizer(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": post_processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "original").mkdir()
    lines = b"".join(b"%s %d\n" % (base64.b64encode(bytes([value])), value) for value in range(256))
    (tmp_path / "original" / "tokenizer.model").write_bytes(lines)
    assert load_tokenizer(tmp_path).prefix_ids == expected
    assert AutoTokenizer.from_pretrained(tmp_path)("").input_ids == [*expected]


@pytest.mark.parametrize("names", [True, False])
def test_a_generation_config_names_the_ends_where_the_tokenizer_does_not(tmp_path, names):
    write_tokenizer(tmp_path)
    if not names:
        (tmp_path / "tokenizer_config.json").unlink()
    for said, ends in [
        (None, (None, None)),
        ({}, (None, None)),
        ({"eos_token_id": [7, 8]}, (None, 7)),
        ({"pad_token_id": 3}, (None, None)),
        ({"bos_token_id": 5, "eos_token_id": 6}, (5, 6)),
    ]:
        if said is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(said))
        ours = load_tokenizer(tmp_path)
        assert (ours.ends.begin, ours.ends.end) == ((BOS, EOS) if names else ends) and ours.prefix_ids == (BOS,)
    assert ours.ends.described == (
        f"documents begin with {BEGIN} ({BOS}), the tokenizer's bos_token, and end with {END} ({EOS}), the tokenizer's "
        "eos_token"
        if names
        else "documents begin with 5, the bos_token_id of generation_config.json, and end with 6, the eos_token_id of "
        "generation_config.json"
    )


@pytest.mark.parametrize("id", [5000, -1, "7", True, [5000, 7]])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path, id):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": id}))
    with pytest.raises(DataError, match="eos_token_id .* is no id of the tokenizer's"):
        load_tokenizer(tmp_path)


DAMAGED = {  # the library panics at the first two when it reads, at the others when it encodes; or raises Exception
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "template": {"post_processor": template(BEGIN, "A") | {"special_tokens": {}}},
    "pattern": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "no [UNK]": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_at_which_the_library_panics_is_named(tmp_path, kind):
    write_tokenizer(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text()) | DAMAGED[kind]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="tokenizer.json: not a tokenizer: .+"):
        load_tokenizer(tmp_path).encode("some text")


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
def test_an_empty_string_names_no_token(tmp_path, llama2, role):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED | {role: ""}))
    (tmp_path / "generation_config.json").write_text(json.dumps({f"{name}_id": 7 for name in NAMED}))
    ends = load_tokenizer(tmp_path).ends
    assert (ends.begin, ends.end) == ((None, EOS) if role == "bos_token" else (BOS, 7))  # as null does
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(llama2, alone)
    config = {"tokenizer_class": "LlamaTokenizer", role: "", f"add_{role}": True}
    (alone / "tokenizer_config.json").write_text(json.dumps(config))
    (alone / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 500}))
    with pytest.raises(CheckpointError, match=f"{role} is the empty string, and add_{role} is true"):
        load_tokenizer(alone)


def test_a_tokenizer_that_cuts_and_pads_reads_whole_texts(tmp_path):
    """Training scripts leave both in the file."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5, pad_id=0, pad_token="!")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    whole = AutoTokenizer.from_pretrained(tmp_path)("some text").input_ids
    assert [BOS, *load_tokenizer(tmp_path).encode("some text")] == whole and len(whole) == 10


def test_words_that_are_added_are_tokens_and_special_ones_are_text(tmp_path):
    """DeepSeek's <think> in a Llama 3, converted to Meta's format."""
    model = tmp_path / "tokenizer.model"
    lines = b"".join(b"%s %d\n" % (base64.b64encode(bytes([value])), value) for value in range(256))
    model.write_bytes(lines)
    write_hf_tokenizer(tmp_path, model, vocab_size=258, max_seq_len=64)
    model.unlink()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)("a<think>b").input_ids
    model.write_bytes(lines)
    ours = load_tokenizer(tmp_path)
    assert theirs == [BOS, *ours.encode("a<think>b")] == [BOS, ord("a"), EOS + 1, ord("b")]
    assert EOS not in ours.encode(END) and ours.special_names == {BEGIN, END}


@pytest.mark.parametrize("legacy", [True, False])
def test_text_behind_a_special_token_of_sentencepiece(llama2, tmp_path, legacy):
    """With a space before it if legacy is true."""
    shutil.copy(llama2, tmp_path)
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "LlamaTokenizer",
        "legacy": legacy,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 500}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)("def</s>def <s>\n", add_special_tokens=False).input_ids
    assert load_tokenizer(tmp_path).encode("def</s>def <s>\n", special=True) == theirs


def test_special_names_are_those_that_a_text_can_write(tmp_path, llama2):
    write_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).special_names == {BEGIN, END}
    assert load_tokenizer(llama2.parent).special_names == {"<s>", "</s>"}
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()  # which makes < of ＜
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    assert load_tokenizer(tmp_path).special_names == {BEGIN, END}  # they are looked for before
    described["added_tokens"][0]["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    changed = load_tokenizer(tmp_path)
    assert changed.special_names is None and changed.encode(f"\uff1c{BEGIN[1:]}", special=True) == [BOS]


@pytest.mark.parametrize("decoder", ["bytes", "llama 2", "llama 2 with a space"])
def test_text_is_decoded_as_in_transformers(tmp_path, decoder):
    """Byte fallback, SentencePiece's space at the front, added words; clean_up_tokenization_spaces does nothing."""
    vocab = {token: id for id, token in enumerate(["<unk>", "▁", "▁a", "a", "'", "s", ".", "▁.", "Ġ", "Ġ.", "Ã", "©"])}
    vocab |= {f"<0x{value:02X}>": len(vocab) + value for value in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=decoder != "bytes"))
    if decoder == "bytes":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    else:
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        strip = [decoders.Strip(" ", 1, 0)] if decoder == "llama 2" else []
        tokenizer.decoder = decoders.Sequence([*parts, *strip])
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens([" <think> ", "né"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"clean_up_tokenization_spaces": True, "eos_token": "</s>"})
    )
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    letter = [vocab[f"<0x{value:02X}>"] for value in "é".encode()]
    added = range(len(vocab), len(vocab) + 3)
    for ids in ([2, 7], [1, 6], [9, 4, 5], letter, letter[:1], [2, *letter[1:], 3], [10, 11], [*added, 2, *added], [7]):
        assert ours.decode(ids) == theirs.decode(ids), ids
