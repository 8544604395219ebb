"""The lines of a batch: what makes a prompt or a conversation of them, and all that can be wrong with them."""

import json
import subprocess

import pytest

from tests.json_lines import read_lines, write_lines
from tests.models.llama import ids_of
from tests.models.llama import write as write_llama
from titan_tools.infer.tasks.batch_lines import read_batch

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, chat_template=TEMPLATE)
    return folder


WRONG = [
    b'{"id": 0, "prompt": "fine"}',
    b"{'id': 1}",
    b'{"id": 2}',
    b'{"id": 3, "prompt": 5}',
    b'{"id": 4, "promt": "x"}',
    b'{"id": 5, "prompt": "x", "temperature": 1}',
    b'{"id": 0, "prompt": "again"}',
    b'{"id": "caf\xe9", "prompt": "x"}',
    b'{"id": 1.5, "prompt": "x"}',
    b'{"id": true, "prompt": "x"}',
    b"",
    b'["x"]',
    b'{"id": 12, "prompt": ""}',
    b'{"id": 13, "prompt": " \\n"}',
    b'{"id": 14, "prompt": "a\\ud800b"}',
    b'{"id": 15, "prompt": "a\\u0000b"}',
    b'{"id": 16, "prompt": "x", "prompt": "y"}',
    b'{"id": 17, "prompt": "' + b"x" * 300 + b'"}',
    b'{"id": 18, "messages": []}',
    b'{"id": ' + b"1" * 5000 + b', "prompt": "x"}',
]
SAID = [
    "line 2: not JSON: Expecting property name enclosed in double quotes at character 1",
    "line 3 (id 2): has no 'prompt'",
    "line 4 (id 3): 'prompt' must be a string, not 5",
    "line 5: unknown key 'promt'; did you mean 'prompt'?",
    "line 6: unknown key 'temperature'; valid: 'id', 'prompt', 'messages'",
    "line 7: the id 0 is used in line 1 already",
    "line 8: not UTF-8: byte 0xe9 at offset 11",
    "line 9: 'id' must be a string or an integer, not 1.5",
    "line 10: 'id' must be a string or an integer, not true",
    'line 12: must be a JSON object, not ["x"]',
    "line 13 (id 12): the prompt is empty",
    "line 14 (id 13): the prompt holds nothing but white space",
    "line 15: a lone surrogate, \\ud800",
    "line 16: a NUL character",
    "line 17: the key 'prompt' is repeated",
    "line 18 (id 17): 301 prompt tokens do not fit the model's context of 256 tokens",
    "line 19 (id 18): 'messages' need --chat",
    "line 20: not JSON: Exceeds the limit",
]


def test_everything_that_is_wrong_in_a_batch_is_reported_at_once(titan, hf, tmp_path, untouched):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(WRONG))
    code, out, err = titan("infer", hf, "--batch", file, "--out", tmp_path / "out.jsonl")
    assert code == 2 and out == "" and not (tmp_path / "out.jsonl").exists()
    assert f"error: {file}: {len(SAID)} invalid lines:\n" in err
    assert [said for said in SAID if f"\n  {said}" not in err] == []


def test_what_every_line_could_be_helped_by_is_a_try(titan, hf, tmp_path, untouched):
    write_lines(tmp_path / "in.jsonl", [{"prompt": "x" * length} for length in (240, 10, 250)])
    code, _, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--max-new-tokens", "30")
    assert code == 2 and "line 1 (id 0): 241 prompt tokens and 30 new ones do not fit" in err
    assert "line 3 (id 2): 251 prompt tokens and 30 new ones do not fit" in err and "line 2" not in err
    assert err.count("try: ") == 1 and "try: --truncate left" in err


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "holds no line"),
        (b"\n \n\r\n", "holds no line"),
        ("naïve".encode("utf-16"), "byte 0xff at offset 0"),
        (None, "No such file"),
    ],
    ids=["empty", "blank", "UTF-16", "missing"],
)
def test_files_that_are_no_batch_are_refused(titan, hf, tmp_path, untouched, content, said):
    if content is not None:
        (tmp_path / "in.jsonl").write_bytes(content)
    code, _, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl")
    assert code == 2 and str(tmp_path / "in.jsonl") in err and said in err


def test_what_editors_leave_behind_is_passed_over(tmp_path):
    """A byte order mark, blank lines, line ends of Windows, none at the end; only a line feed ends a line."""
    content = '\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"id": "x", "prompt": "\\ud83d\\ude00\\\\ud800"}\n{"prompt": "c"}'
    (tmp_path / "in.jsonl").write_bytes(content.encode())
    lines = read_batch(tmp_path / "in.jsonl", lambda line: line, keys=("prompt",))
    assert [(line.id, line.text("prompt")) for line in lines] == [
        (0, "a\u2028b"),
        ("x", "\U0001f600\\ud800"),
        (2, "c"),
    ]


def test_a_chats_prompts_and_messages_stand_in_its_template(titan, hf, tmp_path):
    user = {"role": "user", "content": "hello"}
    talk = [user, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "go on <|end_of_text|>"}]
    own = [{"role": "system", "content": "own"}, user]
    write_lines(
        tmp_path / "in.jsonl", [{"prompt": "hello"}, {"messages": [user]}, {"messages": talk}, {"messages": own}]
    )
    chat = ("--chat", "--system", "sys", "--max-new-tokens", "3")
    code, out, _ = titan("infer", hf, "--batch", tmp_path / "in.jsonl", *chat)
    results = read_lines(out)
    assert code == 0
    plain, listed, long, with_own = results
    assert plain["prompt"] == "hello" and listed["prompt"] == "<|begin_of_text|><system>sys<user>hello<assistant>"
    assert plain["prompt_tokens"] == listed["prompt_tokens"] == [256, *ids_of("<system>sys<user>hello<assistant>")]
    assert plain["tokens"] == listed["tokens"]
    assert long["prompt_tokens"][1:] == ids_of(
        "<system>sys<user>hello<assistant>yes?<user>go on <|end_of_text|><assistant>"
    )
    assert with_own["prompt"] == "<|begin_of_text|><system>own<user>hello<assistant>"
    _, alone, _ = titan("infer", hf, "--prompt", "hello", *chat, "--json")
    assert json.loads(alone)["results"][0]["prompt_tokens"] == plain["prompt_tokens"]


def test_messages_that_are_no_question_are_refused(titan, hf, tmp_path, untouched):
    user = {"role": "user", "content": "hello"}
    wrong = {
        "'messages' must be a list of messages, not []": [],
        "'messages' must be a list of messages, not \"hello\"": "hello",
        "message 1 must have 'role' and 'content', not {\"role\": \"user\"}": [{"role": "user"}],
        "message 2 must have": [user, user | {"name": "me"}],
        'the role of message 1 is "usr"': [user | {"role": "usr"}],
        "the content of message 1 must be a string, not null": [user | {"content": None}],
        "the last message is the assistant's: there is nothing to answer": [user, user | {"role": "assistant"}],
    }
    write_lines(
        tmp_path / "in.jsonl",
        [*({"messages": messages} for messages in wrong.values()), {"prompt": "", "messages": [user]}],
    )
    code, _, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat")
    assert code == 2 and [said for said in wrong if said not in err] == [] and "both 'prompt' and 'messages'" in err


def test_a_long_chat_loses_its_oldest_messages(titan, hf, tmp_path):
    def said(role, letter):
        return {"role": role, "content": letter * 30}

    talk = [
        said("system", "s"),
        *(said(role, letter) for letter in "abcd" for role in ("user", "assistant")),
        said("user", "e"),
    ]
    write_lines(tmp_path / "in.jsonl", [{"messages": talk}])
    code, _, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat")
    assert code == 2 and "prompt tokens do not fit" in err
    code, out, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat", "--truncate", "left")
    (result,) = read_lines(out)
    kept = "".join(f"<user>{letter * 30}<assistant>{letter * 30}" for letter in "d")
    assert result["prompt"] == f"<|begin_of_text|><system>{'s' * 30}{kept}<user>{'e' * 30}<assistant>"
    assert "--truncate left: the beginning of 1 prompt is left out (id 0: " in err


def test_a_message_far_too_long_is_refused_by_its_beginning(titan, hf, tmp_path, untouched):
    write_lines(tmp_path / "in.jsonl", [{"prompt": "word " * 1_000_000}])
    code, _, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat")
    assert code == 2 and "line 1 (id 0): a message of more than " in err


def test_the_last_message_alone_may_leave_less_than_usual(titan, hf, tmp_path):
    """A quarter of the context is kept free; where the last message does not leave it, what it leaves is enough."""
    messages = [{"role": role, "content": role[0] * 200} for role in ("user", "assistant", "user")]
    write_lines(tmp_path / "in.jsonl", [{"messages": messages}])
    code, out, _ = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat", "--truncate", "left", "--ignore-eos")
    (result,) = read_lines(out)
    assert code == 0 and len(result["prompt_tokens"]) == 218 and len(result["tokens"]) == 38


def test_prompts_that_do_not_fit_may_lose_their_beginning(titan, hf, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a" * 100 + "b" * 200}, {"prompt": "c"}])
    code, out, err = titan(
        "infer", hf, "--batch", tmp_path / "in.jsonl", "--truncate", "left", "--max-new-tokens", "100"
    )
    cut, kept = read_lines(out)
    assert code == 0 and "--truncate left: the beginning of 1 prompt is left out (id 0: 145 tokens)" in err
    assert cut["prompt_tokens"] == [256, *ids_of("b" * 155)] and cut["prompt"] == "a" * 100 + "b" * 200
    assert len(cut["tokens"]) == 100 and len(kept["prompt_tokens"]) == 2


def test_a_pipe_is_a_batch_for_one_rank_only(titan, hf, untouched):
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as empty:
        pipe = f"/dev/fd/{empty.stdout.fileno()}"
        code, _, err = titan("infer", hf, "--batch", pipe, "--tp", "2")
        assert code == 2 and "is not a regular file, and each of 2 ranks must read it" in err
        code, _, err = titan("infer", hf, "--batch", pipe)
        assert code == 2 and "holds no line" in err
    code, _, err = titan("infer", hf, "--batch", "missing", "--tp", "2")  # which is no pipe
    assert code == 2 and err == "error: cannot read the batch missing: No such file or directory\n"
    code, _, err = titan("infer", hf, "--batch", "-")
    assert code == 2 and "try: --batch /dev/stdin" in err
