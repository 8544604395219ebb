"""`titan infer --score` against transformers' loss and log-softmax: whole texts, windows of long ones, completions."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_infer import complete, load
from tests.tiny_llama import BOS, write_llama
from titan_tools.infer import likelihood
from titan_tools.infer.engine import Engine
from titan_tools.infer.likelihood import Likelihood, windows

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "# Design\n\nEin Absatz über `titan`: it moves bytes, 東京.\n"
CONTEXT = 256


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The HF folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("hf")
    return folder, write_llama(folder)


@pytest.fixture
def hf(reference, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return reference[0]


def ids_of(text):
    """Of the byte tokenizer, whose ids are the letters' places in its alphabet."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    letters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0] if text else ""
    return [alphabet.index(letter) for letter in letters]


def expected_logprobs(model, tokens):
    """log p of each token but the first, by transformers."""
    tokens = torch.tensor([tokens])
    with torch.no_grad():
        logprobs_LV = model(tokens).logits[0, :-1].log_softmax(-1)
    return logprobs_LV.gather(1, tokens[0, 1:, None])[:, 0]


def one(titan, *arguments):
    code, out, err = titan("infer", *arguments, "--score", "--json")
    assert code == 0, err
    told = json.loads(out)
    (result,) = told["results"]
    return result, told["stats"]


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


def test_each_token_can_be_told_with_likelier_ones(titan, hf, reference):
    result, _ = one(titan, hf, "--prompt", TEXT, "--logprobs", "3")
    tokens = result["prompt_tokens"]
    expected = expected_logprobs(reference[1], tokens)
    assert [told["token"] for told in result["logprobs"]] == tokens[1:]
    assert torch.allclose(torch.tensor([told["logprob"] for told in result["logprobs"]]), expected, atol=1e-5)
    assert all(len(told["top"]) == 3 for told in result["logprobs"])
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
    told = torch.tensor([told["logprob"] for told in result["logprobs"]])
    assert torch.allclose(told, torch.cat(expected), atol=1e-4)
    assert result["num_tokens"] == len(tokens) - 1
    assert result["logprob"] == pytest.approx(torch.cat(expected).double().sum().item(), rel=1e-6)


@given(num_tokens=st.integers(2, 200), first=st.integers(1, 60), context=st.integers(1, 40))
def test_windows_predict_each_token_once_behind_half_a_context(num_tokens, first, context):
    predicted = first
    for window in windows(num_tokens, first=first, context=context):
        assert window.start >= 0 and len(window) - 1 <= context and window.stop > predicted
        assert predicted - window.start >= min(predicted, context / 2)
        predicted = window.stop
    assert predicted == max(first, num_tokens)


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
    assert [told["token"] for told in pieces["logprobs"]] == [told["token"] for told in whole["logprobs"]]


def test_what_was_generated_has_the_score_that_it_was_generated_with(reference):
    model = load(reference[0])
    prompt = [BOS, 72, 101, 108]
    (said,) = complete(model, [prompt], max_new_tokens=40, logprobs=0)
    reader = Likelihood(Engine(model, rows=1, room=64), context=CONTEXT, vocab_size=301)
    told = []
    for targets, logits_PV in reader.logits(prompt + said.tokens, first=len(prompt)):
        told += logits_PV.log_softmax(-1)[range(len(targets)), targets].tolist()
    assert told == pytest.approx([one.logprob for one in said.logprobs], abs=1e-4)


def test_a_shared_beginning_is_read_once_and_changes_nothing(reference, monkeypatch):
    model = load(reference[0])
    beginning = [BOS, *range(40, 80)]
    texts = [beginning + end for end in ([1, 2], [1, 3, 4], [5], [1, 2])]
    num_read, forward = [], Engine._forward
    monkeypatch.setattr(
        Engine, "_forward", lambda self, step, tokens: num_read.append(len(tokens[0])) or forward(self, step, tokens)
    )

    def nats(reader, tokens):
        told = [
            torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none")
            for targets, logits in reader.logits(tokens, first=len(beginning))
        ]
        return torch.cat(told)

    together = Likelihood(Engine(model, rows=1, room=64), context=CONTEXT, vocab_size=301)
    shared = [nats(together, tokens) for tokens in texts]
    assert num_read == [len(beginning) + 1, 3, 1, 2]
    for tokens, told in zip(texts, shared, strict=True):
        alone = nats(Likelihood(Engine(model, rows=1, room=64), context=CONTEXT, vocab_size=301), tokens)
        assert torch.allclose(told, alone, atol=1e-5)
