"""The tokenizer: three independent readers of the same folder agree, text comes back, special tokens stay text."""

import base64
import json
import shutil
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from converters.common.errors import DataError, TitanError
from converters.families.llama3 import FLAVORS
from converters.model.model_info import ModelInfo
from converters.tokenizers.assets import find_assets
from converters.tokenizers.tiktoken_model import write_hf_tokenizer
from converters.tokenizers.tokenizer import load_tokenizer
from trainer.checkpoints.load import other_tokenizer
from trainer.data.train_tokenizer import train_ranks, write_tokenizer

VOCAB = 640
MODULES = ("textwrap", "shlex", "fnmatch", "bisect", "heapq", "string", "colorsys", "csv")

# letters that all three regex engines know; newer Unicode letters are cut differently by engines of different age
LETTERS = st.characters(codec="utf-8", max_codepoint=0xFFFF, exclude_categories=("Cn", "Co", "Cs"))
TEXTS = st.one_of(
    st.text(LETTERS, max_size=60),
    st.text(" \n\tab'_=-.", max_size=80),  # runs and overlaps, where merge order shows
    st.lists(
        st.sampled_from(["def ", "self", "    ", "\n", "'s", "'LL", "123456", "ſ", "é", "日本", "👍", "\r\n"]),
        max_size=20,
    ).map("".join),
)


def texts() -> list[str]:
    return [Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text("utf-8") for name in MODULES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, train_ranks(texts(), vocab_size=VOCAB))
    return folder


@pytest.fixture(scope="module")
def tiktoken_form(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def json_form(folder, tmp_path_factory):
    alone = tmp_path_factory.mktemp("json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, alone / name)
    return load_tokenizer(alone)


@pytest.fixture(scope="module")
def transformers_form(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
@example(text="def f(x):\n        return x  # it's    wide\n" + " " * 99 + "=" * 77)
@example(text="<|end_of_text|> and <|begin_of_text|>")
@example(text="\x00\ufffd\u200b\u0301")
def test_three_readers_agree_and_text_comes_back(tiktoken_form, json_form, transformers_form, text):
    ids = tiktoken_form.encode(text)
    assert json_form.encode(text) == ids
    assert transformers_form(text, add_special_tokens=False, split_special_tokens=True).input_ids == ids
    assert tiktoken_form.decode(ids) == text
    assert json_form.decode(ids) == text
    assert max(ids, default=0) < VOCAB - 10


def test_whole_files_agree(tiktoken_form, json_form):
    for text in texts():
        assert json_form.encode(text) == tiktoken_form.encode(text)


def test_vocabulary_is_exactly_as_asked_with_the_special_tokens_last(
    folder, tiktoken_form, json_form, transformers_form
):
    for tokenizer in (tiktoken_form, json_form):
        assert (tokenizer.vocab_size, tokenizer.ends.begin, tokenizer.ends.end) == (VOCAB, VOCAB - 10, VOCAB - 9)
    assert (len(transformers_form), transformers_form.bos_token_id, transformers_form.eos_token_id) == (
        VOCAB,
        VOCAB - 10,
        VOCAB - 9,
    )
    assert len((folder / "tokenizer.model").read_bytes().splitlines()) == VOCAB - 10


def test_begin_and_end_are_added_on_request(tiktoken_form, json_form, transformers_form):
    plain = tiktoken_form.encode("a b")
    for tokenizer in (tiktoken_form, json_form):
        assert tokenizer.encode("a b", bos=True, eos=True) == [VOCAB - 10, *plain, VOCAB - 9]
        assert tokenizer.encode("a b", bos=True) == [VOCAB - 10, *plain]
        assert tokenizer.encode("a b", eos=True) == [*plain, VOCAB - 9]
    assert transformers_form("a b").input_ids == [VOCAB - 10, *plain]  # as Llama's own does


def test_special_tokens_in_text_are_text_unless_asked(tiktoken_form, json_form):
    text = "a<|end_of_text|>"
    for tokenizer in (tiktoken_form, json_form):
        assert VOCAB - 9 not in tokenizer.encode(text)
        assert tokenizer.encode(text, special=True) == [*tokenizer.encode("a"), VOCAB - 9]
        assert tokenizer.encode(text) == tokenizer.encode(text)  # the last call left nothing switched on
        assert tokenizer.decode([VOCAB - 9]) == "<|end_of_text|>"


def test_an_exported_llama_folder_opens_in_transformers(folder, tiktoken_form, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(folder, tmp_path / "hf")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    text = "def f(x):\n    return 'naïve' + x\n"
    opened = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert opened(text, add_special_tokens=False).input_ids == tiktoken_form.encode(text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchao, on import
def test_torchtune_reads_it(folder, tiktoken_form):
    from torchtune.models.llama3 import llama3_tokenizer

    theirs = llama3_tokenizer(str(folder / "tokenizer.model"), special_tokens_path=str(folder / "tokenizer.json"))
    text = "def f(x):\n        return 'naïve' + x  # 12345\n"
    assert theirs.encode(text, add_bos=True, add_eos=True) == tiktoken_form.encode(text, bos=True, eos=True)


def test_training_is_repeatable(folder, tmp_path):
    write_tokenizer(tmp_path, train_ranks(iter(texts()), vocab_size=VOCAB))
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_rewritten_file_is_read_again(folder, tmp_path):
    """tiktoken's own loader caches by path and would go on serving the old ranks."""
    shutil.copy(folder / "tokenizer.model", tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == VOCAB
    (tmp_path / "tokenizer.model").write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(bytes([value])), value) for value in range(256))
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.encode("ab")) == (266, [97, 98])


def test_assets_of_a_checkpoint_are_found(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "assets")
    assert load_tokenizer(tmp_path).vocab_size == VOCAB


def test_a_million_spaces_do_not_overflow_the_regex_engine(tiktoken_form):
    text = " " * 1_500_000 + "x"
    assert tiktoken_form.decode(tiktoken_form.encode(text)) == text


@pytest.mark.parametrize("form", ["tiktoken_form", "json_form"])
def test_what_cannot_be_encoded_or_decoded_is_reported(form, request):
    tokenizer = request.getfixturevalue(form)
    with pytest.raises(DataError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(DataError, match=rf"\[-1, {VOCAB}\].*vocabulary of {VOCAB}"):
        tokenizer.decode([VOCAB, 3, -1])
    assert "\ufffd" in {tokenizer.decode([id]) for id in range(256)}  # part of a letter alone is shown, not refused


def test_sentencepiece_is_read_by_its_own_library(tmp_path):
    """A Llama 2 of Meta: control pieces are text, unless asked for; what is decoded shows them."""
    places = {"input": str(__file__), "model_prefix": str(tmp_path / "tokenizer"), "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(**places, model_type="bpe", byte_fallback=True, vocab_size=500)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = load_tokenizer(tmp_path)
    assert (ours.ends.begin, ours.ends.end, ours.vocab_size) == (1, 2, 500)
    for text in ("", "Hello wörld 🙂", " two  spaces", "def f():\n    return 12345\x00"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, bos=True, eos=True) == [1, *theirs.encode(text), 2]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert 2 not in ours.encode("a</s>b") and ours.decode(ours.encode("a</s>b")) == "a</s>b"
    asked_for = ours.encode("a</s>b", special=True)
    assert asked_for == [*theirs.encode("a"), 2, *theirs.encode("b")] and ours.decode(asked_for) == "a</s>b"
    with pytest.raises(DataError, match="outside of the tokenizer's vocabulary of 500"):
        ours.decode([500])


def write_model(folder: Path, lines: bytes) -> Path:
    (folder / "tokenizer.model").write_bytes(lines)
    return folder


def byte_lines(*, leave_out: tuple[int, ...] = ()) -> bytes:
    kept = [value for value in range(256) if value not in leave_out]
    return b"".join(b"%s %d\n" % (base64.b64encode(bytes([value])), rank) for rank, value in enumerate(kept))


def test_damaged_and_foreign_tokenizers_are_reported(folder, tmp_path):
    with pytest.raises(DataError, match="tokenizer.model or tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="neither a tiktoken nor a SentencePiece file"):
        load_tokenizer(write_model(tmp_path, b"version https://git-lfs.github.com/spec/v1\n"))
    with pytest.raises(TitanError, match="line 257"):
        load_tokenizer(write_model(tmp_path, byte_lines() + b"!!! 256\n"))
    with pytest.raises(TitanError, match="ranks"):
        load_tokenizer(write_model(tmp_path, byte_lines() + b"YWI= 300\n"))
    with pytest.raises(TitanError, match="2 of the 256 single bytes"):
        load_tokenizer(write_model(tmp_path, byte_lines(leave_out=(0, 255))))
    write_model(tmp_path, byte_lines())
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "<|x|>"}]}')
    with pytest.raises(TitanError, match="tokenizer.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    write_hf_tokenizer(tmp_path, tmp_path / "tokenizer.model", vocab_size=266, max_seq_len=64)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(TitanError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


def test_too_little_text_for_the_vocabulary_is_reported_with_what_it_gives():
    with pytest.raises(DataError, match="too small or too uniform") as caught:
        train_ranks(["aaaa"], vocab_size=2048)
    (flag,) = caught.value.tries
    most = int(flag.split()[1])
    assert len(train_ranks(["aaaa"], vocab_size=most)) == most - 10
    with pytest.raises(DataError, match="cannot hold 256 bytes"):
        train_ranks(["aaaa"], vocab_size=265)


def test_the_released_llama_3_special_tokens_follow_128000_ranks(tmp_path):
    ranks = [bytes([a]) for a in range(256)] + [b"%06d" % n for n in range(128000 - 256)]
    (tmp_path / "tokenizer.model").write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.ends.begin) == (128256, 128000)
    assert tokenizer.encode("<|eot_id|><|start_header_id|>", special=True) == [128009, 128006]
    assert tokenizer.ends.end == 128001


def test_initial_weights_that_bring_another_tokenizer_are_reported(folder, tmp_path):
    """The same tokenizer in another form is none."""
    wanted = ModelInfo("llama3", FLAVORS["debug_gqa"], find_assets(folder))
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "same")
    write_tokenizer(tmp_path / "other", train_ranks(["ab " * 300, "def x " * 300], vocab_size=270))
    same, other = (ModelInfo("llama3", wanted.args, find_assets(tmp_path / name)) for name in ("same", "other"))
    assert other_tokenizer(same, wanted, tmp_path / "same") == ""
    assert "has a tokenizer that gives other ids than the run's" in other_tokenizer(other, wanted, tmp_path)
    assert other_tokenizer(ModelInfo("llama3", FLAVORS["debug_gqa"]), wanted, tmp_path) == ""
