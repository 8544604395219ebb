"""Optimizer state under torch's own keys, updates equal to torch's, and clipping equal to torch's on one rank."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from trainer.config.sections import Optimizer as OptimizerSection
from trainer.optim import adam
from trainer.optim.clip import GradientClip
from trainer.optim.optimizer import build_optimizer, optimizer_state


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))


def _with_gradients(model):
    torch.manual_seed(1)
    model(torch.randn(5, 8)).square().sum().backward()
    return model


NAMES, IMPLEMENTATIONS = ("Adam", "AdamW"), ("for-loop", "foreach", "fused")
FP32, BF16 = torch.float32, torch.bfloat16


def _torchs_own(name, implementation, parameters):
    kernels = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    cls = getattr(torch.optim, name)
    return cls(parameters, lr=0.1, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.2, **kernels)


# none of them the default
SETTINGS = {"lr": 0.1, "beta1": 0.8, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.2}


def _steps(optimizer, model, *, gradients=None, after=lambda: None):
    """Three steps on random gradients, which may be rounded to another dtype than the parameters'."""
    for step in range(3):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).to(gradients or parameter.dtype).to(parameter.dtype)
        optimizer.step()
        after()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_steps_are_torchs_own(name, implementation, dtype):
    settings = OptimizerSection(name=name, **SETTINGS, implementation=implementation)
    ours, theirs = _model().to(dtype), _model().to(dtype)
    _steps(build_optimizer(dict(ours.named_parameters()), settings), ours)
    _steps(_torchs_own(name, implementation, theirs.parameters()), theirs)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "state_dtype"), [(FP32, BF16), (BF16, FP32)])
def test_moments_of_another_dtype_are_torchs_in_fp32_rounded(name, implementation, dtype, state_dtype):
    output = str(state_dtype).removeprefix("torch.")
    settings = OptimizerSection(name=name, **SETTINGS, implementation=implementation, state_dtype=output)
    ours, theirs = _model().to(dtype), _model().to(dtype).float()
    optimizer = build_optimizer(dict(ours.named_parameters()), settings)
    expected = _torchs_own(name, implementation, theirs.parameters())

    def round_as_ours():
        for parameter in theirs.parameters():
            parameter.data = parameter.data.to(dtype).float()
            for moment in ("exp_avg", "exp_avg_sq"):
                state = expected.state[parameter]
                state[moment] = state[moment].to(state_dtype).float()

    _steps(optimizer, ours)
    _steps(expected, theirs, gradients=dtype, after=round_as_ours)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.dtype == dtype and torch.equal(a.float(), b)
        for moment in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[a]
            assert state[moment].dtype == state_dtype and torch.equal(state[moment].float(), expected.state[b][moment])
        assert optimizer.state[a]["step"] == 3


def test_parameters_beyond_what_is_copied_at_once_are_all_updated(monkeypatch):
    settings = OptimizerSection(lr=0.1, state_dtype="bfloat16")
    whole, pieces = _model(), _model()
    _steps(build_optimizer(dict(whole.named_parameters()), settings), whole)
    monkeypatch.setattr(adam, "COPIED_ELEMENTS", 100)
    named = list(pieces.named_parameters())
    assert [len(batch) for batch in adam._batches(named)] == [1, 2]
    in_layers = [(f"layers.{number}.{name}", parameter) for number in (8, 9) for name, parameter in named]
    assert [len(batch) for batch in adam._batches(in_layers + named)] == [1, 2] * 3
    _steps(build_optimizer(dict(pieces.named_parameters()), settings), pieces)
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
def test_an_update_is_left_out_where_the_device_found_infinity(state_dtype):
    model = _model()
    optimizer = build_optimizer(dict(model.named_parameters()), OptimizerSection(lr=0.1, state_dtype=state_dtype))
    assert optimizer._step_supports_amp_scaling
    _steps(optimizer, model)

    def held():
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.clone() for tensor in (*model.parameters(), *states)]

    before = held()
    optimizer.found_inf = torch.ones(())
    _steps(optimizer, model)
    assert all(map(torch.equal, held(), before))
    optimizer.found_inf = torch.zeros(())
    _steps(optimizer, model)
    assert not any(map(torch.equal, held(), before))


def test_parameters_without_a_gradient_are_left_alone():
    for state_dtype in (None, "bfloat16"):  # as a dry run does before its step
        model = _model()
        before = [parameter.clone() for parameter in model.parameters()]
        build_optimizer(dict(model.named_parameters()), OptimizerSection(state_dtype=state_dtype)).step()
        assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("name", NAMES)
def test_moments_of_another_dtype_leave_torchs_keys(name):
    fresh, model = _model(), _model()
    with_own = optimizer_state(build_optimizer(dict(fresh.named_parameters()), OptimizerSection(name=name)))
    settings = OptimizerSection(name=name, state_dtype="bfloat16")
    with_other = optimizer_state(build_optimizer(dict(model.named_parameters()), settings))
    assert with_own.keys() == with_other.keys()
    settings = {key: value for key, value in with_own.items() if key.startswith("param_groups.")}
    assert settings == {key: with_other[key] for key in settings}


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_state_has_torchs_flat_keys_and_values(implementation):
    model = _with_gradients(_model())
    optimizer = build_optimizer(dict(model.named_parameters()), OptimizerSection(implementation=implementation))
    fresh = {key: value.clone() for key, value in optimizer_state(optimizer).items() if key.startswith("state.")}
    optimizer.step()
    ours = optimizer_state(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = get_optimizer_state_dict(model, optimizer, options=options)
    theirs = {key: value for key, value in theirs.items() if not key.endswith("param_names")}
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[key], value) and ours[key].dtype == value.dtype == fresh[key].dtype
        else:
            assert ours[key] == value
    assert fresh.keys() == {key for key in theirs if key.startswith("state.")}  # there before the first step


def test_loading_into_the_state_continues_the_run():
    model, settings = _with_gradients(_model()), OptimizerSection(lr=0.1)
    optimizer = build_optimizer(dict(model.named_parameters()), settings)
    optimizer.step()
    resumed = _model()
    resumed.load_state_dict(model.state_dict())
    again = build_optimizer(dict(resumed.named_parameters()), settings)
    for key, value in optimizer_state(again).items():
        if isinstance(value, torch.Tensor):
            value.copy_(optimizer_state(optimizer)[key])
    for m, o in ((model, optimizer), (resumed, again)):
        o.zero_grad()
        _with_gradients(m)
        o.step()
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_on_one_rank_is_torchs(max_norm):
    ours, theirs = _with_gradients(_model()), _with_gradients(_model())
    norm = GradientClip(ours.parameters(), max_norm=max_norm, ranks_per_stage=1)()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    torch.testing.assert_close(norm, expected.double(), rtol=1e-6, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_a_copy_held_elsewhere_too_is_clipped_but_not_counted():
    model = _with_gradients(_model())
    last = model[1].weight
    counted = torch.nn.utils.get_total_norm([p.grad for p in model[0].parameters()])
    before = last.grad.clone()
    norm = GradientClip(model.parameters(), max_norm=1e-3, ranks_per_stage=1, copies=[last])()
    torch.testing.assert_close(norm, counted.double(), rtol=1e-6, atol=0)
    assert last.grad.norm() < before.norm()


def test_a_nan_anywhere_shows_in_the_norm():
    model = _with_gradients(_model())
    model[0].bias.grad[0] = float("nan")
    assert not torch.isfinite(GradientClip(model.parameters(), max_norm=1.0, ranks_per_stage=1)())
