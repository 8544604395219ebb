"""Sampling: the filters keep what transformers keeps, the noise follows the probabilities and nothing else."""

import pytest
import torch

from converters.errors import CheckpointError, ConfigError
from titan_tools.infer.sampling import Sampling, Seat, check_sampling, choose, likely, uniform


def draw(logits, sampling, *, position=0):
    return choose(logits[None], sampling, [Seat("a", 0, position)])[0]


def some_logits(size=50, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.3, top_k=5), Sampling(1.0, top_p=0.8), Sampling(2.0, 20, 0.6)]
)
def test_filters_equal_transformers(sampling):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for seed in range(20):
        logits = some_logits(seed=seed)
        scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].double())
        if sampling.top_k is not None:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p is not None:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
        ours = likely(logits, sampling)
        torch.testing.assert_close(ours / ours.sum(), scores[0].softmax(0), atol=1e-12, rtol=0)


def test_tokens_follow_the_probabilities():
    logits = torch.tensor([0.3, -1.0, 2.0, 1.0])
    num_draws = 20_000
    drawn = [draw(logits, Sampling(1.0, seed=5), position=i) for i in range(num_draws)]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / num_draws
    assert (shares - logits.softmax(0)).abs().max() < 4 * (0.25 / num_draws) ** 0.5  # four standard deviations


def test_filtered_tokens_are_never_drawn():
    logits = some_logits()
    kept = set(logits.topk(3).indices.tolist())
    drawn = {draw(logits, Sampling(5.0, top_k=3), position=i) for i in range(300)}
    assert drawn == kept


def test_noise_depends_on_seed_prompt_and_position_only():
    assert (
        uniform(1, Seat("a", 0, 2)) == 0.8468117786931655
    )  # fixed for good: a seed gives the same text in every version
    assert (
        len(
            {
                uniform(1, Seat("a", 0, 2)),
                uniform(2, Seat("a", 0, 2)),
                uniform(1, Seat("b", 0, 2)),
                uniform(1, Seat("a", 0, 3)),
                uniform(1, Seat("a2", 0, 2)),
            }
        )
        == 5
    )
    numbers = [uniform(0, Seat("0", 0, i)) for i in range(10_000)]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.012


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e300])
def test_extreme_temperatures_stay_finite(temperature):
    logits = some_logits()
    token = draw(logits, Sampling(temperature), position=0)
    assert 0 <= token < len(logits)
    if temperature < 1:
        assert token == int(logits.argmax())


def test_greedy_takes_the_likeliest():
    logits = some_logits()
    assert draw(logits, Sampling(), position=0) == int(logits.argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_told(bad):
    logits = some_logits()
    logits[7] = bad
    with pytest.raises(CheckpointError, match="position 12 .* not finite"):
        draw(logits, Sampling(), position=12)


@pytest.mark.parametrize(
    "sampling, said",
    [
        (Sampling(-0.1), "--temperature is -0.1"),
        (Sampling(float("nan")), "--temperature is nan"),
        (Sampling(float("inf")), "--temperature is inf"),
        (Sampling(1.0, top_k=0), "--top-k is 0"),
        (Sampling(1.0, top_k=301), "the vocabulary has 300 tokens"),
        (Sampling(1.0, top_p=0.0), "--top-p is 0.0"),
        (Sampling(1.0, top_p=1.1), "--top-p is 1.1"),
        (Sampling(1.0, top_p=float("nan")), "--top-p is nan"),
        (Sampling(0.0, top_k=5), "--top-k has no effect at temperature 0"),
        (Sampling(0.0, top_p=0.5), "--top-p has no effect at temperature 0"),
    ],
)
def test_values_that_cannot_be_are_refused(sampling, said):
    with pytest.raises(ConfigError, match=said):
        check_sampling(sampling, vocab_size=300)


def test_every_bad_value_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check_sampling(Sampling(-1.0, 0, 2.0))
    assert all(name in caught.value.message for name in ("--temperature", "--top-k", "--top-p"))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 300, 1.0), Sampling(0.01, 1, 1e-9)])
def test_values_at_the_bounds_are_taken(sampling):
    check_sampling(sampling, vocab_size=300)
    assert 0 <= draw(some_logits(300), sampling, position=0) < 300
