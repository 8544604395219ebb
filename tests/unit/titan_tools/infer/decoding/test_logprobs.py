"""Log-probabilities beside tokens: torch's and transformers' numbers, and an order that ties do not disturb."""

import pytest
import torch

from converters.common.errors import ConfigError
from tests.models.llama import write as write_llama
from tests.tiny_infer import complete, load
from titan_tools.infer.decoding.sampling import Sampling, check_logprobs, token_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


def some_logits(*, rows=6, size=301, seed=0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_torchs(dtype):
    logits_BV = some_logits().to(dtype)
    tokens = [0, 300, 7, 7, 150, 299]
    expected_BV = logits_BV.double().log_softmax(-1)
    for row, output in enumerate(token_logprobs(logits_BV, tokens, 5)):
        assert output.token == tokens[row]
        assert output.logprob == pytest.approx(float(expected_BV[row, tokens[row]]), abs=2e-6)
        values = [logprob for _, logprob in output.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(expected_BV[row].topk(5).values.tolist(), abs=2e-6)
        assert [logprob for _, logprob in output.top] == pytest.approx(
            [float(expected_BV[row, token]) for token, _ in output.top], abs=2e-6
        )


def test_of_equal_tokens_the_first_comes_first_as_greedy_takes_it():
    logits_BV = (some_logits(rows=20, size=4001) / 2).round()
    logits_BV[0] = 0.0
    logits_BV[1, ::2] = -0.0
    for logits_V, output in zip(logits_BV, token_logprobs(logits_BV, [3] * 20, 30), strict=True):
        expected = logits_V.sort(descending=True, stable=True).indices[:30].tolist()
        assert [token for token, _ in output.top] == expected
        assert expected[0] == int(logits_V.argmax())


def test_the_whole_vocabulary_and_none_of_it():
    logits_BV = some_logits(rows=2)
    for output in token_logprobs(logits_BV, [3, 4], 301):
        assert sorted(token for token, _ in output.top) == list(range(301))
        assert sum(torch.tensor(logprob).exp() for _, logprob in output.top) == pytest.approx(1, abs=1e-5)
    alone = token_logprobs(logits_BV, [3, 4], 0)
    assert [output.top for output in alone] == [[], []]
    assert [output.logprob for output in alone] == [output.logprob for output in token_logprobs(logits_BV, [3, 4], 9)]


def test_a_row_is_the_same_alone_and_in_a_batch():
    logits_BV = some_logits()
    together = token_logprobs(logits_BV, [1] * 6, 4)
    assert together == [token_logprobs(row[None], [1], 4)[0] for row in logits_BV]


def test_extreme_logits_keep_their_order():
    logits_BV = torch.tensor([[1e38, -1e38, 0.0, 1e-45, -1e-45, 3e38, -3e38]])
    (output,) = token_logprobs(logits_BV, [5], 7)
    assert [token for token, _ in output.top] == [5, 0, 3, 2, 4, 1, 6]
    assert output.logprob == 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, top_k=3, repetition_penalty=1.5, seed=3)])
def test_generated_tokens_have_the_scores_of_transformers(tmp_path, sampling):
    """The model's own distribution, whatever penalty and filters chose from: transformers' over the same tokens."""
    theirs = write_llama(tmp_path)
    prompt = [256, *range(40, 60)]
    (said,) = complete(load(tmp_path), [prompt], max_new_tokens=20, logprobs=3, sampling=sampling)
    logits_LV = theirs(torch.tensor([prompt + said.tokens])).logits[0, len(prompt) - 1 : -1]
    scores = theirs.compute_transition_scores(
        torch.tensor([prompt + said.tokens]), tuple(logits_LV[:, None]), normalize_logits=True
    )
    assert [output.token for output in said.logprobs] == said.tokens
    assert [output.logprob for output in said.logprobs] == pytest.approx(scores[0].tolist(), abs=1e-4)
    for output, logits_V in zip(said.logprobs, logits_LV, strict=True):
        assert [token for token, _ in output.top] == logits_V.topk(3).indices.tolist()


def test_more_tokens_than_there_are_is_refused():
    for fine in (None, 0, 1, 300):
        check_logprobs(fine, vocab_size=300)
    for wrong in (301, -1):
        with pytest.raises(ConfigError, match=f"--logprobs is {wrong}; .* 300 tokens"):
            check_logprobs(wrong, vocab_size=300)
