"""The learning-rate curve against its formulas, and its one number of state."""

import math

import pytest
import torch

from trainer.optim.lr_schedule import Curve, LRSchedule


def _values(total, **settings):
    curve = Curve.of(total, **settings)
    return [curve.factor(n) for n in range(total)]


def test_warmup_rises_linearly_and_reaches_the_peak():
    values = _values(100, warmup_steps=10, decay_ratio=0.0)
    assert values[:10] == [pytest.approx((n + 1) / 10) for n in range(10)]
    assert set(values[10:]) == {1.0}


@pytest.mark.parametrize(
    ("decay_type", "shape"),
    [
        ("linear", lambda p: 1 - p),
        ("sqrt", lambda p: 1 - math.sqrt(p)),
        ("cosine", lambda p: 0.5 * (1 + math.cos(math.pi * p))),
    ],
)
def test_decay_follows_its_shape_and_stops_one_step_short_of_the_floor(decay_type, shape):
    values = _values(100, warmup_steps=10, decay_ratio=0.4, decay_type=decay_type, min_lr_factor=0.1)
    assert values[60] == 1.0  # warm-up 10, stable to 60
    for n in range(60, 100):
        assert values[n] == pytest.approx(0.1 + 0.9 * shape((n - 60) / 40))
    assert values[-1] > 0.1


def test_without_a_ratio_the_decay_starts_after_the_warmup():
    assert _values(10, warmup_steps=2, decay_ratio=None) == [
        pytest.approx(v) for v in (0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8)
    ]


def test_warmup_longer_than_the_run_is_cut_to_it():
    assert _values(4, warmup_steps=200, decay_ratio=0.5) == [pytest.approx((n + 1) / 4) for n in range(4)]


def test_past_the_curve_the_rate_stays_at_the_floor():
    curve = Curve.of(10, warmup_steps=0, decay_ratio=None, min_lr_factor=0.2)
    assert curve.factor(50) == pytest.approx(0.2)


def _optimizer():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "initial_lr": 2.0}, {"params": [weights[1]], "initial_lr": 4.0}]
    return torch.optim.AdamW(groups, lr=2.0)


def test_schedule_sets_every_group_and_resumes_from_its_number():
    curve = Curve.of(8, warmup_steps=2, decay_ratio=None)
    optimizer = _optimizer()
    schedule = LRSchedule(optimizer, curve)
    seen = []
    for _ in range(8):
        seen.append([g["lr"] for g in optimizer.param_groups])
        schedule.step()
    assert seen == [[2.0 * curve.factor(n), 4.0 * curve.factor(n)] for n in range(8)]

    resumed = _optimizer()
    LRSchedule(resumed, curve).load_state_dict({"last_epoch": 5})
    assert [g["lr"] for g in resumed.param_groups] == seen[5]
