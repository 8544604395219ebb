"""What a conversation remembers where nothing comes of a message."""

import pytest

from converters.tokenizers.tokenizer import load_tokenizer
from tests.unit.titan_tools.infer.tasks.test_chat import write_checkpoint
from titan_tools.infer.tasks.chat import ChatHistory
from titan_tools.infer.text.chat_template import read_template


@pytest.fixture
def history(tmp_path):
    write_checkpoint(tmp_path)
    return ChatHistory(read_template(tmp_path), load_tokenizer(tmp_path), context=64)


def test_a_message_too_long_changes_nothing(history):
    prompt = history.ask("a").prompt
    history.add_answer("b")
    with pytest.raises(Exception, match="a prompt of 106 tokens, and the context has 64"):
        history.ask("x" * 100)
    with pytest.raises(Exception, match="the system message takes"):
        history.set_system("x" * 100)
    assert history.messages == ["a", "b"] and history.system is None
    assert history.retry().prompt.tokens == prompt.tokens


def test_an_answer_of_nothing_takes_its_message_along(history):
    with pytest.raises(Exception, match="there is no message to answer again"):
        history.retry()
    prompt = history.ask("a").prompt
    history.add_answer("")
    assert history.messages == []
    again = history.retry().prompt
    assert (again.tokens, again.id) == (prompt.tokens, "1")
