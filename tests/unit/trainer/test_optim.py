"""Optimizer state under torch's own keys, updates equal to torch's, and clipping equal to torch's on one rank."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from trainer.config.sections import Optimizer as OptimizerSection
from trainer.optim import GradientClip, build_optimizer, optimizer_state


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False))


def _with_gradients(model):
    torch.manual_seed(1)
    model(torch.randn(5, 8)).square().sum().backward()
    return model


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_a_step_is_torchs_own(name, implementation):
    settings = OptimizerSection(name=name, lr=0.1, weight_decay=0.2, implementation=implementation)
    ours, theirs = _with_gradients(_model()), _with_gradients(_model())
    build_optimizer(dict(ours.named_parameters()), settings).step()
    cls = getattr(torch.optim, name)
    kernels = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    cls(theirs.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2, **kernels).step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


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
