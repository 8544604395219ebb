"""`titan infer` on ranks says what one rank says, whoever starts them, and once."""

import json
import math
import subprocess
import sys

import pytest

from tests.chat_templates import CHATML
from tests.dist.infer_ranks import ARGUMENTS, TITAN, outside
from tests.models.llama import write as write_llama


def test_two_ranks_print_what_one_prints(titan_and_ranks, hf):
    one, two = (titan_and_ranks("infer", hf, *ARGUMENTS, "--json", *tp) for tp in ((), ("--tp", "2")))
    assert one[0] == two[0] == 0, two[2]
    assert json.loads(one[1])["results"] == json.loads(two[1])["results"]
    assert json.loads(two[1])["stats"]["tp"] == 2


def test_ranks_of_another_launcher_print_it_once(titan_and_ranks, started, hf):
    ranks = started("infer", hf, *ARGUMENTS, "--json")
    assert [ranks.wait(rank) for rank in (0, 1)] == [0, 0], ranks.output[0].read_text()
    alone = json.loads(titan_and_ranks("infer", hf, *ARGUMENTS, "--json")[1])
    assert json.loads(ranks.output[0].read_text())["results"] == alone["results"]
    assert ranks.output[1].read_text() == ""


def test_a_conversation_of_two_ranks_is_that_of_one_to_its_error(titan_and_ranks, started, tmp_path, monkeypatch):
    """The first rank alone hears what is said, and what is wrong with it ends them all."""
    write_llama(tmp_path / "hf", chat_template=CHATML)
    (tmp_path / "lines").write_text("Hello\n/system Be kind.\nWho are you?\n/sing\nStill there?\n")
    asked = ("infer", tmp_path / "hf", "--chat", "--max-new-tokens", "8")
    ranks = started(*asked, stdin=tmp_path / "lines")
    assert [ranks.wait(rank) for rank in (0, 1)] == [2, 2]
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        code, out, err = titan_and_ranks(*asked)
    assert code == 2 and out.count("\n") >= 2 and "error: there is no command /sing" in err
    first, second = (output.read_text(errors="replace") for output in ranks.output)
    assert "error: " + err.partition("error: ")[2] == second
    assert [line for line in first.splitlines() if line not in err.splitlines()] == out.splitlines()


def test_scores_of_two_ranks_are_those_of_one(titan_and_ranks, started, hf, tmp_path):
    lines = [{"id": i, "prompt": "One two three" * 9 * i, "completion": " four"} for i in range(4)]
    (tmp_path / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("infer", hf, "--score", "--batch", tmp_path / "lines", "--logprobs", "2", "--json")
    ranks = started(*arguments)
    assert [ranks.wait(rank) for rank in (0, 1)] == [0, 0], ranks.output[0].read_text()
    alone, two = json.loads(titan_and_ranks(*arguments)[1]), json.loads(ranks.output[0].read_text())
    for one, other in zip(alone["results"], two["results"], strict=True):
        assert other["tokens"] == one["tokens"] and other["logprob"] == pytest.approx(one["logprob"], abs=1e-4)
        for text, told_by_two in zip(one["logprobs"], other["logprobs"], strict=True):
            assert told_by_two["logprob"] == pytest.approx(text["logprob"], abs=1e-4)
    assert math.exp(-two["stats"]["logprob"] / two["stats"]["num_tokens"]) == two["stats"]["perplexity"]


@pytest.mark.slow
def test_eight_ranks_that_titan_starts_print_what_one_prints(titan_and_ranks, tmp_path):
    """More than there are key/value heads, and mostly more than cores; within a minute and a half."""
    write_llama(tmp_path / "hf", num_attention_heads=8)
    asked = ("infer", tmp_path / "hf", *ARGUMENTS, "--json")
    eight = subprocess.run([*TITAN, *map(str, asked), "--tp", "8"], env=outside(), capture_output=True, timeout=90)
    assert eight.returncode == 0, eight.stderr
    assert json.loads(eight.stdout)["results"] == json.loads(titan_and_ranks(*asked)[1])["results"]
