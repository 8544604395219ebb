"""Settings that the loop alone acts on do act: seen in what a run of one rank leaves, tells and calls."""

import gc
import json
import math
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import trainer.train
from tests.dist import runs
from trainer.config.sections import Comm, Config, LRScheduler, Training
from trainer.optim.lr_schedule import Curve, lr_curve
from trainer.ranks import process_group
from trainer.step import TrainStep
from trainer.train_model import TrainModel

STEPS = 8
CURVE = {"warmup_steps": 1, "total_steps": 10, "decay_ratio": 0.5, "decay_type": "cosine", "min_lr_factor": 0.2}


def run_and_look(config: Config) -> dict:
    """Case: a run; what it said, and what it held and called on the way."""
    found = {"inside": set(), "followed": 0, "collected": 0, "timeouts": [], "moments": []}
    is_inside = False

    @contextmanager
    def attention_backends(device):
        nonlocal is_inside
        is_inside = True
        yield
        is_inside = False

    def build_optimizer(*args):
        optimizer = whole["build_optimizer"](*args)
        optimizer.register_step_post_hook(lambda *_: found["moments"].append(_norm_of_moments(optimizer)))
        return optimizer

    def compute_gradients(step, *args, **keys):
        found["inside"].add(is_inside)
        return whole_step(step, *args, **keys)

    def follow(model, optimizer):
        found["followed"] += 1
        whole_follow(model, optimizer)

    def count(phase, info):
        found["collected"] += phase == "start" and info["generation"] == 2

    def set_timeout(timeout, group=None):
        if group is None:
            found["timeouts"].append(timeout.seconds)

    changed = {f.__name__: f for f in (attention_backends, build_optimizer)}
    whole_set_timeout, process_group.set_timeout = process_group.set_timeout, set_timeout
    whole = {name: getattr(trainer.train, name) for name in changed}
    whole_step, TrainStep.compute_gradients = TrainStep.compute_gradients, compute_gradients
    whole_follow, TrainModel.follow = TrainModel.follow, follow
    gc.collect()  # or what cases before this one have made may be due for a collection before the loop
    gc.callbacks.append(count)
    for name, function in changed.items():
        setattr(trainer.train, name, function)
    try:
        found["error"], found["talk"] = runs.run_and_hear(config)
    finally:
        gc.callbacks.remove(count)
        TrainStep.compute_gradients, TrainModel.follow = whole_step, whole_follow
        for name, function in whole.items():
            setattr(trainer.train, name, function)
        process_group.set_timeout = whole_set_timeout
        torch.use_deterministic_algorithms(False)
    return found


def _norm_of_moments(optimizer: torch.optim.Optimizer) -> float:
    return torch.stack([state["exp_avg"].norm() for state in optimizer.state.values()]).norm().item()


@pytest.fixture(scope="module")
def looked(pools, tmp_path_factory):
    """What a run wrote to its files, and what was seen of it."""
    dump = tmp_path_factory.mktemp("run")
    config = runs.make_config(
        runs.make_data(tmp_path_factory.mktemp("data")),
        dump,
        steps=STEPS,
        job={"description": "all settings act", "print_config": True, "save_config_file": "config.json"},
        metrics={"log_freq": 3},
        lr_scheduler=CURVE,
        training={"max_norm": 0.01, "gc_freq": 2},
        validation={"enable": True, "freq": 3, "steps": 1},
        checkpoint={"enable": False},
        comm={"train_timeout_seconds": 77},
        debug={"seed": 3},
    )
    (found,) = pools[1].run(run_and_look, config)
    assert found["error"] == ""
    records = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
    return dump, found, records


def test_steps_are_reported_as_often_as_asked(looked):
    _, _, records = looked
    assert [r["step"] for r in records if "loss" in r] == [1, 3, 6, 8]
    assert [r["step"] for r in records if "validation_loss" in r] == [3, 6, 8]


def test_the_rate_is_that_of_the_curve_with_all_its_settings(looked):
    _, _, records = looked

    def factor(
        step,
    ):  # one step up, four at the peak, half a cosine to 0.2 of it, of which the run does not see the end
        progress = max(step - 1 - 5, 0) / 5
        return 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * progress))

    assert {r["step"]: r["lr"] for r in records if "lr" in r} == {
        step: pytest.approx(1e-2 * factor(step)) for step in (1, 3, 6, 8)
    }


def test_gradients_are_clipped_to_the_norm_that_is_asked_for(looked):
    _, found, records = looked
    assert records[0]["grad_norm"] > 0.1
    assert found["moments"][0] == pytest.approx((1 - 0.9) * 0.01, rel=1e-3)  # of the first step's gradients


def test_the_loop_runs_with_the_settings_around_it(looked):
    _, found, _ = looked
    assert found["inside"] == {True}  # the order of attention's kernels
    assert found["timeouts"] == [300, 77, 300, 77]  # the first step, then the first validation
    assert found["followed"] == 1  # what the build wants done after an update
    assert found["collected"] == 1 + STEPS // 2  # once before the loop


def test_the_config_is_reported_and_kept_as_asked(looked):
    dump, found, _ = looked
    assert "  training.max_norm = 0.01  (default)" in found["talk"]  # the origin is that of a file, and there is none
    assert json.loads((dump / "config.json").read_text())
    assert not (dump / "tb").exists()  # unless it is asked for


def test_the_seed_is_that_of_the_weights_and_of_the_data(pools, tmp_path):
    data = runs.make_data(tmp_path)

    def first_of(name: str, seed: int, **checkpoint) -> float:
        config = runs.make_config(data, tmp_path / name, steps=1, debug={"seed": seed}, checkpoint=checkpoint)
        assert pools[1].run(runs.run, config) == [""]
        return runs.read_losses(tmp_path / name)[1]

    first = first_of("first", 1)
    weights = {"load_only": True, "initial_load_path": str(tmp_path / "first" / "checkpoint" / "step-1")}
    assert first_of("again", 1, enable=False) == first != first_of("other", 2, enable=False)
    assert first_of("a", 1, **weights) != first_of("b", 2, **weights)  # the same weights, other samples
    assert not list(tmp_path.glob("[ab]/checkpoint/*"))  # neither may save


def test_determinism_is_set_before_anything_is_built(pools, tmp_path):
    config = runs.make_config(runs.make_data(tmp_path), tmp_path, steps=1, debug={"deterministic": True})
    assert pools[1].run(is_deterministic, config) == [True]


def is_deterministic(config: Config) -> bool:
    """Case: whether torch had the setting when the model was built."""
    seen, whole = [], trainer.train.build

    def build(*args):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return whole(*args)

    trainer.train.build = build
    try:
        assert runs.run(config) == ""
    finally:
        trainer.train.build = whole
        torch.use_deterministic_algorithms(False)
    return seen == [True]


def test_ranks_are_given_the_time_to_join_that_is_asked_for(monkeypatch):
    class Joined(Exception):
        pass

    def init_process_group(*args, timeout, **keys):
        raise Joined(timeout)

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("trainer.train.StopRequest.listen", lambda self: None)
    monkeypatch.setattr("trainer.observability.flight_recorder.FlightRecorder.switch_on", lambda self: None)
    with pytest.raises(Joined) as output:
        trainer.train.main(Config(comm=Comm(init_timeout_seconds=66)))
    assert output.value.args == (timedelta(seconds=66),)


def test_a_curve_without_a_length_is_that_of_the_run():
    config = Config(training=Training(steps=50), lr_scheduler=LRScheduler(warmup_steps=5))
    assert lr_curve(config.lr_scheduler, config.training.steps) == Curve.of(50, warmup_steps=5, decay_ratio=None)
