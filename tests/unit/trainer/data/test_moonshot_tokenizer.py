"""Moonshot's tiktoken.model: ids as transformers' converter gives with that pattern, special tokens, refusals."""

import json
from itertools import groupby

import pytest
import tiktoken_ext.openai_public
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

from converters.common.errors import CheckpointError, UnsupportedError
from converters.formats.base import OutputOptions
from converters.tokenizers import moonshot
from converters.tokenizers.tiktoken_from_json import write_ranks
from converters.tokenizers.tokenizer import load_tokenizer
from tests.doors import convert
from tests.models.deepseek import write as write_deepseek
from tests.unit.trainer.data.test_tokenizer import LETTERS, texts
from trainer.data.train_tokenizer import train_ranks

NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 17: "<|im_middle|>"}
HAN = "中文世界你好北京市汉字〇々"
TEXTS = st.one_of(
    st.text(LETTERS, max_size=40),
    st.text(f"{HAN}aZé's/\n\r 19.,'LL", max_size=60),
    st.lists(
        st.sampled_from([*HAN, "Hello", " don't", "CAN'T", "}\n///", "2026", "İz", "ǅ", "\u0301", "かな", " ", "\t\n"])
    ).map("".join),
)
CLASS = "tokenization_kimi.TikTokenTokenizer"


def write_tokenizer(folder, ranks, *, cls=CLASS, named=NAMED, **config):
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder / "tiktoken.model", ranks)
    declared = {str(len(ranks) + i): {"content": text, "special": True} for i, text in named.items()}
    config = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": declared} | config
    config |= {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": [cls, None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def ranks():
    """Of text with Han characters, so that words of them have tokens."""
    found = train_ranks([*texts(), "世界你好 北京市 汉字中文 " * 50], vocab_size=700)
    return {token: rank for rank, token in enumerate(found)}


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("kimi"), ranks)


def test_text_is_split_as_gpt_4o_does_but_for_han_characters_and_slashes(monkeypatch):
    """tiktoken's own o200k_base, with the three differences of Moonshot's class."""
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *args, **named: {})
    pattern = tiktoken_ext.openai_public.o200k_base()["pat_str"]
    assert pattern.count(r"\p{M}]") == 4 and pattern.count(r"[\r\n/]*") == 1
    pattern = pattern.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
    assert rf"[\p{{Han}}]+|{pattern}" == moonshot.PATTERN


@pytest.mark.parametrize(
    "words", [["中文", "English", "混合"], ["汉字", "abc"], ["北京市", " Pascal"], ["世界", "'s"], [" }\n", "///"]]
)
def test_han_characters_are_words_of_their_own(words):
    split = pre_tokenizers.Split(Regex(moonshot.PATTERN), "isolated")
    assert [word for word, _ in split.pre_tokenize_str("".join(words))] == words


@pytest.fixture(scope="module")
def forms(folder):
    other = TikTokenConverter(str(folder / "tiktoken.model"), pattern=moonshot.PATTERN)
    return load_tokenizer(folder), other.converted()


@given(text=TEXTS)
@example(text="“Hello,” 世界世世世界世界——I'm ChatGPT. CAN'T wait 'til 2026.世界世界")
def test_ids_are_those_of_transformers_converter(forms, text):
    ours, theirs = forms
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == text


def test_special_tokens_are_text_unless_asked_for(ranks, folder):
    tokenizer, n = load_tokenizer(folder), len(ranks)
    assert tokenizer.vocab_size == n + 256 and (tokenizer.ends.begin, tokenizer.ends.end) == (n, n + 1)
    assert tokenizer.prefix_ids == ()
    text = "<|im_user|>user<|im_middle|>世界<|reserved_token_" + f"{n + 18}|><|im_end|>"
    ids = tokenizer.encode(text, special=True)
    assert (ids[0], ids[-2:]) == (n + 3, [n + 18, n + 2]) and tokenizer.decode(ids) == text
    assert max(tokenizer.encode(text)) < n and tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [("a", 25_000)],
        [("a", 25_001), (" ", 50_000), ("世", 75_001)],
        [(" ", 10_000), ("\n", 20_000), ("a", 10), ("世", 24_990), ("a", 1)],
        [(" ", 399_000), ("a", 26_000), ("\n", 400_000)],
    ],
)
def test_long_texts_are_cut_as_moonshots_class_does(runs):
    """Every 400,000 characters, and there a run of white space, or of other characters, every 25,000."""
    text = "".join(letter * num for letter, num in runs)
    cuts = set()
    for start in range(0, len(text), 400_000):
        place = start
        for _, run in groupby(text[start : start + 400_000], str.isspace):
            length = len(list(run))
            cuts |= {place + offset for offset in range(25_000, length, 25_000)}
            place += length
        cuts.add(place)
    parts = list(moonshot.parts_of(text))
    ends = [sum(len(part) for part in parts[: number + 1]) for number in range(len(parts))]
    assert "".join(parts) == text and ends == sorted(cuts)


@pytest.mark.parametrize("cls", ["tokenization_other.TikTokenTokenizer", None])
def test_another_class_is_refused_by_name(ranks, tmp_path, cls):
    with pytest.raises(UnsupportedError, match=f"names {cls!r}".replace(".", r"\.")) as refusal:
        load_tokenizer(write_tokenizer(tmp_path, ranks, cls=cls))
    assert "tokenizer.json" in refusal.value.hint


def test_a_published_class_with_its_repository_is_known(ranks, tmp_path):
    cls = "moonshotai/Moonlight-16B-A3B--tokenization_moonshot.TikTokenTokenizer"
    assert load_tokenizer(write_tokenizer(tmp_path, ranks, cls=cls)).vocab_size == len(ranks) + 256


@pytest.mark.parametrize("place", [-1, 256])
def test_special_tokens_of_another_file_are_refused(ranks, tmp_path, place):
    with pytest.raises(CheckpointError, match="another model|added_tokens_decoder has ids beside the 256"):
        load_tokenizer(write_tokenizer(tmp_path, ranks, named={place: "<|im_end|>"}))


def test_kimi_is_asked_with_its_template_from_either_form(titan, ranks, tmp_path):
    """The rows of the embedding are as many as the tokenizer's ids; the template is in tokenizer_config.json."""
    hf, dcp, back = tmp_path / "hf", tmp_path / "dcp", tmp_path / "back"
    write_deepseek(hf, "kimi", vocab_size=len(ranks) + 256)
    (hf / "generation_config.json").unlink(missing_ok=True)
    template = "{% for m in messages %}<|im_user|>{{ m['role'] }}<|im_middle|>{{ m['content'] }}<|im_end|>{% endfor %}"
    write_tokenizer(hf, ranks, chat_template=template)
    report = convert(hf, dcp, to="dcp", options=OutputOptions())
    assert not any("tiktoken" in remark for remark in report.remarks)
    report = convert(dcp, back, to="hf", options=OutputOptions())
    assert any("tiktoken.model with a Python class" in remark for remark in report.remarks)
    said = []
    for place in (hf, dcp, back):
        code, out, err = titan("infer", place, "--chat", "--prompt", "世界", "--max-new-tokens", 4, "--json")
        assert code == 0, err
        said.append(json.loads(out)["results"])
    assert said[0] == said[1] == said[2]
    tokenizer = load_tokenizer(hf)
    assert said[0][0]["prompt_tokens"] == tokenizer.encode("<|im_user|>user<|im_middle|>世界<|im_end|>", special=True)
