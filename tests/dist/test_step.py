"""A step is the mean over all valid tokens however it is cut, and the held-out loss is the same in every layout."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist import runs
from tests.dist.training import Layout, build_model, make_step, own_batch
from trainer.data.batch import TokenBatch
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import local_part
from trainer.step import TrainStep

BF16 = {"mixed_precision_param": "bfloat16"}


def test_accumulated_gradients_are_those_of_the_whole_batch(pools, data, tmp_path):
    (found,) = pools[1].run(runs.gradients_by_microbatch, runs.make_config(data, tmp_path))
    loss, norm, gradients = found[4]
    for size in (1, 2):
        assert found[size][0] == pytest.approx(loss, abs=1e-6)
        assert found[size][1] == pytest.approx(norm, rel=1e-5)
        for ours, whole in zip(found[size][2], gradients, strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-7)


def test_held_out_loss_is_torchs_and_the_same_in_every_layout(pools, data, tmp_path):
    config = runs.make_config(data, tmp_path)
    (expected,) = pools[1].run(runs.held_out_loss, config, 8)
    for world, batch, parallelism in (
        (1, 4, {}),
        (2, 2, {"data_parallel_shard_degree": 2}),
        (2, 4, {"pipeline_parallel_degree": 2}),
        (2, 4, {"tensor_parallel_degree": 2}),
    ):
        config = runs.make_config(
            data, tmp_path, parallelism=parallelism, validation={"enable": True, "local_batch_size": batch}
        )
        for first, second in pools[world].run(runs.validate, config):
            assert first == second
            assert first["validation_loss"] == pytest.approx(expected, abs=2e-6)
            assert first["validation_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_more_held_out_batches_than_there_are_is_an_error(pools, data, tmp_path):
    config = runs.make_config(data, tmp_path, validation={"enable": True, "steps": 10**6})
    (output,) = pools[1].run(runs.too_many_validation_steps, config)
    assert "validation.steps = 1000000, but the held-out part of" in output


class _Reads(TorchDispatchMode):
    """Operations by which the host learns a value: on a GPU it would wait for each."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Calls that copy whole tensors to the host, which no operation shows where they are there already."""

    def __init__(self, names: list[str]):
        super().__init__()
        self.names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Counted(TokenBatch):
    num_units = 100  # counted on the host, where samples are


def reads_of_a_step(layout: Layout, implementation: str, flavor: str = "debug_gqa") -> tuple[list[str], bool]:
    """Case: what the host reads in a second step, and whether that is before the update."""
    model, config = build_model(layout, flavor), layout.config(flavor)
    optimizer = build_optimizer(
        model.named_parameters(), replace(config.optimizer, implementation=implementation, name="AdamW")
    )
    step = make_step(model, config, max_norm=1.0)
    samples = own_batch(model, 0)
    num_before_update: list[int] = []
    with _Reads() as reads, _Lists(reads.names):
        optimizer.register_step_pre_hook(lambda *_: num_before_update.append(len(reads.names)))
        for _ in range(2):
            reads.names.clear()
            step.run(_Counted(samples.tokens, samples.targets), optimizer)
            optimizer.zero_grad()
    return reads.names, num_before_update[-1] > 0


@pytest.mark.parametrize(
    "layout",
    [
        Layout("one rank", 1, {}, BF16),
        Layout("accumulated", 1, {}, BF16 | {"local_batch_size": 2}),
        Layout("fsdp 2", 2, {}, BF16 | {"local_batch_size": 2}),
        Layout("tp 2", 2, {"tensor_parallel_degree": 2}, {"loss": "plain"}),
        Layout("pp 2", 2, {"pipeline_parallel_degree": 2}),
        pytest.param(
            Layout("ddp 2", 2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, BF16),
            marks=pytest.mark.slow,
        ),
        pytest.param(Layout("cp 2", 2, {"context_parallel_degree": 2}, BF16), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_the_host_reads_one_value_in_a_step_and_after_the_update(pools, layout):
    for names, is_before in pools[layout.world_size].run(reads_of_a_step, layout, "fused"):
        assert names == ["tolist"] and not is_before


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_experts_and_their_balance_need_no_other_reading(pools, implementation):
    for names, is_before in pools[2].run(reads_of_a_step, Layout("fsdp 2", 2), implementation, "qwen3/debug_moe_mixed"):
        assert names[0] == "tolist" and names.count("tolist") == 1 and is_before == (implementation == "foreach")


def test_an_update_that_cannot_be_left_out_on_the_device_waits_for_the_verdict(pools):
    ((names, is_before),) = pools[1].run(reads_of_a_step, Layout("one rank", 1, {}, BF16), "foreach")
    assert names[0] == "tolist" and is_before


def step_by(layout: Layout, as_tensor: bool) -> tuple[float, list[torch.Tensor]]:
    """Case: loss and gradients with the count of tokens as a number, or as a tensor on the device."""
    model = build_model(layout, "debug_gqa")
    num_valid = 16_777_217 + 2  # not a number of fp32
    divisor = torch.tensor(num_valid) if as_tensor else num_valid
    loss = model.forward_backward(own_batch(model, 0), divisor)
    return loss.item(), [parameter.grad for parameter in model.named_parameters().values()]


@pytest.mark.parametrize("layout", [Layout("one rank", 1), Layout("pp 2", 2, {"pipeline_parallel_degree": 2})])
def test_a_count_on_the_device_divides_as_a_number_does(pools, layout):
    cases = [pools[layout.world_size].run(step_by, layout, as_tensor) for as_tensor in (False, True)]
    for (loss, gradients), (same_loss, same_gradients) in zip(*cases, strict=True):
        assert loss == same_loss
        assert all(map(torch.equal, gradients, same_gradients))


def updated_by_torch_too(layout: Layout) -> list[str]:
    """Case: FQNs of parameters that torch's AdamW, on DTensors, updates to other values than ours, on their parts."""
    model, config = build_model(layout, "debug_gqa"), layout.config("debug_gqa")
    ours = build_optimizer(model.named_parameters(), config.optimizer)
    copies = {fqn: torch.nn.Parameter(p.detach().clone()) for fqn, p in model.named_parameters().items()}
    by_mesh: dict[object, list[torch.nn.Parameter]] = {}  # torch's kernels take DTensors of one mesh
    for copy in copies.values():
        by_mesh.setdefault(getattr(copy, "device_mesh", None), []).append(copy)
    settings = config.optimizer
    theirs = torch.optim.AdamW(
        [{"params": parameters} for parameters in by_mesh.values()],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    step = make_step(model, config, max_norm=1.0)
    for number in range(2):
        step.compute_gradients(own_batch(model, number))
        for fqn, parameter in model.named_parameters().items():
            copies[fqn].grad = parameter.grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    named = model.named_parameters()
    return [fqn for fqn, copy in copies.items() if not torch.equal(local_part(copy), local_part(named[fqn]))]


@pytest.mark.parametrize(
    "layout",
    [
        Layout("tp 2", 2, {"tensor_parallel_degree": 2}),
        pytest.param(Layout("fsdp 2 × tp 2", 4, {"tensor_parallel_degree": 2}), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_parts_of_dtensors_are_updated_as_torch_updates_dtensors(pools, layout):
    assert pools[layout.world_size].run(updated_by_torch_too, layout) == [[]] * layout.world_size


def test_an_error_of_the_update_leaves_no_guard_on_the_optimizer():
    def fail(optimizer, verdict):
        raise RuntimeError("a hook")

    step = SimpleNamespace(compute_gradients=lambda samples: SimpleNamespace(found_inf=torch.ones(())), _update=fail)
    optimizer = SimpleNamespace(_step_supports_amp_scaling=True)
    with pytest.raises(RuntimeError, match="a hook"):
        TrainStep.run(step, None, optimizer)
    assert not hasattr(optimizer, "found_inf")
