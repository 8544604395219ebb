"""`titan infer --batch`: what it reads, where its results go, and how a rerun goes on."""

import fcntl
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_llama import ids_of, write_llama
from titan_tools.infer import run as infer_run
from titan_tools.infer.tasks.batch_lines import read_batch

# Of different lengths, the first with the most new tokens by far: results end in another order than they began
LINES = [
    {"id": "a", "prompt": "def main("},
    {"id": 1, "prompt": "b" * 250},
    {"id": "naïve\n東京 ", "prompt": "naïve\n東京 \U0001f600"},
    {"prompt": "c" * 251},
    {"id": 10**20, "prompt": "import os\n"},
]
IDS = ["a", 1, "naïve\n東京 ", 3, 10**20]
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


@pytest.fixture
def place(tmp_path):
    """A folder with the batch `in.jsonl`."""
    write(tmp_path / "in.jsonl", LINES)
    return tmp_path


@pytest.fixture
def untouched(monkeypatch):
    """Nothing may get as far as weights or ranks."""
    monkeypatch.setattr(infer_run, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(infer_run, "load_model", lambda *_, **__: pytest.fail("weights were read"))


def write(file: Path, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(text: str):
    """JSON lines, which only line feeds end."""
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.fixture(scope="module")
def whole(hf, tmp_path_factory):
    """What an uninterrupted run of LINES writes."""
    from titan_tools import cli

    folder = tmp_path_factory.mktemp("whole")
    write(folder / "in.jsonl", LINES)
    with pytest.MonkeyPatch.context() as patch:
        argv = ["titan", "infer", hf, "--batch", folder / "in.jsonl", "--out", folder / "out.jsonl"]
        patch.setattr(sys, "argv", [*map(str, argv)])
        assert cli.run() == 0
    return (folder / "out.jsonl").read_bytes()


def test_results_are_those_of_each_prompt_by_itself(titan, hf, whole):
    results = read(whole.decode())
    assert [result["id"] for result in results] == IDS
    for line, result in zip(LINES, results, strict=True):
        _, out, _ = titan("infer", hf, "--prompt", line["prompt"], "--json")
        (alone,) = json.loads(out)["results"]
        assert list(result) == list(alone) and result | {"id": "0"} == alone
    assert [len(result["tokens"]) for result in results] == [128, 5, 128, 4, 128]


def test_results_are_those_of_transformers(hf, whole):
    """Which continues each prompt's tokens by itself."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(hf).eval()
    for result in read(whole.decode()):
        prompt = torch.tensor([result["prompt_tokens"]])
        num_new = len(result["tokens"])
        said = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_new, pad_token_id=0
        )
        assert said[0, prompt.shape[1] :].tolist() == result["tokens"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_batch_size_changes_nothing_but_the_order_of_work(titan, hf, place, whole, batch_size):
    code, out, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--batch-size", batch_size)
    assert (code, out) == (0, whole.decode()) and "5 completions" in talk


def test_lines_leave_in_the_batchs_order_as_soon_as_they_can(hf, place, monkeypatch):
    """With two rows the second prompt ends long before the first, and waits for it."""
    from titan_tools.infer.tasks import sinks

    events = []
    monkeypatch.setattr(sinks, "stream", lambda line: events.append(json.loads(line)["id"]))
    keys = [(id, 0) for id in IDS]
    with sinks.open_sink(None, keys, lambda key, result: "", as_json=False) as sink:
        for id, due in ((1, []), ("a", ["a", 1]), (3, ["a", 1]), (IDS[2], IDS[:4]), (10**20, IDS)):
            sink.append((id, 0), {"id": id})
            assert events == due


def test_samples_of_a_batch_are_those_of_each_prompt(titan, hf, place):
    sampled = ("--samples", "2", "--temperature", "1", "--max-new-tokens", "4", "--logprobs", "1")
    code, out, _ = titan("infer", hf, "--batch", place / "in.jsonl", *sampled)
    results = read(out)
    assert code == 0 and [(r["id"], r["sample"]) for r in results] == [(id, sample) for id in IDS for sample in (0, 1)]
    assert all(len(result["logprobs"]) == 4 for result in results)
    assert results[0]["tokens"] != results[1]["tokens"]
    out_file = place / "out.jsonl"
    out_file.write_text(out.split("\n")[0] + "\n")  # one sample of the first prompt
    code, told, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out_file, *sampled, "--json")
    assert code == 0 and "skipped" not in talk
    assert tokens_of(json.loads(told)["results"]) == tokens_of(results) == tokens_of(read(out_file.read_text()))


def tokens_of(results):
    return [(result["id"], result["sample"], result["tokens"]) for result in results]


def test_one_object_has_results_and_stats(titan, hf, place, whole):
    _, out, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--json")
    told = json.loads(out)
    assert told["results"] == read(whole.decode()) and talk == ""
    assert told["stats"]["tokens_per_sec"] > 0


def test_a_rerun_goes_on_wherever_the_file_ends(titan, hf, place, whole):
    """Whole lines stay as they are, a torn one is made again, and the end is an uninterrupted run's, byte for byte."""
    out, ends = place / "out.jsonl", [0, *(i + 1 for i, byte in enumerate(whole) if byte == 10)]
    cuts = {0, ends[1], ends[1] - 1, ends[2] + 1, random.Random(0).randrange(len(whole)), len(whole) - 1}
    for cut in cuts:
        out.write_bytes(whole[:cut])
        code, told, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out)
        num_whole = sum(end <= cut for end in ends[1:])
        assert (code, told, out.read_bytes()) == (0, "", whole)
        assert (f"{num_whole} of 5 prompts are in {out} already: skipped" in talk) == (num_whole > 0)
    assert [file.name for file in place.iterdir()] == ["in.jsonl", "out.jsonl"] or len([*place.iterdir()]) == 2


def test_a_crash_of_the_machine_that_leaves_nuls_is_a_torn_line(titan, hf, place, whole):
    end = whole.index(b"\n") + 1
    (place / "out.jsonl").write_bytes(whole[: end + 9] + b"\0" * 4096)
    assert titan("infer", hf, "--batch", place / "in.jsonl", "--out", place / "out.jsonl")[0] == 0
    assert (place / "out.jsonl").read_bytes() == whole


def test_lines_in_another_order_are_put_in_order_and_nothing_is_made_again(titan, hf, place, whole):
    """And what the user made of the file stays: its mode, and that it is a link."""
    real, out = place / "real.jsonl", place / "out.jsonl"
    real.write_bytes(b"".join(reversed(whole.splitlines(keepends=True))))
    real.chmod(0o640)
    out.symlink_to(real)
    code, told, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out, "--json")
    assert code == 0 and json.loads(told)["results"] == read(whole.decode())
    assert json.loads(told)["stats"]["ttft_ms"] is None and "all results are in" in talk
    assert out.is_symlink() and real.read_bytes() == whole and real.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("tp", [1, 2])
def test_where_all_results_are_there_nothing_is_loaded(titan, hf, place, whole, untouched, tp):
    out = place / "out.jsonl"
    out.write_bytes(b"".join(reversed(whole.splitlines(keepends=True))))
    argv = ("infer", hf, "--batch", place / "in.jsonl", "--out", out, "--tp", tp)
    code, told, talk = titan(*argv)
    assert (code, told, talk) == (0, "", f"all results are in {out} already: nothing to do\n")
    assert out.read_bytes() == whole
    code, told, talk = titan(*argv, "--json")
    stats = json.loads(told)["stats"]
    assert code == 0 and json.loads(told)["results"] == read(whole.decode())
    assert stats["tp"] == tp and stats["tokens_per_sec"] is stats["ttft_ms"] is None


def test_a_batch_may_have_grown_since(titan, hf, place, whole):
    write(place / "in.jsonl", [{"id": "new", "prompt": "x"}, *LINES[:3], LINES[3] | {"id": 3}, LINES[4]])
    (place / "out.jsonl").write_bytes(whole)
    code, _, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--out", place / "out.jsonl")
    assert code == 0 and "5 of 6 prompts" in talk
    new, _, old = (place / "out.jsonl").read_bytes().partition(b"\n")
    assert json.loads(new)["id"] == "new" and old == whole


def changed(line, **values):
    def change(whole: bytes) -> bytes:
        lines = read(whole.decode())
        lines[line] |= values
        return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines).encode()

    return change


OTHER_OUTS = {
    "another prompt": (changed(1, prompt="b"), (), "line 2 (id 1): another prompt"),
    "other tokens": (changed(0, prompt_tokens=[256, 1]), (), "line 1 (id 'a'): other tokens of the same prompt"),
    "an id that is gone": (changed(3, id="other"), (), "line 4 (id 'other'): no such id in the batch"),
    "an id of another type": (changed(1, id="1"), (), "line 2 (id '1'): no such id in the batch"),
    "twice": (lambda whole: whole + whole[: whole.index(b"\n") + 1], (), "line 6 (id 'a') stands there twice"),
    "samples": (lambda w: w, ("--samples", "2", "--temperature", "1"), "line 1 (id 'a'): another number of --samples"),
    "sample": (changed(0, sample=1), (), "line 1 (id 'a'): another number of --samples"),
    "logprobs": (lambda whole: whole, ("--logprobs", "0"), "line 1 (id 'a'): made without --logprobs"),
    "longer": (lambda whole: whole, ("--max-new-tokens", "3"), "line 1 (id 'a'): more tokens than --max-new-tokens"),
    "notes": (lambda whole: b"my notes\n", (), "line 1 is no result"),
    "notes without an end": (lambda whole: b"my notes", (), "line 1 is no result"),
    "a prompt": (lambda whole: b'{"id": "a", "prompt": "def main("}', (), "line 1 (id 'a'): no result"),
    "bytes": (lambda whole: b"\xff\xfe\n", (), "line 1 is no result"),
}


@pytest.mark.parametrize("content, options, said", OTHER_OUTS.values(), ids=OTHER_OUTS.keys())
def test_a_file_of_other_results_is_refused_and_stays(titan, hf, place, whole, untouched, content, options, said):
    out, before = place / "out.jsonl", content(whole)
    out.write_bytes(before)
    code, told, err = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out, *options)
    assert (code, told, out.read_bytes()) == (2, "", before)
    assert f"error: {out} holds something else than results of this batch:\n  " in err and said in err
    assert "try: --out ANOTHER_FILE" in err


def test_places_that_cannot_take_results_are_refused(titan, hf, place, untouched):
    (place / "closed").mkdir(mode=0o555)
    (place / "link").symlink_to(place / "in.jsonl")
    (place / "loop").symlink_to(place / "loop")
    refused = {
        place / "in.jsonl": "is the batch itself",
        place / "link": "is the batch itself",
        place / "loop": "is a link that leads back to itself",
        place: f"is a folder\ntry: --out {place}/results.jsonl",
        place / "no" / "out.jsonl": f"there is no folder {place}/no\ntry: mkdir -p {place}/no",
        Path("/dev/null"): "is no regular file",
        Path("/proc/out.jsonl"): "cannot be written",
    }
    for out, said in refused.items():
        code, told, err = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out)
        assert (code, told) == (2, "") and said in err, err
    assert sorted(file.name for file in place.iterdir()) == ["closed", "in.jsonl", "link", "loop"]


def test_two_cannot_write_one_file(titan, hf, place, untouched):
    with (place / "out.jsonl").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = titan("infer", hf, "--batch", place / "in.jsonl", "--out", place / "out.jsonl")
    assert code == 2 and f"another titan infer is writing {place / 'out.jsonl'} now" in err


def test_a_writer_that_replaced_the_file_while_another_waited_is_noticed(tmp_path):
    """The lock is of the file that was, so the one that is there now must be locked anew."""
    from titan_tools.infer.tasks import results_file

    (tmp_path / "out").write_bytes(b'{"id": 0, "text": "old"}\n')
    lock = results_file._lock

    def replaced_meanwhile(descriptor, path, how):
        if not (tmp_path / "new").exists():
            (tmp_path / "new").touch()
            (tmp_path / "ordered").write_bytes(b'{"id": 1, "text": "new"}\n')
            (tmp_path / "ordered").replace(path)
        lock(descriptor, path, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results_file, "_lock", replaced_meanwhile)
        with results_file.open_results(tmp_path / "out", [(0, 0), (1, 0)], lambda key, result: "") as results:
            assert (0, 0) not in results and (1, 0) in results


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
    "line 2: not JSON: Expecting property name enclosed in double quotes at offset 29 of the file",
    "line 3 (id 2): has no 'prompt'",
    "line 4 (id 3): 'prompt' must be a string, not 5",
    "line 5: no such key: 'promt'; did you mean 'prompt'?",
    "line 6: no such key: 'temperature'; there are 'id', 'prompt', 'messages'",
    "line 7: the id 0 stands in line 1 already",
    "line 8: not UTF-8: byte 0xe9 at offset ",
    "line 9: 'id' must be a string or an integer, not 1.5",
    "line 10: 'id' must be a string or an integer, not true",
    'line 12: must be a JSON object, not ["x"]',
    "line 13 (id 12): the prompt is empty",
    "line 14 (id 13): the prompt holds nothing but white space",
    "line 15: a lone surrogate, \\ud800, at offset ",
    "line 16: a NUL character at offset ",
    "line 17: the key 'prompt' stands twice in it",
    "line 18 (id 17): 301 prompt tokens do not fit the model's context of 256 tokens",
    "line 19 (id 18): 'messages' are of a chat",
    "line 20: not JSON: Exceeds the limit",
]


def test_everything_that_is_wrong_in_a_batch_is_told_at_once(titan, hf, tmp_path, untouched):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join(WRONG))
    code, out, err = titan("infer", hf, "--batch", file, "--out", tmp_path / "out.jsonl")
    assert code == 2 and out == "" and not (tmp_path / "out.jsonl").exists()
    assert f"error: {file}: {len(SAID)} of its lines cannot be:\n" in err
    assert [said for said in SAID if f"\n  {said}" not in err] == []
    content = file.read_bytes()
    for what, offset in (
        ("0xe9", content.index(b"\xe9")),
        ("ud800,", content.index(rb"\ud800")),
        ("NUL", content.index(rb"\u0000")),
    ):
        assert f"{what} at offset {offset}" in err.replace("character ", "").replace("\\", "")


def test_what_every_line_could_be_helped_by_is_a_try(titan, hf, tmp_path, untouched):
    write(tmp_path / "in.jsonl", [{"prompt": "x" * length} for length in (240, 10, 250)])
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
    assert [(line.number, line.id, line.text("prompt")) for line in lines] == [
        (1, 0, "a\u2028b"),
        (3, "x", "\U0001f600\\ud800"),
        (4, 2, "c"),
    ]


def test_a_chats_prompts_and_messages_stand_in_its_template(titan, hf, tmp_path):
    user = {"role": "user", "content": "hello"}
    talk = [user, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "go on <|end_of_text|>"}]
    own = [{"role": "system", "content": "own"}, user]
    write(tmp_path / "in.jsonl", [{"prompt": "hello"}, {"messages": [user]}, {"messages": talk}, {"messages": own}])
    chat = ("--chat", "--system", "sys", "--max-new-tokens", "3")
    code, out, _ = titan("infer", hf, "--batch", tmp_path / "in.jsonl", *chat)
    results = read(out)
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
        "message 1 must have 'role' and 'content', and is {\"role\": \"user\"}": [{"role": "user"}],
        "message 2 must have": [user, user | {"name": "me"}],
        'the role of message 1 is "usr"': [user | {"role": "usr"}],
        "the content of message 1 must be a string, not null": [user | {"content": None}],
        "the last message is the assistant's: there is nothing to answer": [user, user | {"role": "assistant"}],
    }
    write(
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
    write(tmp_path / "in.jsonl", [{"messages": talk}])
    code, _, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat")
    assert code == 2 and "prompt tokens do not fit" in err
    code, out, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat", "--truncate", "left")
    (result,) = read(out)
    kept = "".join(f"<user>{letter * 30}<assistant>{letter * 30}" for letter in "d")
    assert result["prompt"] == f"<|begin_of_text|><system>{'s' * 30}{kept}<user>{'e' * 30}<assistant>"
    assert "--truncate left: the beginning of 1 prompt is left out (id 0: " in err


def test_a_message_far_too_long_is_refused_by_its_beginning(titan, hf, tmp_path, untouched):
    write(tmp_path / "in.jsonl", [{"prompt": "word " * 1_000_000}])
    code, _, err = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat")
    assert code == 2 and "line 1 (id 0): a message of more than " in err


def test_the_last_message_alone_may_leave_less_than_usual(titan, hf, tmp_path):
    """A quarter of the context is kept free; where the last message does not leave it, what it leaves is enough."""
    messages = [{"role": role, "content": role[0] * 200} for role in ("user", "assistant", "user")]
    write(tmp_path / "in.jsonl", [{"messages": messages}])
    code, out, _ = titan("infer", hf, "--batch", tmp_path / "in.jsonl", "--chat", "--truncate", "left", "--ignore-eos")
    (result,) = read(out)
    assert code == 0 and len(result["prompt_tokens"]) == 218 and len(result["tokens"]) == 38


def test_prompts_that_do_not_fit_may_lose_their_beginning(titan, hf, tmp_path):
    write(tmp_path / "in.jsonl", [{"prompt": "a" * 100 + "b" * 200}, {"prompt": "c"}])
    code, out, err = titan(
        "infer", hf, "--batch", tmp_path / "in.jsonl", "--truncate", "left", "--max-new-tokens", "100"
    )
    cut, kept = read(out)
    assert code == 0 and "--truncate left: the beginning of 1 prompt is left out (id 0: 145 tokens)" in err
    assert cut["prompt_tokens"] == [256, *ids_of("b" * 155)] and cut["prompt"] == "a" * 100 + "b" * 200
    assert len(cut["tokens"]) == 100 and len(kept["prompt_tokens"]) == 2


def test_a_pipe_is_a_batch_for_one_rank_only(titan, hf, untouched):
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as empty:
        pipe = f"/dev/fd/{empty.stdout.fileno()}"
        code, _, err = titan("infer", hf, "--batch", pipe, "--tp", "2")
        assert code == 2 and "is no file, and each of 2 ranks reads it for itself" in err
        code, _, err = titan("infer", hf, "--batch", pipe)
        assert code == 2 and "holds no line" in err
    code, _, err = titan("infer", hf, "--batch", "-")
    assert code == 2 and "try: --batch /dev/stdin" in err
