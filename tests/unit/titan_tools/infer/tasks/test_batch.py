"""`titan infer --batch`: where its results go, and how a rerun goes on."""

import fcntl
import json
import random
import shutil
import sys
from pathlib import Path

import pytest

from converters.common.errors import ConfigError
from tests.json_lines import read_lines, write_lines

# Of different lengths, the first with the most new tokens by far: results end in another order than they began
LINES = [
    {"id": "a", "prompt": "def main("},
    {"id": 1, "prompt": "b" * 250},
    {"id": "naïve\n東京 ", "prompt": "naïve\n東京 \U0001f600"},
    {"prompt": "c" * 251},
    {"id": 10**20, "prompt": "import os\n"},
]
IDS = ["a", 1, "naïve\n東京 ", 3, 10**20]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(hf, tmp_path_factory):
    """The folder of an uninterrupted run of LINES."""
    from titan_tools import cli

    folder = tmp_path_factory.mktemp("whole")
    write_lines(folder / "in.jsonl", LINES)
    with pytest.MonkeyPatch.context() as patch:
        argv = ["titan", "infer", hf, "--batch", folder / "in.jsonl", "--out", folder / "out.jsonl"]
        patch.setattr(sys, "argv", [*map(str, argv)])
        assert cli.run() == 0
    return folder


@pytest.fixture(scope="module")
def whole(made):
    """What it writes."""
    return (made / "out.jsonl").read_bytes()


@pytest.fixture
def place(made, tmp_path):
    """A folder with the batch `in.jsonl`, and what tells how results in `out.jsonl` were made."""
    for name in ("in.jsonl", "out.jsonl.settings.json"):
        shutil.copy(made / name, tmp_path)
    return tmp_path


def test_results_are_those_of_each_prompt_by_itself(titan, hf, whole):
    results = read_lines(whole.decode())
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
    for result in read_lines(whole.decode()):
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


def test_lines_leave_in_the_batchs_order_as_soon_as_they_can(monkeypatch):
    """With two rows the second prompt ends long before the first, and waits for it."""
    from titan_tools.infer.tasks import results

    events = []
    monkeypatch.setattr(results, "stream", lambda line: events.append(json.loads(line)["id"]))
    sink = results.PrintedResults([(id, 0) for id in IDS], as_json=False)
    for id, due in ((1, []), ("a", ["a", 1]), (3, ["a", 1]), (IDS[2], IDS[:4]), (10**20, IDS)):
        sink.append((id, 0), {"id": id})
        assert events == due


def test_samples_of_a_batch_are_those_of_each_prompt(titan, hf, place):
    sampled = ("--samples", "2", "--temperature", "1", "--max-new-tokens", "4", "--logprobs", "1")
    code, out, _ = titan("infer", hf, "--batch", place / "in.jsonl", *sampled)
    results = read_lines(out)
    assert code == 0 and [(r["id"], r["sample"]) for r in results] == [(id, sample) for id in IDS for sample in (0, 1)]
    assert all(len(result["logprobs"]) == 4 for result in results)
    assert results[0]["tokens"] != results[1]["tokens"]
    out_file = place / "out.jsonl"
    asked = ("--batch", place / "in.jsonl", "--out", out_file, *sampled)
    assert titan("infer", hf, *asked)[0] == 0 and out_file.read_text() == out
    out_file.write_text(out.split("\n")[0] + "\n")  # one sample of the first prompt
    # in order: nothing puts away a line that stands twice
    code, output, talk = titan("infer", hf, *asked, "--batch-size", "1", "--json")
    assert code == 0 and "skipped" not in talk
    assert tokens_of(json.loads(output)["results"]) == tokens_of(results) == tokens_of(read_lines(out_file.read_text()))


def tokens_of(results):
    return [(result["id"], result["sample"], result["tokens"]) for result in results]


def test_one_object_has_results_and_stats(titan, hf, place, whole):
    _, out, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--json")
    output = json.loads(out)
    assert output["results"] == read_lines(whole.decode()) and talk == ""
    assert output["stats"]["tokens_per_sec"] > 0


def test_a_rerun_goes_on_wherever_the_file_ends(titan, hf, place, whole):
    """Whole lines stay as they are, a torn one is made again, and the end is an uninterrupted run's, byte for byte."""
    out, ends = place / "out.jsonl", [0, *(i + 1 for i, byte in enumerate(whole) if byte == 10)]
    cuts = {0, ends[1], ends[1] - 1, ends[2] + 1, random.Random(0).randrange(len(whole)), len(whole) - 1}
    for cut in cuts:
        out.write_bytes(whole[:cut])
        code, output, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out)
        num_whole = sum(end <= cut for end in ends[1:])
        assert (code, output, out.read_bytes()) == (0, "", whole)
        assert (f"{num_whole} of 5 prompts are in {out} already: skipped" in talk) == (num_whole > 0)
    assert {file.name for file in place.iterdir()} == {"in.jsonl", "out.jsonl", "out.jsonl.settings.json"}


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
    (place / "out.jsonl.settings.json").rename(place / "real.jsonl.settings.json")
    code, output, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out, "--json")
    assert code == 0 and json.loads(output)["results"] == read_lines(whole.decode())
    assert json.loads(output)["stats"]["ttft_ms"] is None and "all results are in" in talk
    assert out.is_symlink() and real.read_bytes() == whole and real.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("tp", [1, 2])
def test_where_all_results_are_there_nothing_is_loaded(titan, hf, place, whole, untouched, tp):
    out = place / "out.jsonl"
    out.write_bytes(b"".join(reversed(whole.splitlines(keepends=True))))
    argv = ("infer", hf, "--batch", place / "in.jsonl", "--out", out, "--tp", tp)
    code, output, talk = titan(*argv)
    assert (code, output, talk) == (0, "", f"all results are in {out} already: nothing to do\n")
    assert out.read_bytes() == whole
    code, output, talk = titan(*argv, "--json")
    stats = json.loads(output)["stats"]
    assert code == 0 and json.loads(output)["results"] == read_lines(whole.decode())
    assert stats["tp"] == tp and stats["tokens_per_sec"] is stats["ttft_ms"] is None


def test_a_template_that_tells_the_time_tells_a_rerun_that_of_the_first_run(titan, hf, place):
    """So that its prompts are those of the lines that are there, and the end is an uninterrupted run's."""
    timed = shutil.copytree(hf, place / "timed")
    config = json.loads((timed / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ strftime_now('%f') }}{{ messages[0].content }}"
    (timed / "tokenizer_config.json").write_text(json.dumps(config))
    write_lines(place / "in.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    out = place / "out.jsonl"
    argv = ("infer", timed, "--chat", "--batch", place / "in.jsonl", "--out", out, "--max-new-tokens", "2")
    assert titan(*argv)[0] == 0
    whole = out.read_bytes()
    times = [result["prompt_tokens"][:6] for result in read_lines(whole.decode())]
    assert times[0] == times[1]  # it is one moment in all of a run
    out.write_bytes(whole.splitlines(keepends=True)[0])
    code, _, talk = titan(*argv)
    assert code == 0 and f"1 of 2 prompts are in {out} already: skipped" in talk and out.read_bytes() == whole
    out.unlink()
    assert titan(*argv)[0] == 0 and read_lines(out.read_text())[0]["prompt_tokens"][:6] != times[0]


def test_a_batch_may_have_grown_since(titan, hf, place, whole):
    write_lines(place / "in.jsonl", [{"id": "new", "prompt": "x"}, *LINES[:3], LINES[3] | {"id": 3}, LINES[4]])
    (place / "out.jsonl").write_bytes(whole)
    code, _, talk = titan("infer", hf, "--batch", place / "in.jsonl", "--out", place / "out.jsonl")
    assert code == 0 and "5 of 6 prompts" in talk
    new, _, old = (place / "out.jsonl").read_bytes().partition(b"\n")
    assert json.loads(new)["id"] == "new" and old == whole


def changed(line, **values):
    def change(whole: bytes) -> bytes:
        lines = read_lines(whole.decode())
        lines[line] |= values
        return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines).encode()

    return change


OTHER_OUTS = {
    "another prompt": (changed(1, prompt="b"), "line 2 (id 1): another prompt\n"),
    "other tokens": (changed(0, prompt_tokens=[256, 1]), "line 1 (id 'a'): another prompt_tokens"),
    "an id that is gone": (changed(3, id="other"), "line 4 (id 'other'): no such id in the batch"),
    "an id of another type": (changed(1, id="1"), "line 2 (id '1'): no such id in the batch"),
    "twice": (lambda whole: whole + whole[: whole.index(b"\n") + 1], "line 6 (id 'a'): it is there twice"),
    "sample": (changed(0, sample=1), "line 1 (id 'a'): from a run with more --samples"),
    "a first of samples": (changed(0, sample=0), "line 1 (id 'a'): from a run with more --samples"),
    "notes": (lambda whole: b"my notes\n", "line 1 is not a result"),
    "a prompt": (lambda whole: b'{"id": "a", "prompt": "def main("}\n', "line 1 (id 'a'): another prompt_tokens"),
    "bytes": (lambda whole: b"\xff\xfe\n", "line 1 is not a result"),
}


@pytest.mark.parametrize("content, said", OTHER_OUTS.values(), ids=OTHER_OUTS.keys())
def test_a_file_of_other_results_is_refused_and_stays(titan, hf, place, whole, untouched, content, said):
    out, before = place / "out.jsonl", content(whole)
    out.write_bytes(before)
    code, output, err = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out)
    assert (code, output, out.read_bytes()) == (2, "", before)
    assert f"error: {out} holds something else than results of this batch:\n  " in err and said in err
    assert "try: --out ANOTHER_FILE" in err


def test_places_that_cannot_take_results_are_refused(titan, hf, place, untouched):
    (place / "closed").mkdir(mode=0o555)
    (place / "link").symlink_to(place / "in.jsonl")
    (place / "loop").symlink_to(place / "loop")
    before = {file.name for file in place.iterdir()}
    refused = {
        place / "in.jsonl": "is the batch itself",
        place / "link": "is the batch itself",
        place / "loop": "cannot be written: Too many levels of symbolic links",
        place: f"is a folder\ntry: --out {place}/results.jsonl",
        place / "no" / "out.jsonl": f"there is no folder {place}/no\ntry: mkdir -p {place}/no",
        Path("/dev/null"): "is not a regular file",
        Path("/proc/out.jsonl"): "cannot be written",
    }
    for out, said in refused.items():
        code, output, err = titan("infer", hf, "--batch", place / "in.jsonl", "--out", out)
        assert (code, output) == (2, "") and said in err, err
    assert {file.name for file in place.iterdir()} == before


def test_two_cannot_write_one_file(titan, hf, place, untouched):
    with (place / "out.jsonl").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = titan("infer", hf, "--batch", place / "in.jsonl", "--out", place / "out.jsonl")
    assert code == 2 and f"another titan infer is writing {place / 'out.jsonl'} now" in err


def test_a_file_that_another_writer_has_just_replaced_is_refused(tmp_path, monkeypatch):
    """The lock is on the old file: results appended to it would be lost."""
    from titan_tools.infer.tasks import results
    from titan_tools.infer.tasks.results_settings import ResultsSettings

    flock = fcntl.flock

    def replaced_before(descriptor, how):
        (tmp_path / "ordered").write_bytes(b"")
        (tmp_path / "ordered").replace(tmp_path / "out")
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced_before)
    expected = results.ExpectedResults([0], lambda position: {}, settings=ResultsSettings("model"))
    with (
        pytest.raises(ConfigError, match="another titan infer is writing"),
        results.open_results(tmp_path / "out", expected),
    ):
        pass
