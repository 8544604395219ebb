"""`titan infer` as a user types it: what it prints, what it reads, and how it refuses."""

import io
import json
import shutil
import sys

import pytest
import torch

from tests.doors import convert
from tests.models.llama import BOS, write_meta
from tests.models.llama import write as write_llama
from titan_tools.infer import run as infer_run
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.tasks import one_prompt

PROMPT = "def main("
SHORT = ("--prompt", PROMPT, "--max-new-tokens", "12")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def dcp(hf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp") / "checkpoint"
    convert(hf, folder, to="dcp")
    return folder


@pytest.fixture
def broken(hf, tmp_path):
    """A copy of the HF folder to damage."""
    return shutil.copytree(hf, tmp_path / "broken")


def tokens(printed):
    return json.loads(printed)["results"][0]["tokens"]


def test_json_is_one_object_with_results_and_stats(titan, hf):
    code, out, _ = titan("infer", hf, *SHORT, "--json")
    output = json.loads(out)
    assert code == 0
    (result,) = output["results"]
    assert list(result) == ["id", "prompt", "text", "prompt_tokens", "tokens", "finish_reason", "logprobs"]
    assert (result["prompt"], result["finish_reason"], len(result["tokens"])) == (PROMPT, "length", 12)
    assert result["prompt_tokens"][0] == BOS and len(result["prompt_tokens"]) == 1 + len(PROMPT)
    stats = output["stats"]
    assert (stats["tp"], stats["dtype"], stats["seed"]) == (1, "float32", 0)
    measured = ["ttft_ms", "tpot_ms", "tokens_per_sec", "bandwidth_gb_per_sec"]
    assert list(stats) == [*measured, "bandwidth_share", "peak_memory_gib", "tp", "dtype", "seed", "quantize"]
    assert all(stats[name] > 0 for name in (*measured, "peak_memory_gib")) and stats["bandwidth_share"] is None


def test_text_alone_goes_to_stdout(titan, hf):
    _, out, _ = titan("infer", hf, *SHORT, "--json")
    code, text, talk = titan("infer", hf, *SHORT)
    assert code == 0
    assert text == json.loads(out)["results"][0]["text"] + "\n"
    assert "tokens/s" in talk


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_text_comes_while_tokens_are_made(titan, hf, tmp_path, monkeypatch, chat):
    shutil.copytree(hf, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode() + b"\n")))
    said, decode = [], Engine.decode

    def watched(engine, tokens):
        said.append(sys.stdout.getvalue())
        return decode(engine, tokens)

    monkeypatch.setattr(Engine, "decode", watched)
    _, out, _ = titan("infer", tmp_path, *(chat or ("--prompt", PROMPT)), "--max-new-tokens", "12")
    assert len(said) == 11 and all(out.startswith(text) for text in said)
    assert len(set(said)) > 2 and len(said[-1]) >= len(out) - 8


def test_every_format_says_the_same(titan, hf, dcp, tmp_path):
    dcp_said, hf_said = (tokens(titan("infer", folder, *SHORT, "--json")[1]) for folder in (dcp, hf))
    assert dcp_said == hf_said
    plain = write_llama(tmp_path / "hf", rope_scaling=None)
    write_meta(tmp_path / "meta", plain)
    places = (tmp_path / "hf", tmp_path / "meta", tmp_path / "meta" / "consolidated.00.pth")
    output = [titan("infer", place, *SHORT, "--json") for place in places]
    assert tokens(output[0][1]) == tokens(output[1][1]) == tokens(output[2][1]) != hf_said


def test_a_runs_folder_stands_for_its_newest_whole_step(titan, hf, dcp, tmp_path):
    steps = tmp_path / "outputs" / "checkpoint"
    for name in ("step-5", "step-10", "step-20", "step-30-bak"):
        shutil.copytree(dcp, steps / name)
    shutil.rmtree(steps / "step-5")
    (steps / "step-5").mkdir()
    data = next((steps / "step-20").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    expected = tokens(titan("infer", hf, *SHORT, "--json")[1])
    for path in (tmp_path / "outputs", steps):
        code, out, err = titan("infer", path, *SHORT, "--json")
        assert code == 0 and tokens(out) == expected
        assert "skipped step-20" in err and "reading" in err and "step-10" in err


def test_a_run_without_a_whole_step_is_refused(titan, tmp_path):
    (tmp_path / "step-5").mkdir()
    code, _, err = titan("infer", tmp_path, *SHORT)
    assert code == 2 and "no step in" in err and "step-5: it has no .metadata" in err


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_prompt_from_file_and_stdin(titan, hf, tmp_path, monkeypatch, how):
    text = "naïve 東京\n"
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    source = ("--prompt-file", tmp_path / "prompt.txt") if how == "file" else ("-",)
    code, out, _ = titan("infer", hf, *source, "--max-new-tokens", "3", "--json")
    assert code == 0 and json.loads(out)["results"][0]["prompt"] == text


@pytest.mark.parametrize("stdin", [None, "closed"])
def test_a_prompt_from_a_closed_standard_input_is_refused(titan, hf, untouched, monkeypatch, stdin):
    if stdin:
        stdin = io.StringIO()
        stdin.close()
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = titan("infer", hf, "-")
    assert (code, out) == (2, "")
    assert err == "error: there is no standard input to read a prompt from\ntry: --prompt TEXT\n"


def test_who_waits_at_a_terminal_for_a_prompt_says_so(titan, hf, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"def main("))
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = titan("infer", hf, "-", *SHORT[2:])
    assert code == 0 and err.startswith("reading the prompt from the terminal; Ctrl-D on a line of its own ends it\n")
    assert out == titan("infer", hf, *SHORT)[1]


def test_new_tokens_stop_at_the_context_by_themselves(titan, hf):
    _, out, _ = titan("infer", hf, "--prompt", "a" * 200, "--json")
    assert len(tokens(out)) == 256 - 201
    _, out, _ = titan("infer", hf, "--prompt", "a", "--json")
    assert len(tokens(out)) == 128


def test_stop_tokens_come_from_the_generation_config(titan, hf, broken):
    (whole,) = json.loads(titan("infer", hf, *SHORT, "--json")[1])["results"]
    free, end = whole["tokens"], whole["tokens"].index(ord("z") - ord("!"))  # where the answer says a z
    config = json.loads((broken / "generation_config.json").read_text())
    (broken / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [257, free[end]]}))
    (result,) = json.loads(titan("infer", broken, *SHORT, "--json")[1])["results"]
    assert result["tokens"] == free[: end + 1] and result["finish_reason"] == "stop"
    assert result["text"] == whole["text"].partition("z")[0]
    just_enough = ("--prompt", PROMPT, "--max-new-tokens", end + 1, "--json")
    assert json.loads(titan("infer", broken, *just_enough)[1])["results"] == [result]  # both ends: it had said all
    (result,) = json.loads(titan("infer", broken, *SHORT, "--json", "--ignore-eos")[1])["results"]
    assert result == whole


@pytest.mark.parametrize(
    ("options", "of_config", "end"),
    [(("--stop", "\x14", "--stop", "z"), None, "z"), ((), ["\x14"], "\x14"), (("--stop", "z"), "\x14", "z")],
    ids=["options", "generation config", "both"],
)
def test_an_answer_ends_before_a_stop_string(titan, hf, broken, monkeypatch, options, of_config, end):
    """And is shown in pieces, as it comes."""
    (whole,) = json.loads(titan("infer", hf, *SHORT, "--json")[1])["results"]
    config = json.loads((broken / "generation_config.json").read_text())
    (broken / "generation_config.json").write_text(json.dumps(config | {"stop_strings": of_config}))
    (result,) = json.loads(titan("infer", broken, *SHORT, *options, "--json", "--logprobs", "0")[1])["results"]
    assert (result["text"], result["finish_reason"]) == (whole["text"].partition(end)[0], "stop")
    at = whole["tokens"].index({"z": 89, "\x14": 208}[end])  # ids of the tiny tokenizer
    assert result["tokens"] == whole["tokens"][: at + 1] and len(result["logprobs"]) == at + 1
    pieces = []
    monkeypatch.setattr(one_prompt, "stream", pieces.append)
    titan("infer", broken, *SHORT, *options)
    assert "".join(pieces) == result["text"] + "\n" and len(pieces) > 3


def test_dtype_is_the_checkpoints_unless_said(titan, dcp, hf, tmp_path):
    half = tmp_path / "half"
    convert(hf, half, to="dcp", dtype="bfloat16")
    output = [
        json.loads(titan("infer", folder, *SHORT, *options, "--json")[1])["stats"]["dtype"]
        for folder, options in ((half, ()), (half, ("--dtype", "float32")), (dcp, ("--dtype", "bfloat16")))
    ]
    assert output == ["bfloat16", "float32", "bfloat16"]


def test_float16_is_computed_in_float16(titan, hf, tmp_path):
    convert(hf, tmp_path / "half", to="hf", dtype="float16")
    code, out, err = titan("infer", tmp_path / "half", *SHORT, "--json")
    assert code == 0 and not err and json.loads(out)["stats"]["dtype"] == "float16"


def test_a_terminal_that_does_not_know_all_letters_shows_the_others(titan, hf, tmp_path, monkeypatch):
    """Text gets question marks, JSON escapes: neither ends in an error."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"id": "é", "prompt": PROMPT}))
    output = [
        titan("infer", hf, *options, "--max-new-tokens", "12")[1]
        for options in (("--prompt", PROMPT), ("--batch", tmp_path / "in.jsonl"))
    ]
    for options, expected in zip((SHORT, ("--batch", tmp_path / "in.jsonl", *SHORT[2:])), output, strict=True):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            assert titan("infer", hf, *options)[0] == 0
        stdout.flush()
        said = stdout.buffer.getvalue().decode("latin-1")
        if expected.startswith("{"):
            assert said.isascii() and json.loads(said) == json.loads(expected)
        else:
            assert "?" in said and said == expected.encode("latin-1", "replace").decode("latin-1")


def test_a_min_p_of_zero_is_none(titan, hf):
    sampled = (*SHORT, "--temperature", "1")
    assert titan("infer", hf, *sampled, "--min-p", "0")[:2] == titan("infer", hf, *sampled)[:2]
    assert titan("infer", hf, *SHORT, "--min-p", "0")[0] == 0  # nor is it refused beside greedy


def test_samples_are_shown_one_after_another(titan, hf):
    sampled = (*SHORT, "--samples", "3", "--temperature", "1", "--batch-size", "2")
    _, out, _ = titan("infer", hf, *sampled, "--json")
    results = json.loads(out)["results"]
    assert [(result["id"], result["sample"]) for result in results] == [("0", 0), ("0", 1), ("0", 2)]
    code, out, _ = titan("infer", hf, *sampled)
    assert code == 0 and out == "".join(f"--- {result['sample']}\n{result['text']}\n" for result in results)


def test_a_path_that_holds_no_checkpoint_is_refused(titan, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no weights here")
    for path in (tmp_path / "missing", tmp_path / "empty", tmp_path / "notes.txt"):
        code, out, err = titan("infer", path, *SHORT)
        assert code == 2 and out == "" and path.name in err and "Traceback" not in err


def test_weights_that_are_not_numbers_are_reported(titan, broken):
    from safetensors.torch import load_file, save_file

    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    code, out, err = titan("infer", broken, *SHORT)
    assert code == 2 and out == "" and "not finite" in err


def test_tp_that_is_not_the_launchs_size_is_refused(titan, hf, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = titan("infer", hf, *SHORT, "--tp", "2")
    assert code == 2 and "--tp is 2, but the launcher started 4 ranks" in err


def test_standard_input_is_refused_under_torchrun(titan, hf, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = titan("infer", hf, "-")
    assert code == 2 and "no standard input" in err


@pytest.mark.parametrize("name", ["__0_0.distcp", "titan_model.json"])
def test_a_file_that_changed_since_its_manifest_is_reported_before_anything_is_said(titan, dcp, tmp_path, name):
    shutil.copytree(dcp, tmp_path / "bad")
    data = bytearray((tmp_path / "bad" / name).read_bytes())
    place = len(data) // 2 if name.endswith("distcp") else data.index(b"10000.0") + 1  # rope_theta 11000
    data[place] ^= 1
    (tmp_path / "bad" / name).write_bytes(data)
    code, out, err = titan("infer", tmp_path / "bad", *SHORT)
    assert code == 2 and out == ""
    assert f"\n  {name}: its bytes have changed (CRC32)" in err and f"try: titan verify {tmp_path / 'bad'}" in err


@pytest.mark.parametrize("ranks_left_with, code", [(0, 0), (3, 3)])
def test_the_exit_code_of_the_ranks_comes_out(titan, hf, monkeypatch, ranks_left_with, code):
    monkeypatch.setattr(infer_run, "run_ranks", lambda *_, **__: ranks_left_with)
    assert titan("infer", hf, *SHORT, "--tp", "2")[0] == code
