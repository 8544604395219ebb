"""What can go wrong with inference (I1–I6 of the fault matrix), and batches that are interrupted.

Interrupted ones run in a fork of this process, which pays for no start; Ctrl-C also in a process of its own.
"""

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters.errors import TitanError
from tests.tiny_llama import BOS, EOS, ids_of, write_llama
from titan_tools import cli
from titan_tools.infer import run as infer_run
from titan_tools.infer.tasks.batch_lines import read_batch
from titan_tools.infer.tasks.results_file import open_results
from trainer.data import tokenizer as tokenizers

ROOT = Path(__file__).resolve().parents[2]
# The first gets 47 new tokens, the second 4: results end in another order than the batch's
LINES = [{"id": 0, "prompt": "def main(" + "x" * 7}, *({"id": i, "prompt": "b" * (59 - i % 3)} for i in range(1, 6))]
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
def untouched(monkeypatch):
    """Nothing may get as far as weights."""
    monkeypatch.setattr(infer_run, "load_model", lambda *_, **__: pytest.fail("weights were read"))


@pytest.fixture
def refused(titan, hf, untouched):
    """`infer` must refuse the options, saying every part, before it reads weights."""

    def check(*options, says=(), folder=hf):
        code, out, err = titan("infer", folder, *options)
        assert code == 2 and out == "" and err.startswith("error: "), (code, out, err)
        assert [part for part in says if part not in err] == [], err
        return err

    return check


def result_of(told):
    code, out, _ = told
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
        told = titan("infer", hf, *cut, *options)
        result = result_of(told)
        assert result["prompt_tokens"] == [BOS, *(ids_of("a" * 69 + "b" * 30)[1 - num_left :])]
        assert len(result["tokens"]) == num_new and result["prompt"] == cut[1]
        assert f"the prompt lost {100 - num_left} tokens of its beginning (--truncate left), {num_left} stay" in told[2]
        end = result_of(titan("infer", hf, "--prompt", cut[1][1 - num_left :], "--max-new-tokens", num_new, *cut[4:]))
        assert result["tokens"] == end["tokens"]
    kept = result_of(titan("infer", hf, "--prompt", "b" * 47, *cut[2:]))
    assert len(kept["prompt_tokens"]) == 48 and len(kept["tokens"]) == 16


def test_i1_new_tokens_that_leave_no_place_for_a_prompt_are_refused(refused):
    said = ["63 new tokens leave no place for a prompt in the model's context of 64 tokens"]
    refused("--prompt", "a" * 9, "--truncate", "left", "--max-new-tokens", "63", says=said)


EMPTY = {
    "empty": ("", "the prompt is empty"),
    "white space": (" \n\t\u3000", "the prompt holds nothing but white space"),
    "special tokens": (
        "<|begin_of_text|><|end_of_text|>\n",
        "the prompt '<|begin_of_text|><|end_of_text|>' is made of special tokens alone, and in a prompt they are text",
    ),
}


@pytest.mark.parametrize("prompt, said", EMPTY.values(), ids=EMPTY)
def test_i2_a_prompt_of_nothing_is_refused(refused, prompt, said):
    assert "--from-bos" in refused("--prompt", prompt, says=[said])


def test_i2_begin_of_text_alone_by_a_flag(titan, hf):
    short = ("--max-new-tokens", "5", "--json")
    empty = result_of(titan("infer", hf, "--prompt", "", "--from-bos", *short))
    written = result_of(titan("infer", hf, "--prompt", "<|begin_of_text|>", "--special-tokens", *short))
    assert empty["prompt_tokens"] == written["prompt_tokens"] == [BOS] and empty["tokens"] == written["tokens"]


def test_i2_begin_of_text_is_not_doubled_and_text_stays_text(titan, hf):
    short = ("--prompt", "<|begin_of_text|>a", "--max-new-tokens", "2", "--json")
    assert result_of(titan("infer", hf, *short, "--special-tokens"))["prompt_tokens"] == [BOS, *ids_of("a")]
    told = titan("infer", hf, *short)
    assert result_of(told)["prompt_tokens"] == [BOS, *ids_of("<|begin_of_text|>a")]
    assert "special tokens written in the prompt were read as text" in told[2]


def test_i2_a_tokenizer_without_begin_of_text_cannot_begin_with_it(refused, broken):
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    said = ["there is nothing to begin with: this tokenizer has no begin-of-text token"]
    refused("--prompt", "", "--from-bos", says=said, folder=broken)


def test_i3_a_missing_tokenizer_is_told(refused, broken):
    (broken / "tokenizer.json").unlink()
    refused("--prompt", "a", says=["tokenizer.json", str(broken)], folder=broken)


def test_i3_a_tokenizer_of_another_model_is_told(refused, tmp_path):
    write_llama(tmp_path, vocab_size=200, bos_token_id=1, eos_token_id=2)
    refused("--prompt", "a", says=["258 tokens", "200 rows"], folder=tmp_path)


def test_i3_special_tokens_beyond_the_embedding_are_told(refused, broken):
    (broken / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, 128009]}))
    refused("--prompt", "a", says=["[128009]", "301 rows"], folder=broken)


NO_TEXT = {
    "no UTF-8": (b"ok\xff", "is not UTF-8: byte 0xff at offset 2"),
    "a lone surrogate": (b"abc\xed\xa0\x80", "is not UTF-8: byte 0xed at offset 3"),
    "NUL": ("é\0".encode(), "holds a NUL byte at offset 2"),
}


@pytest.mark.parametrize("how", ["file", "stdin"])
@pytest.mark.parametrize("content, said", NO_TEXT.values(), ids=NO_TEXT)
def test_i4_a_prompt_that_is_no_text_is_told_with_its_offset(refused, tmp_path, monkeypatch, content, said, how):
    (tmp_path / "prompt").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    source, name = {"file": (("--prompt-file", tmp_path / "prompt"), tmp_path / "prompt"), "stdin": ("-", "standard")}[
        how
    ]
    refused(*(source if how == "file" else [source]), says=[f"the prompt in {name}", said])


def test_i4_arguments_that_are_no_text_are_told(refused):
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
    encode = tokenizers._JsonTokenizer.encode
    monkeypatch.setattr(
        tokenizers._JsonTokenizer,
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
    "logprobs beyond": (("--logprobs", "302"), "--logprobs is 302"),
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
def test_i4_any_bytes_are_a_batch_or_told(tmp_path, content, lead):
    """And any bytes of OUT are results, the beginning of one, or told; only errors of ours leave."""
    file = tmp_path / "lines"
    file.write_bytes(lead + content)
    with suppress(TitanError):
        for line in read_batch(file, lambda line: line, keys=("prompt",)):
            assert isinstance(line.id, str | int)
            json.dumps([line.id, line.values], ensure_ascii=False).encode()
    with suppress(TitanError), open_results(file, [(0, 0)], lambda key, result: "") as results:
        assert file.read_bytes() == (lead if (0, 0) in results else b"")


# --- batches that are interrupted


@pytest.fixture
def batch(tmp_path):
    """(in, out): the batch LINES, and where its results go."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture(scope="module")
def whole(hf, tmp_path_factory):
    """What an uninterrupted run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command(hf, folder / "in.jsonl", folder / "out.jsonl"))
        assert cli.run() == 0
    return (folder / "out.jsonl").read_bytes()


def command(hf, source, out):
    return ["titan", "infer", str(hf), "--batch", str(source), "--out", str(out), "--batch-size", "2"]


def in_a_fork(argv, inject, errors: Path) -> int:
    """Run a command line after `inject()`; its exit code, negative for a signal. What it says goes to `errors`."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            sys.argv, sys.stderr = argv, errors.open("w")
            inject()
            code = cli.run()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_line(number, when, act):
    """Let `act` happen before, in the middle of or after the writing of the n-th result, from 1."""
    write, seen = os.write, 0

    def watched(descriptor, data):
        nonlocal seen
        seen += bytes(data[:5]) == b'{"id"'
        if seen != number:
            return write(descriptor, data)
        written = 0
        if when != "before":
            written = write(descriptor, data if when == "after" else data[: len(data) // 2])
        act()
        return written or write(descriptor, data)

    os.write = watched


def at_replace(when, act):
    replace = os.replace

    def watched(*arguments):
        if when == "after":
            replace(*arguments)
        act()
        if when == "before":
            replace(*arguments)

    os.replace = watched


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


POINTS = {
    "before the first line": (lambda: at_line(1, "before", kill_self), 0),
    "in the first line": (lambda: at_line(1, "middle", kill_self), 0),
    "after the second line": (lambda: at_line(2, "after", kill_self), 2),
    "in the fifth line": (lambda: at_line(5, "middle", kill_self), 4),
    "before the last line": (lambda: at_line(6, "before", kill_self), 5),
    "before it is put in order": (lambda: at_replace("before", kill_self), 6),
    "after it is put in order": (lambda: at_replace("after", kill_self), 6),
}


@pytest.mark.parametrize("inject, num_kept", POINTS.values(), ids=POINTS)
def test_a_batch_that_is_killed_goes_on_to_the_same_file(titan, hf, batch, whole, tmp_path, inject, num_kept):
    """kill -9 at any point loses no finished line, and the end is an uninterrupted run's, byte for byte."""
    argv, out = command(hf, *batch), batch[1]
    assert in_a_fork(argv, inject, tmp_path / "errors") == -signal.SIGKILL, (tmp_path / "errors").read_text()
    left = out.read_bytes()
    assert left.count(b"\n") == num_kept and set(left.split(b"\n")[:-1]) <= set(whole.split(b"\n"))
    code, _, talk = titan(*argv[1:])
    assert code == 0 and out.read_bytes() == whole
    assert (f"{num_kept} of 6 prompts are in {out} already: skipped" in talk) == (num_kept > 0)
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "errors"}


def test_the_order_of_results_is_not_that_in_which_they_end(hf, batch, whole, tmp_path):
    """Or the tests above would put nothing in order."""
    in_a_fork(command(hf, *batch), POINTS["before it is put in order"][0], tmp_path / "errors")
    left = batch[1].read_bytes()
    assert left != whole and sorted(left.split(b"\n")) == sorted(whole.split(b"\n"))


@pytest.mark.parametrize(
    "number, code, said", [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_request_to_stop_keeps_the_finished_lines(hf, batch, whole, tmp_path, number, code, said):
    def inject():
        at_line(3, "before", lambda: os.kill(os.getpid(), number))

    assert in_a_fork(command(hf, *batch), inject, tmp_path / "errors") == code
    assert batch[1].read_bytes().count(b"\n") == 2
    hint = f"2 of 6 results are in {batch[1]}; the same command goes on from there"
    assert (tmp_path / "errors").read_text().endswith(f"error: {said}\nhint: {hint}\n")


def test_ctrl_c_ends_a_process_with_its_finished_lines(hf, batch):
    source, out = batch
    source.write_text("".join(json.dumps({"id": i, "prompt": f"def f{i}("}) + "\n" for i in range(5000)))
    argv = (sys.executable, "-P", "-m", "titan_tools", *command(hf, source, out)[1:])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > 3):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        err = process.communicate()[1]
    kept = out.read_bytes()
    assert process.returncode == 130 and kept.endswith(b"\n")
    assert all(json.loads(line)["finish_reason"] for line in kept.split(b"\n")[:-1])
    # one more where the signal came between a line and its count
    hints = [f"{kept.count(10) - more:,} of 5,000 results are in {out}; the same command goes on" for more in (0, 1)]
    assert any(f"error: interrupted\nhint: {hint}" in err for hint in hints) and "Traceback" not in err


def test_who_started_the_ranks_says_where_the_finished_lines_are(titan, hf, batch, monkeypatch):
    def interrupted(*_, **__):
        batch[1].touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(infer_run, "run_ranks", interrupted)
    code, _, err = titan(*command(hf, *batch)[1:], "--tp", "2")
    hint = f"finished results are in {batch[1]}; the same command goes on from there"
    assert (code, err) == (130, f"error: interrupted\nhint: {hint}\n")


def test_a_full_disk_keeps_the_finished_lines(titan, hf, batch, whole):
    argv, out = command(hf, *batch), batch[1]
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))  # what a full disk does
    try:
        code, _, err = titan(*argv[1:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    left = out.read_bytes()
    assert code == 2 and 0 < left.count(b"\n") < 6 and left.endswith(b"\n")
    assert f"error: cannot write {out}: File too large\nhint: {left.count(10)} of 6 results are in {out}" in err
    assert titan(*argv[1:])[0] == 0 and out.read_bytes() == whole


def test_a_disk_that_is_full_at_the_end_leaves_all_results(titan, hf, batch, whole, tmp_path, monkeypatch):
    argv, out = command(hf, *batch), batch[1]

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    code, _, err = titan(*argv[1:])
    assert code == 2 and f"cannot put {out} into the batch's order: No space left on device\nhint: all results" in err
    assert sorted(out.read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))
    assert {file.name for file in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
    monkeypatch.undo()


def test_a_full_standard_output_is_told(titan, hf, batch, monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115  its end would write what could not be written
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        code, _, err = titan("infer", hf, "--batch", batch[0])
    with suppress(OSError):
        full.close()
    assert code == 2 and "error: standard output: No space left on device" in err
