"""Answers in channels: which tokens end them, and what a conversation keeps of them, as transformers renders it."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from converters.tokenizers.tokenizer import load_tokenizer
from tests.chat_templates import HARMONY, said, write_tokenizer
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.request import Request
from titan_tools.infer.tasks.chat import ChatHistory
from titan_tools.infer.tasks.one_prompt import make_conversation
from titan_tools.infer.text.channels import Answer, read_answer, uses_channels
from titan_tools.infer.text.chat_template import read_template
from titan_tools.infer.text.chat_tokens import turn_end_ids

CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("harmony") / "tokenizer", HARMONY)


def test_only_the_end_of_the_last_message_ends_a_turn(folder):
    """And not the token that follows earlier answers in the prompt: thoughts end with it."""
    tokenizer = load_tokenizer(folder)
    ends = [tokenizer.encode(name, special=True)[0] for name in ("<|return|>", "<|call|>", "<|end|>")]
    assert turn_end_ids(read_template(folder), tokenizer) == {*ends[:2]}


@pytest.mark.parametrize(
    ("text", "content", "thinking"),
    [
        (f"{ANALYSIS}hm\n<|end|><|start|>assistant{FINAL}It is 2.", "It is 2.", "hm\n"),
        (f"{FINAL}At once", "At once", ""),
        (f"{ANALYSIS}cut off", "", "cut off"),
        (
            f"{ANALYSIS}a<|end|><|start|>assistant{CALL}{{}}",
            "",
            "a",
        ),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{FINAL}c", "c", "ab"),
        ("plain text", "plain text", ""),
        ("", "", ""),
    ],
)
def test_the_parts_of_an_answer(text, content, thinking):
    assert read_answer(text) == Answer(content, thinking)


def test_a_conversation_keeps_the_answers_without_their_thoughts(folder):
    """The template refuses an answer with its channels; what it gets instead is rendered as transformers renders it."""
    history = ChatHistory(read_template(folder), load_tokenizer(folder), context=4096, system="Be brief.")
    history.ask("1 + 1?")
    history.add_answer(f"{ANALYSIS}simple<|end|><|start|>assistant{FINAL}2")
    turn = history.ask("and <|end|> then?")
    messages = said(("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "and <|end|> then?"))
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(turn.prompt.tokens) == expected
    assert "simple" not in expected and expected.endswith("then?<|end|><|start|>assistant")
    end = tokenizer.encode("<|end|>", special=True)[0]
    assert turn.prompt.tokens.count(end) == 5  # not the one that the message has as text


def test_a_generated_answer_can_be_among_the_messages_of_a_prompt(folder):
    """With the tokens of a conversation that `titan` had itself; also where the answer comes without its channels."""
    template, tokenizer = read_template(folder), load_tokenizer(folder)
    history = ChatHistory(template, tokenizer, context=4096, system=None)
    history.ask("1 + 1?")
    history.add_answer(f"{ANALYSIS}simple<|end|><|start|>assistant{FINAL}2")
    expected = history.ask("and then?").prompt.tokens
    work = SimpleNamespace(
        request=Request(folder, Sampling(), chat=True),
        template=template,
        args=SimpleNamespace(max_seq_len=4096),
        vocabulary=SimpleNamespace(tokenizer=tokenizer),
    )
    for answer in (f"{ANALYSIS}simple<|end|><|start|>assistant{FINAL}2", "2"):
        messages = said(("user", "1 + 1?"), ("assistant", answer), ("user", "and then?"))
        assert [*make_conversation(work, 0, messages).tokens] == [*expected]


def test_templates_without_channels_are_left_alone():
    assert uses_channels(HARMONY) and not uses_channels("{{ messages[0].content }}<|end|>")
