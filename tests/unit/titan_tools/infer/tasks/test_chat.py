"""`titan infer --chat` without a prompt: a conversation, from a script's lines or at a terminal."""

import io
import json
import sys
from itertools import count

import pytest
import torch
from transformers import AutoTokenizer

from converters.source.weights import open_native
from converters.tokenizers.tokenizer import load_tokenizer
from tests.models.llama import EOS
from tests.models.llama import write as write_llama
from titan_tools.infer.decoding import generate
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.loading import prepare_work
from titan_tools.infer.request import Request
from titan_tools.infer.task import generation_settings

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
pytestmark = pytest.mark.usefixtures("one_thread")


def write_checkpoint(folder, template=TEMPLATE):
    return write_llama(folder, chat_template=template)


@pytest.fixture(scope="module")
def model_and_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_checkpoint(folder), folder


@pytest.fixture(scope="module")
def folder(model_and_folder):
    return model_and_folder[1]


@pytest.fixture
def talk(titan, monkeypatch):
    """`talk(folder, lines, …)` → exit code, stdout, stderr."""

    def run(folder, lines, *options, terminal=False):
        data = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        stdin = io.TextIOWrapper(io.BytesIO(data))
        stdin.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdin", stdin)
        return titan("infer", folder, "--chat", *options)

    return run


@pytest.fixture
def prefills(monkeypatch):
    """(tokens of the prompt, tokens of it that were there already) of each."""
    seen, prefill = [], Engine.prefill

    def watched(engine, row, tokens, *, keep=0):
        seen.append((list(tokens), keep))
        return prefill(engine, row, tokens, keep=keep)

    monkeypatch.setattr(Engine, "prefill", watched)
    return seen


class Reference:
    """The same conversation by transformers, everything read anew for each answer."""

    def __init__(self, model, folder):
        self.model, self.tokenizer = model, AutoTokenizer.from_pretrained(folder)
        self.messages = []

    def say(self, text, num_new):
        self.messages.append({"role": "user", "content": text})
        ids = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            out = self.model.generate(**ids, do_sample=False, max_new_tokens=num_new, pad_token_id=0)
        new = [id for id in out[0, ids["input_ids"].shape[1] :].tolist() if id != self.tokenizer.eos_token_id]
        parts, run = [], []
        for id in new:  # rows of the embedding behind the tokenizer's last token
            if id < len(self.tokenizer):
                run.append(id)
            else:
                parts, run = [*parts, self.tokenizer.decode(run), "\ufffd"], []
        answer = "".join([*parts, self.tokenizer.decode(run)])
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def test_a_script_talks_as_transformers_would(talk, model_and_folder, prefills):
    lines = ["Hello there", "", "  and now, naïve one?", "bye<|end_of_text|>"]
    code, out, err = talk(model_and_folder[1], lines, "--max-new-tokens", "9")
    assert code == 0, err
    reference = Reference(*model_and_folder)
    expected = [reference.say(line, 9) for line in (lines[0], lines[2])]
    assert out.startswith("".join(answer + "\n" for answer in expected))
    assert "3 completions" in err and "tokens/s" in err and "> " not in err
    (first, kept), (second, kept_then), (third, _) = prefills
    assert kept == 0 and kept_then >= len(first) and second[:kept_then] == [*first, *second[len(first) : kept_then]]
    assert third.count(257) == 5 + 0  # one behind each message, and none from what the user wrote


def test_all_that_was_said_is_what_one_prompt_says(talk, titan, folder):
    code, out, _ = talk(folder, ["Hello"], "--max-new-tokens", "12", "--system", "brief", "--temperature", "0.8")
    asked = ("--system", "brief", "--prompt", "Hello", "--max-new-tokens", "12", "--temperature", "0.8")
    assert code == 0
    assert titan("infer", folder, "--chat", *asked)[1] == out


def test_an_empty_system_message_is_one_in_a_conversation_as_before_a_prompt(talk, folder, prefills):
    """Some templates put a message of their own where there is none."""
    assert talk(folder, ["Hello"], "--max-new-tokens", "1", "--system", "")[0] == 0
    assert talk(folder, [], "--max-new-tokens", "1", "--system", "", "--prompt", "Hello")[0] == 0
    (conversation, _), (prompt, _) = prefills
    assert load_tokenizer(folder).decode(conversation).startswith("<|begin_of_text|>s:<|end_of_text|>u:Hello")
    assert conversation == prompt


def test_commands(talk, folder, prefills):
    lines = ["one", "/retry", "/system be kind", "two", "/reset", "/help", "three", "/system", "four", "/exit", "five"]
    code, out, err = talk(folder, lines, "--max-new-tokens", "3", "--temperature", "1")
    assert code == 0 and "/system TEXT" in err and "5 completions" in err
    tokenizer = load_tokenizer(folder)
    asked = [tokenizer.decode(tokens) for tokens, _ in prefills]
    assert asked[0] == asked[1] == "<|begin_of_text|>u:one<|end_of_text|>a:"
    assert [kept for _, kept in prefills][:2] == [0, len(prefills[0][0]) - 1]
    assert asked[2].startswith("<|begin_of_text|>s:be kind<|end_of_text|>u:one<|end_of_text|>a:")
    assert asked[2].endswith("<|end_of_text|>u:two<|end_of_text|>a:")
    assert asked[3] == "<|begin_of_text|>s:be kind<|end_of_text|>u:three<|end_of_text|>a:"
    assert asked[4].startswith("<|begin_of_text|>u:three<|end_of_text|>a:")


def test_a_chat_also_stops_at_what_its_template_puts_behind_an_answer(tmp_path):
    """Where the generation config does not name it, as for a base model that was taught to talk."""
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    for asked, ends in (({}, {9}), ({"chat": True}, {9, EOS}), ({"chat": True, "ignore_eos": True}, set())):
        request = Request(tmp_path, Sampling(), text="a", **asked)
        with open_native(tmp_path) as weights:
            work = prepare_work(request, weights)
        assert generation_settings(work, max_new_tokens=1).stop_ids == ends


def test_answers_to_a_repeated_question_differ_with_a_temperature(talk, folder):
    _, out, _ = talk(folder, ["one", "/retry"], "--max-new-tokens", "20", "--temperature", "2", "--stop", "\n")
    first, second = out.rstrip("\n").split("\n")
    assert first != second


def test_the_oldest_messages_give_way(talk, folder, prefills):
    lines = [f"message {n} " + "x" * 20 for n in range(6)]
    code, _, err = talk(folder, lines, "--max-new-tokens", "10", "--context", "128", "--system", "S")
    assert code == 0 and "messages at the beginning no longer fit, and are forgotten" in err
    tokenizer = load_tokenizer(folder)
    for tokens, _ in prefills:
        assert len(tokens) + 10 <= 128
        assert tokenizer.decode(tokens).startswith("<|begin_of_text|>s:S<|end_of_text|>u:message")
    last = tokenizer.decode(prefills[-1][0])
    assert "message 5" in last and "message 0" not in last


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "standard input holds no message"),
        (["", " "], "standard input holds no message"),
        (b"fine\nb\xffd\n", "line 2 of standard input is not UTF-8: byte 0xff at offset 1"),
        (b"fine\n\xc3\xa9\0d\n", "line 2 of standard input holds a NUL byte at offset 2"),
        (["/rest"], "there is no command /rest"),
        (["/retry"], "there is no message to answer again"),
        (["x" * 300], "a prompt of 306 tokens, and the context has 256"),
        (["/system " + "x" * 300], "the system message takes 310 of the context's 256 tokens"),
    ],
)
def test_a_script_ends_where_something_is_wrong(talk, folder, lines, message):
    code, _, err = talk(folder, lines, "--max-new-tokens", "2")
    assert code == 2 and message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "300"), "--context 300 is more than the model's 256 tokens"),
        (("--context", "20", "--max-new-tokens", "20"), "leaves no room for messages in a context of 20"),
        (("--context", "20", "--system", "very brief"), "the system message takes 20 of the context's 20 tokens"),
        (("--context", "4"), "a question takes 7 of the context's 4 tokens"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_read(talk, folder, monkeypatch, options, message):
    monkeypatch.setattr("titan_tools.infer.loading.load_model", None)
    code, _, err = talk(folder, ["Hello"], *options)
    assert code == 2 and message in err


@pytest.mark.parametrize(("last", "helps"), [("a", True), ("a" * 250, False)])
def test_to_cut_a_chat_is_suggested_where_less_of_it_would_fit(titan, folder, tmp_path, last, helps):
    said = [("user", "x" * 240), ("assistant", "yes"), ("user", last)]
    line = {"messages": [{"role": role, "content": content} for role, content in said]}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    asked = ("infer", folder, "--chat", "--batch", tmp_path / "in.jsonl", "--max-new-tokens", "9")
    code, _, err = titan(*asked)
    assert code == 2 and "do not fit the model's context" in err and ("--truncate left" in err) == helps
    assert (titan(*asked, "--truncate", "left")[0] == 0) == helps
    code, _, err = titan("infer", folder, "--chat", "--prompt", "x" * 300)
    assert code == 2 and "--truncate" not in err  # a message is kept whole


def test_templates_that_refuse_or_are_not_there(talk, tmp_path):
    write_checkpoint(tmp_path, "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x")
    code, _, err = talk(tmp_path, ["a"], "--system", "b")
    assert code == 2 and "rejects these messages: no system" in err
    (tmp_path / "tokenizer_config.json").write_text("{}")
    code, _, err = talk(tmp_path, ["a"])
    assert code == 2 and "has no chat template" in err


@pytest.mark.parametrize(("stopped_at", "stopped"), [(1, 0), (3, 0), (14, 1)])
def test_ctrl_c_stops_an_answer_and_no_more(talk, model_and_folder, monkeypatch, stopped_at, stopped):
    """The cache then holds what it says it holds: later answers are those to all that was said."""
    extend, calls = generate._Run._extend, count(1)

    def interrupted(*args):
        if next(calls) == stopped_at:
            raise KeyboardInterrupt
        extend(*args)

    monkeypatch.setattr(generate._Run, "_extend", interrupted)
    lines = ["one", "two", "three"]
    code, out, err = talk(model_and_folder[1], ["/nothing", *lines], "--max-new-tokens", "10", terminal=True)
    assert code == 0 and "(stopped)" in err and "there is no command /nothing; /help shows them" in err
    assert err.count("> ") == 5
    reference = Reference(*model_and_folder)
    for turn, (text, answer) in enumerate(zip(lines, out.split("\n")[:-1], strict=True)):
        if turn != stopped:
            assert reference.say(text, 10) == answer
            continue
        before = list(reference.messages)
        assert reference.say(text, 10).startswith(answer) and len(answer) < 10
        said = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        reference.messages = before + (said if answer else [])


def test_ctrl_c_before_the_first_token_of_all_leaves_no_figures_to_tell(talk, folder, monkeypatch):
    def interrupted(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "choose", interrupted)
    code, out, err = talk(folder, ["one", "/exit"], terminal=True)
    assert code == 0 and out == "\n" and "(stopped)" in err and "tokens/s" not in err and "completion" not in err


def test_no_standard_input(talk, folder, titan, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = titan("infer", folder, "--chat")
    assert code == 2 and "there is no standard input to read messages from" in err


def test_a_person_may_try_again(talk, folder):
    lines = b"b\xffd\n/system " + b"x" * 300 + b"\n" + b"y" * 300 + b"\n/exit \n"
    code, out, err = talk(folder, lines, terminal=True)
    assert code == 0 and out == "" and "tokens/s" not in err
    for message in ("line 1 of standard input is not UTF-8", "the system message takes", "no room would be left"):
        assert message in err


def test_ctrl_c_ends_a_script(talk, folder, monkeypatch):
    def interrupted(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "choose", interrupted)
    assert talk(folder, ["one"])[0] == 130


def test_a_terminal_that_does_not_know_all_letters_shows_the_others(talk, folder, monkeypatch):
    asked = (["Hello"], "--max-new-tokens", "20", "--temperature", "3")
    _, expected, _ = talk(folder, *asked)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        code, _, err = talk(folder, *asked)
    stdout.flush()
    said = expected.encode("latin-1", "replace")
    assert code == 0 and stdout.buffer.getvalue() == said != expected.encode(), err
