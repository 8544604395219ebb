"""The quickstart: every command of the script parses; in the slow set the whole script runs."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from converters.store import hub_names
from converters.store.location import locate
from tests.unit.titan_tools.test_cli import parse_only
from titan_tools.pages.run_folder import summarize_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "quickstart.sh"
MOST_SECS = 1800  # two to four minutes on two idle cores; its 8 ranks take many times that under other load


def slow(test):
    return pytest.mark.slow(pytest.mark.timeout(MOST_SECS + 60)(test))


def test_its_commands_parse(monkeypatch):
    monkeypatch.setattr(hub_names, "find_local", locate)  # its folders do not exist here, and are no models of the hub
    script = SCRIPT.read_text().replace("\\\n", " ")
    script = script.replace('"${say[@]}"', re.search(r"^say=\((.*)\)", script, re.M)[1])
    script = re.sub(r"\$\(\([^)]*\)\)", "7", script)  # arithmetic
    lines = re.findall(r'^run "[^"]+" +(titan .*)$', script, re.M)
    assert len(lines) >= 20
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])
        done = CliRunner().invoke(parse_only(), words[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk") / "quickstart"
    start = time.monotonic()
    environment = os.environ | {"TITAN_ENVIRONMENT": sys.prefix}  # the one that is tested, and nothing is installed
    done = subprocess.run(["bash", SCRIPT, folder], capture_output=True, text=True, timeout=MOST_SECS, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder, done, time.monotonic() - start


@slow
def test_it_ends_with_a_summary(quickstart):
    _, done, secs = quickstart
    titles = re.findall(r'^run "([^"]+)"', SCRIPT.read_text(), re.MULTILINE)
    summary = done.stdout.partition("── done in ")[2].splitlines()
    output = [re.fullmatch(r" *\d+s  (.+)", line) for line in summary[1 : len(titles) + 1]]
    assert len(titles) >= 20 and [match and match[1] for match in output] == titles  # each command, in order, timed
    assert any(line.startswith("made in ") for line in summary) and any(line.startswith("try next") for line in summary)
    assert "Traceback" not in done.stdout + done.stderr and "Warning" not in done.stdout + done.stderr
    print(f"quickstart took {secs:.0f} s")  # reported, not asserted: a busy machine is not a fault of ours


@slow
def test_the_model_has_learnt_more_than_token_frequencies(quickstart):
    run = summarize_run(quickstart[0] / "outputs" / "debug")
    first_part = dict(run.held_out_loss)[100]  # FSDP 2 x TP 2 x PP 2 ends here
    assert first_part <= run.unigram_entropy - 0.5
    assert run.held_out_loss[-1][1] < first_part  # and FSDP 2 x CP 2 goes on from there
    assert (quickstart[0] / "run.png").stat().st_size > 5000


@slow
def test_transformers_opens_the_export_and_says_the_same(quickstart):
    folder, _, _ = quickstart
    said = (folder / "from_hf.txt").read_text()
    assert said == (folder / "from_dcp.txt").read_text() and said.strip()
    model, loading = AutoModelForCausalLM.from_pretrained(folder / "hf", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    prompt = tokenizer("def __init__(self", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text = tokenizer.decode(out[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    assert text == said.removesuffix("\n")
    assert GenerationConfig.from_pretrained(folder / "hf").eos_token_id == tokenizer.eos_token_id
