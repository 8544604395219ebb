"""Sampling: the filters keep what transformers keeps, the noise follows the probabilities and nothing else."""

from itertools import product

import pytest
import torch

from converters.common.errors import CheckpointError, ConfigError
from titan_tools.infer.decoding import sampling as sampling_file
from titan_tools.infer.decoding.sampling import (
    NoiseKey,
    Sampling,
    _draw,
    check_sampling,
    choose,
    token_weights,
    uniform,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# every filter alone, and every combination
FILTERED = [
    Sampling(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in product(
        (0.6, 1.0, 1.7), (None, 1, 7), (None, 0.05, 0.8, 1.0), (None, 0.02, 0.3, 1.0)
    )
]


def draw(logits, sampling, *, position=0):
    return choose(logits[None], sampling, [NoiseKey("a", 0, position)])[0]


def some_logits(size=50, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def probabilities(logits_BV, sampling):
    weights_BV = token_weights(logits_BV, sampling).double()
    return weights_BV / weights_BV.sum(-1, keepdim=True)


def transformers_scores(seen_BL, logits_BV, sampling):
    """Logits after the processors of transformers that it would build from these options, in its order."""
    from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig

    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
    )
    model = GenerationMixin()
    model.config = PreTrainedConfig()
    return model._get_logits_processor(config, input_ids_seq_length=1)(seen_BL, logits_BV.double())


@pytest.mark.parametrize("dtype, has_ties", [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
def test_filters_and_their_combinations_equal_transformers(dtype, has_ties):
    logits_BV = torch.stack([some_logits(seed=seed) for seed in range(8)]).to(dtype)
    if has_ties:  # as in bfloat16, also where a filter cuts
        logits_BV = (logits_BV * 2).round() / 2
    for sampling in FILTERED:
        ours, expected = probabilities(logits_BV, sampling), transformers_scores(None, logits_BV, sampling).softmax(-1)
        if has_ties:  # which of them it keeps is up to its unstable sort; we keep the first
            assert torch.equal(ours > 0, expected > 0) or sampling.top_p == 0.8
            ours, expected = ours.sort().values, expected.sort().values
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0, msg=str(sampling))


def test_of_equal_tokens_top_p_keeps_the_first_as_greedy_does():
    logits_BV = torch.tensor([[1.0, 4.0, 4.0, 0.0, 4.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    for top_p, kept in ((1e-9, [[1], [0]]), (0.5, [[1, 2], [0, 1, 2]]), (0.9, [[1, 2, 4], [0, 1, 2, 3, 4]])):
        weights_BV = token_weights(logits_BV, Sampling(1.0, top_p=top_p))
        assert [row.nonzero()[:, 0].tolist() for row in weights_BV] == kept


def test_a_large_vocabulary_equals_transformers():
    """Where top-p is a few of many tokens, and where it is more than are looked at first."""
    logits_BV = torch.stack([some_logits(9001) * 0.3, some_logits(9001, seed=1) * 3])
    for top_p in (0.3, 0.9, 0.999):
        sampling = Sampling(1.0, top_p=top_p)
        expected = transformers_scores(None, logits_BV, sampling).softmax(-1)
        torch.testing.assert_close(probabilities(logits_BV, sampling), expected, atol=1e-12, rtol=0)
        for num_sorted in (1, 60, 1024):
            few = token_weights(logits_BV, sampling, num_sorted=num_sorted)
            for row, whole in zip(few, token_weights(logits_BV, sampling), strict=True):
                assert torch.equal(row, whole) if (whole > 0).sum() < num_sorted else not row.any()
    kept = (token_weights(logits_BV, Sampling(1.0, top_p=0.9)) > 0).sum(-1)
    assert kept[1] < 1024 < kept[0]


def test_where_few_tokens_are_too_few_for_top_p_all_are_sorted(monkeypatch):
    logits_BV = torch.stack([some_logits(301, seed=seed) * (seed % 3) for seed in range(20)])
    seats, drawn, times = [NoiseKey("a", 0, row) for row in range(20)], [], []
    within_top_p = sampling_file._within_top_p

    def watched(*arguments, **how):
        times.append(how)
        return within_top_p(*arguments, **how)

    monkeypatch.setattr(sampling_file, "_within_top_p", watched)
    for few in (301, 9, 1):
        monkeypatch.setattr(sampling_file, "_FEW", few)
        drawn.append([choose(logits_BV, Sampling(1.0, top_p=0.8, min_p=p), seats) for p in (None, 0.01)])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(times) == 2 + 4 + 4


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 100.0])
def test_greedy_with_a_penalty_equals_transformers(penalty):
    logits_BV = torch.stack([some_logits(seed=seed) for seed in range(30)])
    logits_BV[10:] = logits_BV[10:] / 10 - 0.3  # most of the likeliest near 0, on both sides
    logits_BV[20:] -= logits_BV[20:].amax(-1, keepdim=True) + 0.1  # and all below
    seen_BL = logits_BV.topk(4).indices
    penalized_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(-1, seen_BL, True)
    sampling = Sampling(repetition_penalty=penalty)
    tokens = choose(logits_BV, sampling, [NoiseKey("a", 0, i) for i in range(30)], penalized_BV=penalized_BV)
    expected = transformers_scores(seen_BL, logits_BV, Sampling(1.0, repetition_penalty=penalty))
    assert tokens == expected.argmax(-1).tolist()
    assert (tokens == logits_BV.argmax(-1).tolist()) == (penalty <= 1)


def test_a_penalty_goes_before_the_filters():
    """The likeliest token was seen; without it the next ones are drawn, by the probabilities of transformers."""
    logits = torch.tensor([3.0, 2.0, 1.5, -1.0])
    seen_BL, num_draws = torch.tensor([[0, 3]]), 4000
    sampling = Sampling(0.9, top_k=2, min_p=0.1, repetition_penalty=2.5)
    seats = [NoiseKey("a", 0, i) for i in range(num_draws)]
    penalized_BV = torch.tensor([[True, False, False, True]]).expand(num_draws, -1)
    drawn = choose(logits.expand(num_draws, -1), sampling, seats, penalized_BV=penalized_BV)
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / num_draws
    expected = transformers_scores(seen_BL, logits[None], sampling).softmax(-1)[0]
    assert expected[0] == expected[3] == 0 and (shares - expected).abs().max() < 4 * (0.25 / num_draws) ** 0.5
    assert shares[0] == shares[3] == 0


@pytest.mark.parametrize("size", [50, 4099])
def test_a_row_is_the_same_alone_and_in_any_batch(size):
    """Odd sizes shift the rows against vector units and cache lines."""
    logits_BV = torch.stack([some_logits(size, seed=seed) for seed in range(9)]).bfloat16().float()
    penalized_BV = torch.rand(logits_BV.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    seats = [NoiseKey(f"p{row}", row % 3, 10 + row) for row in range(9)]
    for sampling in (*FILTERED[::5], Sampling(), Sampling(1.2, repetition_penalty=1.3), Sampling(1e-4, top_p=0.9)):
        if sampling.temperature:
            alone = torch.cat([token_weights(row[None], sampling) for row in logits_BV])
            assert torch.equal(token_weights(logits_BV, sampling), alone)
        together = choose(logits_BV, sampling, seats, penalized_BV=penalized_BV)
        for row in range(9):
            one = slice(row, row + 1)
            assert choose(logits_BV[one], sampling, seats[one], penalized_BV=penalized_BV[one]) == together[one]
        last = choose(logits_BV[4:].flip(0), sampling, seats[:3:-1], penalized_BV=penalized_BV[4:].flip(0))
        assert last == together[:3:-1]


def test_tokens_follow_the_probabilities():
    logits = torch.tensor([0.3, -1.0, 2.0, 1.0])
    num_draws = 20_000
    seats = [NoiseKey("a", 0, i) for i in range(num_draws)]
    drawn = choose(logits.expand(num_draws, -1), Sampling(1.0, seed=5), seats)
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / num_draws
    assert (shares - logits.softmax(0)).abs().max() < 4 * (0.25 / num_draws) ** 0.5  # four standard deviations


def test_filtered_tokens_are_never_drawn():
    logits = some_logits()
    kept = set(logits.topk(3).indices.tolist())
    drawn = {draw(logits, Sampling(5.0, top_k=3), position=i) for i in range(300)}
    assert drawn == kept


def test_noise_depends_on_seed_prompt_sample_and_position_only():
    # fixed for good: a seed gives the same text in every version
    assert uniform(1, NoiseKey("a", 0, 2)) == 0.8468117786931655
    assert uniform(1, NoiseKey("a", 3, 2)) == 0.28861011396024416
    assert uniform(1, NoiseKey(7, 0, 2)) == 0.6097811823390151
    numbers = [uniform(0, NoiseKey("0", 0, i)) for i in range(10_000)]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.012


def test_no_two_seats_share_their_noise():
    """Neither a number and its digits, nor parts of one that could be read as parts of another."""
    ids = ["a", "b", "a2", "1", "-1", "", 1, -1, 12, "1\0", "\0" + "1", "a\0" + "2", "a\0\0" + "2", "\ud800", "é"]
    seats = [NoiseKey(*parts) for parts in product(ids, (0, 1, 12), (1, 2, 12))]
    numbers = {uniform(seed, seat) for seed in (0, 1, 11, -1, 2**200) for seat in seats}
    assert len(numbers) == 5 * len(seats)


def test_the_largest_noise_is_still_below_the_sum():
    logits_BV = torch.tensor([[0.0, -1.0, -9.0], [2.0, 2.0, 2.0], [0.1, 0.7, -400.0]])
    for sampling in (Sampling(1.0), Sampling(0.7, top_p=0.5), Sampling(1e9), Sampling(1e-9)):
        weights_BV = token_weights(logits_BV, sampling)
        noise = torch.full((3, 1), 1 - 2.0**-52, dtype=torch.float64)
        last = [int(row.nonzero().max()) for row in weights_BV]
        assert _draw(weights_BV, noise).tolist() == last
        assert _draw(weights_BV, noise * 0).tolist() == [int(row.nonzero().min()) for row in weights_BV]


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


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 5, 0.9, 0.1), Sampling(repetition_penalty=1.2)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_reported(bad, sampling):
    logits_BV = torch.stack([some_logits(), some_logits(seed=1), some_logits(seed=2)])
    logits_BV[1, 7] = bad
    seats, penalized_BV = [NoiseKey("a", 0, 11), NoiseKey("b", 0, 12), NoiseKey("c", 0, 13)], logits_BV > 0
    with pytest.raises(CheckpointError, match="position 12 of prompt 'b' are not finite"):
        choose(logits_BV, sampling, seats, penalized_BV=penalized_BV)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "sampling, said",
    [
        (Sampling(-0.1), "--temperature is -0.1"),
        (Sampling(NAN), "--temperature is nan"),
        (Sampling(INF), "--temperature is inf"),
        (Sampling(1.0, top_k=0), "--top-k is 0"),
        (Sampling(1.0, top_k=-1), "--top-k is -1"),
        (Sampling(1.0, top_k=301), "the vocabulary has 300 tokens"),
        (Sampling(1.0, top_p=0.0), "--top-p is 0.0"),
        (Sampling(1.0, top_p=-0.5), "--top-p is -0.5"),
        (Sampling(1.0, top_p=1.1), "--top-p is 1.1"),
        (Sampling(1.0, top_p=NAN), "--top-p is nan"),
        (Sampling(1.0, min_p=0.0), "--min-p is 0.0"),
        (Sampling(1.0, min_p=1.5), "--min-p is 1.5"),
        (Sampling(1.0, min_p=NAN), "--min-p is nan"),
        (Sampling(repetition_penalty=0.0), "--repetition-penalty is 0.0"),
        (Sampling(repetition_penalty=-2.0), "--repetition-penalty is -2.0"),
        (Sampling(1.0, repetition_penalty=NAN), "--repetition-penalty is nan"),
        (Sampling(1.0, repetition_penalty=INF), "--repetition-penalty is inf"),
        (Sampling(1.0, repetition_penalty=1e-300), "--repetition-penalty is 1e-300"),
        (Sampling(0.0, top_k=5), "--top-k has no effect at temperature 0"),
        (Sampling(0.0, top_p=0.5), "--top-p has no effect at temperature 0"),
        (Sampling(-0.0, min_p=0.5), "--min-p has no effect at temperature 0"),
    ],
)
def test_values_that_cannot_be_are_refused(sampling, said):
    """I6."""
    with pytest.raises(ConfigError, match=said):
        check_sampling(sampling, vocab_size=300)


def test_every_bad_value_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        check_sampling(Sampling(-1.0, 0, 2.0, 0.0, -1.0))
    names = ("--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty")
    assert all(name in caught.value.message for name in names)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(-0.0),
        Sampling(1.0, 300, 1.0, 1.0),
        Sampling(0.01, 1, 1e-9),
        Sampling(5e-324, 300, 1e-300, 1e-300, 1e-6, seed=-(2**70)),
        Sampling(1e308, top_p=0.5, repetition_penalty=1e6),
        Sampling(repetition_penalty=1e-6),
    ],
)
def test_values_at_the_bounds_are_taken(sampling):
    check_sampling(sampling, vocab_size=300)
    logits_BV = some_logits(300)[None]
    (token,) = choose(logits_BV, sampling, [NoiseKey("a", 0, 0)], penalized_BV=logits_BV.abs() > 1)
    assert 0 <= token < 300
