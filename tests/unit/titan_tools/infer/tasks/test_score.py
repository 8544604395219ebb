"""`titan infer --score` against transformers' loss and log-softmax: whole texts, windows of long ones, completions."""

import json
import math
import shutil

import pytest
import torch

from tests.json_lines import write_lines
from tests.models.llama import BOS, ids_of
from tests.models.llama import write as write_llama
from tests.refusals import refusal_of
from titan_tools.infer.decoding import likelihood
from titan_tools.infer.decoding.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "# Design\n\nEin Absatz über `titan`: it moves bytes, 東京.\n"
CONTEXT = 256


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The HF folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("hf")
    return folder, write_llama(folder)


@pytest.fixture(scope="module")
def hf(reference):
    return reference[0]


def expected_logprobs(model, tokens):
    """log p of each token but the first, by transformers."""
    tokens = torch.tensor([tokens])
    with torch.no_grad():
        logprobs_LV = model(tokens).logits[0, :-1].log_softmax(-1)
    return logprobs_LV.gather(1, tokens[0, 1:, None])[:, 0]


def one(titan, *arguments):
    code, out, err = titan("infer", *arguments, "--score", "--json")
    assert code == 0, err
    output = json.loads(out)
    (result,) = output["results"]
    return result, output["stats"]


def test_a_text_has_the_loss_that_transformers_gives_it(titan, hf, reference):
    result, stats = one(titan, hf, "--prompt", TEXT)
    tokens = [BOS, *ids_of(TEXT)]
    with torch.no_grad():
        loss = reference[1](torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.item()
    assert result["prompt_tokens"] == tokens and result["num_tokens"] == len(tokens) - 1 == len(TEXT.encode())
    assert result["logprob"] == pytest.approx(-loss * result["num_tokens"], rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-6)  # a token is a byte here
    assert result["logprobs"] is None
    for name in ("logprob", "num_tokens", "perplexity", "bits_per_byte"):
        assert stats[name] == result[name]
    assert stats["tokens_per_sec"] > 0 and stats["ttft_ms"] is stats["tpot_ms"] is stats["bandwidth_share"] is None


def test_each_token_can_be_reported_with_likelier_ones(titan, hf, reference):
    result, _ = one(titan, hf, "--prompt", TEXT, "--logprobs", "3")
    tokens = result["prompt_tokens"]
    expected = expected_logprobs(reference[1], tokens)
    assert [output["token"] for output in result["logprobs"]] == tokens[1:]
    assert torch.allclose(torch.tensor([output["logprob"] for output in result["logprobs"]]), expected, atol=1e-5)
    assert all(len(output["top"]) == 3 for output in result["logprobs"])
    assert result["logprob"] == pytest.approx(one(titan, hf, "--prompt", TEXT)[0]["logprob"], rel=1e-6)


def test_a_file_longer_than_the_context_goes_through_in_windows(titan, hf, reference, tmp_path):
    """Against windows written by hand, of which each scores what comes behind its first half."""
    text = "".join(f"{n}: {n * n}\n" for n in range(95))
    (tmp_path / "text").write_text(text)
    tokens = [BOS, *ids_of(text)]
    assert 3 * CONTEXT < len(tokens) < 4 * CONTEXT
    expected = [expected_logprobs(reference[1], tokens[: CONTEXT + 1])]
    for start in range(CONTEXT + 1 - CONTEXT // 2, len(tokens) - CONTEXT - 1, CONTEXT // 2 + 1):
        expected.append(expected_logprobs(reference[1], tokens[start : start + CONTEXT + 1])[CONTEXT // 2 - 1 :])
    num_left = len(tokens) - 1 - sum(map(len, expected))
    expected.append(expected_logprobs(reference[1], tokens[-CONTEXT - 1 :])[-num_left:])  # as early as it can
    result, _ = one(titan, hf, "--prompt-file", tmp_path / "text", "--logprobs", "0")
    output = torch.tensor([output["logprob"] for output in result["logprobs"]])
    assert torch.allclose(output, torch.cat(expected), atol=1e-4)
    assert result["num_tokens"] == len(tokens) - 1
    assert result["logprob"] == pytest.approx(torch.cat(expected).double().sum().item(), rel=1e-6)


def test_logits_are_made_a_few_at_a_time(titan, hf, monkeypatch):
    whole, _ = one(titan, hf, "--prompt", TEXT, "--logprobs", "2")
    monkeypatch.setattr(likelihood, "LOGITS_BYTES", 7 * 4 * 301)
    heads, make = [], Engine.__init__

    def watched(self, model, **sizes):
        make(self, model, **sizes)
        model.head.register_forward_hook(lambda _, args, out: heads.append(out.shape[0]))

    monkeypatch.setattr(Engine, "__init__", watched)
    pieces, _ = one(titan, hf, "--prompt", TEXT, "--logprobs", "2")
    assert set(heads[:-1]) == {7} and sum(heads) == whole["num_tokens"]
    assert pieces["logprob"] == pytest.approx(whole["logprob"], rel=1e-6)
    assert [output["token"] for output in pieces["logprobs"]] == [output["token"] for output in whole["logprobs"]]


PAIRS = [
    {"id": "a", "prompt": "The capital of France is ", "completion": "Paris"},
    {"id": 7, "prompt": "The capital of France is", "completion": " Lyon."},
    {"id": "whole", "prompt": "A text by itself"},
    {"id": "alone", "prompt": "", "completion": "after nothing"},
    {"id": "long", "prompt": "x" * 300, "completion": "y" * 20},
]


def batch(titan, hf, path, *arguments):
    code, out, err = titan("infer", hf, "--score", "--batch", path, *arguments)
    assert code == 0, err
    return out, err


def test_a_batch_scores_completions_as_transformers_does(titan, hf, reference, tmp_path):
    out, _ = batch(titan, hf, write_lines(tmp_path / "pairs", PAIRS), "--json", "--logprobs", "0")
    output = json.loads(out)
    assert [result["id"] for result in output["results"]] == [pair["id"] for pair in PAIRS]
    for pair, result in zip(PAIRS, output["results"], strict=True):
        completion = pair.get("completion", "")
        tokens = [BOS, *ids_of(pair["prompt"] + completion)]
        context, blanks = pair["prompt"].rstrip(), len(pair["prompt"]) - len(pair["prompt"].rstrip())
        first = 1 + len(context) if completion else 1
        in_reach = tokens[-CONTEXT - 1 :]
        expected = expected_logprobs(reference[1], in_reach)[first - len(tokens) :].double().sum().item()
        assert result["logprob"] == pytest.approx(expected, rel=1e-5), pair["id"]
        assert (
            result["num_tokens"]
            == len(result["logprobs"])
            == len(completion or pair["prompt"]) + (blanks if completion else 0)
        )
        nats = -result["logprob"] / result["num_tokens"]
        assert result["bits_per_byte"] == pytest.approx(nats / math.log(2))  # a token is a byte here
        assert result["prompt"] == pair["prompt"] and result.get("completion") == pair.get("completion")
        assert result["prompt_tokens"] + result.get("tokens", []) == tokens
        assert ("tokens" in result) == bool(completion)
    total, num = (sum(result[name] for result in output["results"]) for name in ("logprob", "num_tokens"))
    assert output["stats"]["num_tokens"] == num and output["stats"]["logprob"] == pytest.approx(total)
    assert output["stats"]["perplexity"] == pytest.approx(math.exp(-total / num))


def test_a_rerun_scores_what_is_missing_and_sums_up_all(titan, hf, tmp_path):
    pairs, path = write_lines(tmp_path / "pairs", PAIRS), tmp_path / "scores"
    lines, talk = batch(titan, hf, pairs)
    assert "all: 61 tokens" in talk
    batch(titan, hf, pairs, "--out", path)
    path.write_text("".join(lines.splitlines(keepends=True)[1:3]) + '{"id": "al')
    table, talk = batch(titan, hf, pairs, "--out", path)
    assert "2 of 5 texts are in" in talk and table.splitlines()[-1].split()[0] == "61"
    assert path.read_text() == lines
    again = json.loads(batch(titan, hf, pairs, "--out", path, "--json")[0])
    assert again["stats"]["num_tokens"] == 61 and [json.loads(line) for line in lines.splitlines()] == again["results"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"completion": " Rome"}, "line 1 (id 'a'): another completion"),
        ({"id": "b"}, "line 1 (id 'a'): no such id in the batch"),
    ],
)
def test_an_out_of_other_texts_is_refused(titan, hf, tmp_path, changed, said):
    path = tmp_path / "scores"
    batch(titan, hf, write_lines(tmp_path / "pairs", PAIRS[:1]), "--out", path)
    before = path.read_text()
    other = write_lines(tmp_path / "other", [PAIRS[0] | changed])
    code, out, err = titan("infer", hf, "--score", "--batch", other, "--out", path)
    assert (code, out) == (2, "") and said in err and path.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "a", "--temperature", "1"), "--temperature has no effect with --score"),
        (("--prompt", "a", "--logprobs", "302", "--json"), "--logprobs is 302"),
        (("--prompt", "a", "--context", "257"), "--context is 257, but the model's is 256 tokens"),
        (("--prompt", ""), "the prompt is empty"),
        (("--batch", "LINES"), "line 1 (id 0): it has no text to score"),
        (("--batch", "LINES", "--batch-size", "2"), "--batch-size has no effect with --score"),
    ],
)
def test_what_cannot_be_scored_is_refused(titan, hf, tmp_path, arguments, said):
    lines = write_lines(tmp_path / "lines", [{"prompt": "a", "completion": ""}, {"prompt": ""}])
    done = titan("infer", hf, "--score", *(lines if a == "LINES" else a for a in arguments))
    assert said in refusal_of(done, as_json="--json" in arguments)


def test_a_smaller_context_is_a_smaller_window(titan, hf, reference, tmp_path):
    result, _ = one(titan, hf, "--prompt", TEXT[:30], "--context", "20", "--logprobs", "0")
    tokens = result["prompt_tokens"]
    expected = torch.cat(
        [
            expected_logprobs(reference[1], tokens[:21]),
            expected_logprobs(reference[1], tokens[-21:])[20 - len(tokens) + 1 :],
        ]
    )
    assert torch.allclose(torch.tensor([t["logprob"] for t in result["logprobs"]]), expected, atol=1e-4)


def test_without_a_begin_of_text_token_the_first_token_has_no_score(titan, hf, reference, tmp_path):
    folder = tmp_path / "no_bos"
    shutil.copytree(hf, folder)
    described = json.loads((folder / "tokenizer.json").read_text())  # that a config names one says nothing
    (folder / "tokenizer.json").write_text(json.dumps(described | {"post_processor": None}))
    result, _ = one(titan, folder, "--prompt", "abcd")
    assert result["prompt_tokens"] == ids_of("abcd") and result["num_tokens"] == 3
    expected = expected_logprobs(reference[1], ids_of("abcd")).sum().item()
    assert result["logprob"] == pytest.approx(expected, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(-expected / math.log(2) / 3, rel=1e-5)
    code, _, err = titan("infer", folder, "--score", "--prompt", "a")
    assert code == 2 and "one token is too short" in err and "no begin-of-text token" in err


def test_logits_that_are_no_numbers_are_reported(titan, hf, tmp_path):
    """Finite weights may overflow on the way."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(hf, tmp_path / "huge")
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"] *= 1e38
    weights["lm_head.weight"] *= 1e38
    save_file(weights, tmp_path / "huge" / "model.safetensors", metadata={"format": "pt"})
    code, out, err = titan("infer", tmp_path / "huge", "--score", "--prompt", "a")
    assert (code, out) == (2, "") and "the logits of the text with id '0' are not finite" in err


def test_people_get_a_table(titan, hf):
    code, out, talk = titan("infer", hf, "--score", "--prompt", TEXT)
    result, _ = one(titan, hf, "--prompt", TEXT)
    assert code == 0 and out.splitlines()[0].split() == [
        "tokens",
        "log-likelihood",
        "perplexity",
        "bits",
        "per",
        "byte",
    ]
    tokens, nats, perplexity, bits = out.splitlines()[2].split()
    assert (int(tokens), float(nats)) == (result["num_tokens"], pytest.approx(result["logprob"], abs=1e-4))
    assert float(perplexity) == pytest.approx(result["perplexity"], rel=1e-5)
    assert float(bits) == pytest.approx(result["bits_per_byte"], abs=1e-4)
    assert "tokens/s" in talk
