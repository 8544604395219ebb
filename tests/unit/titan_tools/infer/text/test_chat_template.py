"""Chat templates: found, rendered and encoded as transformers does, safe from hostile ones."""

import gc
import json
import time
from datetime import datetime

import pytest
from transformers import AutoTokenizer

from converters.common.errors import CheckpointError, ConfigError
from converters.tokenizers import tiktoken_model
from converters.tokenizers.assets import find_assets, read_token_ids
from converters.tokenizers.tiktoken_from_json import write_ranks
from converters.tokenizers.tiktoken_model import RELEASED_VOCAB, special_tokens_after, write_hf_tokenizer
from converters.tokenizers.tokenizer import load_tokenizer
from tests.chat_templates import CHATML, MISTRAL, TEMPLATES, said, write_tokenizer
from titan_tools.infer.text import template_sandbox
from titan_tools.infer.text.chat_template import ChatTemplate, has_template, read_template
from titan_tools.infer.text.chat_tokens import encode_chat, turn_end_ids

CONVERSATIONS = {
    "short": [("user", "Hello")],
    "system": [("system", "  Be brief.\n"), ("user", " What is\n\n1 + 1? \n")],
    "long": [
        ("user", "naïve 東京 <b>&'\"</b>"),
        ("assistant", "<think>\nhm\n</think>\n\nIt is: \n"),
        ("user", "\nand then?\n"),
        ("assistant", "the end  "),
        ("user", "<tool_response>7</tool_response>"),
    ],
}


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request, tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / request.param, TEMPLATES[request.param])


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("answer", [True, False])
def test_renders_and_encodes_as_transformers_does(folder, name, answer):
    messages, template = said(*CONVERSATIONS[name]), read_template(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
    assert template.render(messages, answer=answer) == expected
    if answer:
        ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encode_chat(template, load_tokenizer(folder), messages) == ids


def test_what_a_template_refuses(tmp_path):
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(ConfigError, match="rejects these messages: conversation roles must alternate"):
        template.render(said(("user", "a"), ("user", "b")))
    template = ChatTemplate("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x", {})
    with pytest.raises(ConfigError, match="rejects these messages: no system"):
        template.render(said(("system", "s"), ("user", "a")))


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("fine\n{% for m in messages %}", "t.jinja, line 2 is not a valid Jinja template: Unexpected end"),
        ("\n{{ messages[9].content }}", "t.jinja, line 2 fails on these messages: list object has no element 9"),
        ("{{ 1 + 'a' }}", "fails on these messages: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "does something forbidden"),
        ("{{ messages.append(1) }}", "does something forbidden"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "does something forbidden"),
        ("{% for i in range(1000000) %}{% endfor %}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "has an endless recursion"),
        ("{{ '(' * 10 ** 11 }}", "takes more than 1 GiB"),
        ("{% for m in messages %}{{ 'a'.ljust(10 ** 11) }}{% endfor %}", "takes more than 1 GiB"),
        ("{% include '/etc/passwd' %}", "TypeError"),
    ],
)
def test_broken_and_hostile_templates(source, output):
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(source, {}, "t.jinja").render(said(("user", "a")))
    assert output in caught.value.message and "--prompt without --chat" in caught.value.hint


def test_a_template_is_reported_the_requests_time():
    moment = datetime(1999, 12, 31, 23, 59)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, moment=moment)
    assert template.render(said(("user", "a"))) == "31 Dec 1999" and template.depends_on_current_time


def test_a_template_that_writes_too_much_is_reported(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MOST_CHARACTERS", 5000)
    with pytest.raises(CheckpointError, match="makes 10,000 characters"):
        ChatTemplate("{{ 'ab' * 5000 }}", {}).render(said(("user", "a")))


@pytest.mark.parametrize("body", ["{% for i in range(99999) %}{% endfor %}", "{{ 9 ** (9 ** 9) }}"])
def test_an_endless_template_is_stopped(monkeypatch, body):
    monkeypatch.setattr(template_sandbox, "MOST_SECS", 0.2)
    source = "{% for i in range(99999) %}" + body + "{% endfor %}"
    with pytest.raises(CheckpointError, match="takes too long"):
        ChatTemplate(source, {}).render(said(("user", "a")))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_template_is_stopped_though_the_first_stop_is_lost(monkeypatch):
    """Time can run out where Python ignores exceptions, as in whatever listens to its garbage collector."""
    lost = []

    def swallow(phase, info):
        until = time.monotonic() + 0.6
        try:
            while not lost and time.monotonic() < until:
                pass
        except BaseException:
            lost.append(phase)
            raise

    monkeypatch.setattr(template_sandbox, "MOST_SECS", 0.2)
    gc.callbacks.append(swallow)
    grow = "{% set kept.all = [kept.all] %}"  # until there is garbage to look for
    twice = "{% for i in range(99999) %}{% for i in range(99999) %}" + grow + "{% endfor %}{% endfor %}"
    source = "{% set kept = namespace(all=[]) %}" + twice
    try:
        for _ in range(9):
            with pytest.raises(CheckpointError, match="takes too long"):
                ChatTemplate(source, {}).render(said(("user", "a")))
            if lost:  # or Python came to look for garbage only when time had run out, on a busy machine
                break
    finally:
        gc.callbacks.remove(swallow)
    assert lost


def test_where_a_template_is_looked_for(tmp_path):
    """A file of its own before the config's text, or its list's default one; a processor's last."""
    folder = write_tokenizer(tmp_path / "checkpoint", CHATML)
    config = json.loads((folder / "tokenizer_config.json").read_text())

    def write(name, content):
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    write("tokenizer_config.json", config | {"chat_template": None})
    write("chat_template.json", {"chat_template": "of a processor"})
    assert read_template(folder).source == "of a processor"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of a list"}]
    write("tokenizer_config.json", config | {"chat_template": named})
    assert read_template(folder).source == AutoTokenizer.from_pretrained(folder).get_chat_template() == "of a list"
    write("chat_template.jinja", "of a file\r\n")
    assert read_template(folder).source == AutoTokenizer.from_pretrained(folder).get_chat_template() == "of a file\n"
    (folder / "assets").mkdir()
    for path in list(folder.glob("*.*")):
        path.rename(folder / "assets" / path.name)
    assert read_template(folder).source == "of a file\n"


def test_special_tokens_are_those_of_transformers(tmp_path):
    folder = write_tokenizer(tmp_path / "checkpoint", CHATML)
    assert read_template(folder).special_tokens == AutoTokenizer.from_pretrained(folder).special_tokens_map
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "unk_token": "<s>"}))
    assert read_template(folder).special_tokens == AutoTokenizer.from_pretrained(folder).special_tokens_map
    assert read_template(folder).special_tokens["eos_token"] == "<|im_end|>"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["model_specific_special_tokens"] = {"image_token": "<|image|>"}  # as save_pretrained of transformers 5
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_template(folder).special_tokens == AutoTokenizer.from_pretrained(folder).special_tokens_map
    assert read_template(folder).special_tokens["image_token"] == "<|image|>"


def test_a_default_template_in_the_folder_of_templates_comes_first(tmp_path):
    folder = write_tokenizer(tmp_path / "checkpoint", CHATML)
    (folder / "chat_template.jinja").write_text("of the file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text("of the folder")
    theirs = AutoTokenizer.from_pretrained(folder).get_chat_template()
    assert read_template(folder).source == theirs == "of the folder"


def test_no_template_is_reported(tmp_path):
    folder = write_tokenizer(tmp_path / "checkpoint", CHATML)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no chat template: neither a chat_template.jinja nor") as caught:
        read_template(folder)
    assert caught.value.hint == "base models have none"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    with pytest.raises(CheckpointError) as caught:
        read_template(folder)
    assert "rag.jinja" in caught.value.hint
    (folder / "additional_chat_templates" / "rag.jinja").unlink()
    for wrong in ([{"name": "rag", "template": "x"}], 7):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(CheckpointError, match="tokenizer_config.json: "):
            read_template(folder)


def test_a_release_of_meta_speaks_in_llama_3_headers(tmp_path):
    import base64

    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "tokenizer.model").write_text(ranks)
    template, tokenizer = read_template(tmp_path), load_tokenizer(tmp_path)
    messages = said(("system", "Be brief. "), ("user", "Hi<|eot_id|>"))
    # https://llama.meta.com/docs/model-cards-and-prompt-formats/meta-llama-3
    parts = [
        "<|begin_of_text|>", "<|start_header_id|>", b"system", "<|end_header_id|>", b"\n\nBe brief.", "<|eot_id|>",
        "<|start_header_id|>", b"user", "<|end_header_id|>", b"\n\nHi<|eot_id|>", "<|eot_id|>",
        "<|start_header_id|>", b"assistant", "<|end_header_id|>", b"\n\n",
    ]  # fmt: skip
    ids = [id for part in parts for id in (part if isinstance(part, bytes) else tokenizer.encode(part, special=True))]
    assert encode_chat(template, tokenizer, messages) == ids
    assert turn_end_ids(template, tokenizer) == {*tokenizer.encode("<|eot_id|>", special=True)}


@pytest.fixture
def llama4_release(tmp_path, monkeypatch):
    """A tokenizer.model of the 256 bytes, which counts as Llama 4's."""
    monkeypatch.setattr(tiktoken_model, "_LLAMA4_RANKS", 256)
    monkeypatch.setitem(RELEASED_VOCAB, 256, 256 + 2048)
    (tmp_path / "release").mkdir()
    write_ranks(tmp_path / "release" / "tokenizer.model", {bytes([byte]): byte for byte in range(256)})
    return tmp_path / "release"


def test_a_llama_4_of_meta_speaks_in_its_own_headers(llama4_release):
    template, tokenizer = read_template(llama4_release), load_tokenizer(llama4_release)
    messages = said(("system", "Be brief. "), ("user", "Hi<|eot|>"))
    # encode_dialog_prompt of llama-models' models/llama4/chat_format.py, which strips nothing
    parts = [
        "<|begin_of_text|>", "<|header_start|>", b"system", "<|header_end|>", b"\n\nBe brief. ", "<|eot|>",
        "<|header_start|>", b"user", "<|header_end|>", b"\n\nHi<|eot|>", "<|eot|>",
        "<|header_start|>", b"assistant", "<|header_end|>", b"\n\n",
    ]  # fmt: skip
    places = special_tokens_after(256, vocab_size=256 + 2048)
    ids = [id for part in parts for id in (part if isinstance(part, bytes) else [256 + places.index(part)])]
    assert encode_chat(template, tokenizer, messages) == ids
    assert turn_end_ids(template, tokenizer) == {256 + places.index("<|eot|>")}
    ends = read_token_ids(find_assets(llama4_release), vocab_size=256 + 2048)["eos_token_id"]
    assert {places[id - 256] for id in ends} == {"<|end_of_text|>", "<|eom|>", "<|eot|>"}


def test_the_format_of_a_release_is_one_whose_tokens_there_are(llama4_release):
    write_hf_tokenizer(llama4_release, llama4_release / "tokenizer.model", vocab_size=2304, max_seq_len=64)
    (llama4_release / "tokenizer_config.json").unlink()
    assert "<|header_start|>" in read_template(llama4_release).source
    path = llama4_release / "tokenizer.json"
    path.write_text(path.read_text().replace("<|header_start|>", "<|other|>"))
    with pytest.raises(CheckpointError, match="neither Llama 3's nor Llama 4's"):
        read_template(llama4_release)
    assert not has_template(llama4_release)
