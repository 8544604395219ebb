"""What can go wrong with inference: I1–I6 of the fault matrix."""

import io
import json
import shutil
import sys
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from converters.common.errors import TitanError
from converters.tokenizers.assets import find_assets, write_tokenizer_for_hf
from converters.tokenizers.tokenizer import _FolderTokenizer
from tests.models.llama import BOS, EOS, ids_of
from tests.models.llama import write as write_llama
from tests.refusals import refusal_of
from tests.tiny_sentencepiece import write_sentencepiece
from titan_tools.infer.tasks.batch_lines import read_batch
from titan_tools.infer.tasks.results import ExpectedResults, open_results
from titan_tools.infer.tasks.results_settings import ResultsSettings, write_results_settings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Llama of 64 tokens' context."""
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, max_position_embeddings=64)
    return folder


@pytest.fixture
def broken(hf, tmp_path):
    """A copy of the folder to damage."""
    return shutil.copytree(hf, tmp_path / "broken")


@pytest.fixture
def refused(titan, hf, untouched):
    """`infer` must refuse the options, saying every part, before it reads weights."""

    def check(*options, says=(), folder=hf):
        err = refusal_of(titan("infer", folder, *options), as_json="--json" in options)
        assert err.startswith("error: "), err
        assert [part for part in says if part not in err] == [], err
        return err

    return check


@pytest.fixture(params=["tokenizer.model", "tokenizer.json"])
def llama2(broken, request, tmp_path):
    """The folder with the tokenizer of a Llama 2, as published and as converted from Meta's release."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    (broken / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    if request.param == "tokenizer.model":
        write_sentencepiece(broken / "tokenizer.model")
    else:
        release = tmp_path / "release"
        release.mkdir()
        write_sentencepiece(release / "tokenizer.model")
        assert write_tokenizer_for_hf(broken, find_assets(release), vocab_size=301, max_seq_len=64)
    return broken


def result_of(output):
    code, out, _ = output
    assert code == 0
    (result,) = json.loads(out)["results"]
    return result


def test_i1_more_than_the_context_is_refused_with_numbers(refused):
    refused("--prompt", "a" * 99, says=["100 prompt tokens do not fit the model's context of 64 tokens"])
    refused(
        *("--prompt", "a" * 50, "--max-new-tokens", "20"),
        says=[
            "51 prompt tokens and 20 new ones do not fit the model's context of 64 tokens\n"
            "hint: at most 13 new tokens fit behind this prompt\n"
            "try: --max-new-tokens 13\ntry: --truncate left"
        ],
    )


def test_i1_a_prompt_may_lose_its_beginning(titan, hf):
    """What is left is begin-of-text and the end, with as much room as was asked for, or a fair part."""
    cut = ("--prompt", "a" * 69 + "b" * 30, "--truncate", "left", "--json", "--ignore-eos")
    for options, num_left, num_new in (((), 48, 16), (("--max-new-tokens", "40"), 24, 40)):
        output = titan("infer", hf, *cut, *options)
        result = result_of(output)
        assert result["prompt_tokens"] == [BOS, *(ids_of("a" * 69 + "b" * 30)[1 - num_left :])]
        assert len(result["tokens"]) == num_new and result["prompt"] == cut[1]
        assert (
            f"the prompt lost {100 - num_left} tokens of its beginning (--truncate left), {num_left} remain"
            in output[2]
        )
        end = result_of(titan("infer", hf, "--prompt", cut[1][1 - num_left :], "--max-new-tokens", num_new, *cut[4:]))
        assert result["tokens"] == end["tokens"]
    kept = result_of(titan("infer", hf, "--prompt", "b" * 47, *cut[2:]))
    assert len(kept["prompt_tokens"]) == 48 and len(kept["tokens"]) == 16


def test_i1_new_tokens_that_leave_no_place_for_a_prompt_are_refused(refused):
    said = ["63 new tokens leave no room for a prompt in the model's context of 64 tokens"]
    refused("--prompt", "a" * 9, "--truncate", "left", "--max-new-tokens", "63", says=said)


EMPTY = {
    "empty": ("", "the prompt is empty"),
    "white space": (" \n\t\u3000", "the prompt holds nothing but white space"),
    "special tokens": (
        "<|begin_of_text|><|end_of_text|>\n",
        "the prompt '<|begin_of_text|><|end_of_text|>' consists of special tokens only, and in a prompt they are text",
    ),
}


@pytest.mark.parametrize("prompt, said", EMPTY.values(), ids=EMPTY)
def test_i2_a_prompt_of_nothing_is_refused(refused, prompt, said):
    assert "--from-bos" in refused("--prompt", prompt, says=[said])


@pytest.mark.parametrize("prompt", ["<s>", "</s>", " <s> </s>\n", "<s><s>"])
def test_i2_special_tokens_of_a_llama_2_are_nothing_too(refused, llama2, prompt):
    said = f"the prompt {prompt.strip()!r} consists of special tokens only, and in a prompt they are text"
    assert "--from-bos" in refused("--prompt", prompt, says=[said], folder=llama2)


def test_i2_begin_of_text_of_a_llama_2(titan, llama2):
    """Alone by a flag; else as transformers puts it before a prompt, in which it is text unless asked otherwise."""
    theirs = AutoTokenizer.from_pretrained(llama2)
    for prompt, expected in {
        ("", "--from-bos"): [1],
        ("<s>", "--special-tokens"): theirs("<s>").input_ids,
        ("<s>fox", "--special-tokens"): theirs("<s>fox").input_ids,
        ("<s>fox",): theirs("<s>fox", split_special_tokens=True).input_ids,
        (" <fox> <s",): theirs(" <fox> <s").input_ids,
    }.items():
        output = titan("infer", llama2, "--max-new-tokens", "2", "--json", "--prompt", *prompt)
        assert result_of(output)["prompt_tokens"] == expected


def test_i2_begin_of_text_alone_by_a_flag(titan, hf):
    short = ("--max-new-tokens", "5", "--json")
    empty = result_of(titan("infer", hf, "--prompt", "", "--from-bos", *short))
    written = result_of(titan("infer", hf, "--prompt", "<|begin_of_text|>", "--special-tokens", *short))
    assert empty["prompt_tokens"] == [BOS] and written["prompt_tokens"] == [BOS, BOS]


def test_i2_begin_of_text_in_a_prompt_is_text_unless_asked_otherwise(titan, hf):
    short = ("--prompt", "<|begin_of_text|>a", "--max-new-tokens", "2", "--json")
    assert result_of(titan("infer", hf, *short, "--special-tokens"))["prompt_tokens"] == [BOS, BOS, *ids_of("a")]
    output = titan("infer", hf, *short)
    assert result_of(output)["prompt_tokens"] == [BOS, *ids_of("<|begin_of_text|>a")]
    assert "special tokens written in the prompt were read as text" in output[2]


def test_i2_a_tokenizer_without_begin_of_text_cannot_begin_with_it(refused, broken):
    """Nor with one that a config names."""
    for name, change in {
        "tokenizer.json": {"post_processor": None},
        "tokenizer_config.json": {"bos_token": None},
        "generation_config.json": {"bos_token_id": None},
        "config.json": {"bos_token_id": None},
    }.items():
        (broken / name).write_text(json.dumps(json.loads((broken / name).read_text()) | change))
    said = ["there is nothing to begin with: this tokenizer has no begin-of-text token"]
    refused("--prompt", "", "--from-bos", says=said, folder=broken)


def test_i3_a_missing_tokenizer_is_reported(refused, broken):
    (broken / "tokenizer.json").unlink()
    refused("--prompt", "a", says=["tokenizer.json", str(broken)], folder=broken)


def test_i3_a_tokenizer_of_another_model_is_reported(refused, tmp_path):
    write_llama(tmp_path, vocab_size=200, bos_token_id=1, eos_token_id=2)
    refused("--prompt", "a", says=["256 tokens", "200 rows"], folder=tmp_path)


def test_i3_special_tokens_beyond_the_embedding_are_reported(refused, broken):
    (broken / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, 128009]}))
    refused("--prompt", "a", says=["[128009]", "301 rows"], folder=broken)


NO_TEXT = {
    "no UTF-8": (b"ok\xff", "is not UTF-8: byte 0xff at offset 2"),
    "a lone surrogate": (b"abc\xed\xa0\x80", "is not UTF-8: byte 0xed at offset 3"),
    "NUL": ("é\0".encode(), "holds a NUL byte at offset 2"),
}


@pytest.mark.parametrize("how", ["file", "stdin"])
@pytest.mark.parametrize("content, said", NO_TEXT.values(), ids=NO_TEXT)
def test_i4_a_prompt_that_is_no_text_is_reported_with_its_offset(refused, tmp_path, monkeypatch, content, said, how):
    (tmp_path / "prompt").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    source, name = {"file": (("--prompt-file", tmp_path / "prompt"), tmp_path / "prompt"), "stdin": ("-", "standard")}[
        how
    ]
    refused(*(source if how == "file" else [source]), says=[f"the prompt in {name}", said])


def test_i4_arguments_that_are_no_text_are_reported(refused):
    """The shell's bytes arrive as lone surrogates."""
    refused("--prompt", "ab\udcff", says=["the prompt in --prompt is not UTF-8: byte 0xff at offset 2"])
    refused(
        *("--prompt", "a", "--stop", "é\udc80", "--chat", "--system", "\udcfe"),
        says=["--stop is not UTF-8: byte 0x80 at offset 2", "--system is not UTF-8: byte 0xfe at offset 0"],
    )


@pytest.mark.parametrize("how", ["prompt", "batch", "truncated"])
def test_i4_a_line_of_10_mb_is_not_read_to_its_end(titan, hf, tmp_path, monkeypatch, how):
    """It cannot fit, which its first part tells; and of one that is cut only the end is needed."""
    line, file, read = "ab " * 3_500_000, tmp_path / "prompt", []
    encode = _FolderTokenizer.encode
    monkeypatch.setattr(
        _FolderTokenizer,
        "encode",
        lambda self, text, **how: read.append(len(text)) or encode(self, text, **how),
    )
    file.write_text(json.dumps({"id": 7, "prompt": line}) if how == "batch" else line)
    if how == "truncated":
        code, out, err = titan("infer", hf, "--prompt-file", file, "--truncate", "left", "--json")
        assert code == 0 and "the prompt lost at least " in err
        assert bytes(id + 33 if id < 94 else 32 for id in json.loads(out)["results"][0]["prompt_tokens"][1:]) == (
            line[-47:].encode()
        )
    else:
        code, out, err = titan("infer", hf, "--batch" if how == "batch" else "--prompt-file", file)
        assert code == 2 and "prompt tokens do not fit the model's context of 64 tokens" in err and "more than" in err
        assert ("line 1 (id 7)" in err) == (how == "batch") and len(err) < 500
    assert sum(read) < 10_000


def test_i5_tokens_that_are_no_text_are_replaced_and_a_limit_ends_them(titan, hf):
    """Random weights say broken UTF-8 and ids behind the tokenizer's last, and never stop by themselves."""
    said = ("--prompt", "def main(", "--max-new-tokens", "50", "--temperature", "3", "--ignore-eos")
    result = result_of(titan("infer", hf, *said, "--json"))
    assert max(result["tokens"]) > EOS and len(result["tokens"]) == 50 and result["finish_reason"] == "length"
    assert "\ufffd" in result["text"]
    code, out, _ = titan("infer", hf, *said)
    assert code == 0 and out == result["text"] + "\n"


SAMPLING = {
    "negative": (("--temperature", "-1"), "--temperature is -1.0"),
    "nan": (("--temperature", "nan"), "--temperature is nan"),
    "infinite": (("--temperature", "inf"), "--temperature is inf"),
    "top-k 0": (("--temperature", "1", "--top-k", "0"), "--top-k is 0"),
    "top-k beyond": (("--temperature", "1", "--top-k", "302"), "--top-k is 302, but the vocabulary has 301 tokens"),
    "top-p 0": (("--temperature", "1", "--top-p", "0"), "--top-p is 0.0"),
    "top-p nan": (("--temperature", "1", "--top-p", "nan"), "--top-p is nan"),
    "min-p above 1": (("--temperature", "1", "--min-p", "1.5"), "--min-p is 1.5"),
    "penalty 0": (("--repetition-penalty", "0"), "--repetition-penalty is 0.0"),
    "top-p without temperature": (("--top-p", "0.5"), "no effect at temperature 0"),
    "logprobs beyond": (("--logprobs", "302", "--json"), "--logprobs is 302"),
}


@pytest.mark.parametrize("options, said", SAMPLING.values(), ids=SAMPLING)
def test_i6_numbers_that_cannot_be_are_refused(refused, options, said):
    refused("--prompt", "a", *options, says=[said])


def test_i6_temperature_0_is_greedy(titan, hf):
    greedy, cold = (
        result_of(titan("infer", hf, "--prompt", "def", "--max-new-tokens", "9", "--json", *options))["tokens"]
        for options in ((), ("--temperature", "0", "--seed", "5"))
    )
    assert greedy == cold


BROKEN = st.one_of(
    st.binary(max_size=300),
    st.lists(st.sampled_from([*b'{}[]":,\\u0dDe18 \n\t', 0, 0xC3, 0xFF]), max_size=120).map(bytes),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=9) | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "prompt", "x"]), inner),
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=BROKEN, lead=st.sampled_from([b"", b'{"prompt": "a"}\n', b'{"id": 0, "prompt": "a", "text": "b"}\n']))
def test_i4_any_bytes_are_a_batch_or_reported(tmp_path, content, lead):
    """And any bytes of a results file are results, the beginning of one, or an error; only errors of ours leave."""
    file = tmp_path / "lines"
    file.write_bytes(lead + content)
    with suppress(TitanError):
        for line in read_batch(file, lambda line: line, keys=("prompt",)):
            assert isinstance(line.id, str | int)
            json.dumps([line.id, line.values], ensure_ascii=False).encode()
    expected = ExpectedResults([0], lambda position: {}, settings=ResultsSettings("model"))
    write_results_settings(file, expected.settings)
    with suppress(TitanError), open_results(file, expected) as results:
        assert file.read_bytes() == (lead if (0, 0) in results.stored else b"")
