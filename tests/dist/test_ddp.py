"""DDP: whole copies on each rank, gradients summed in backward; the numbers are those of FSDP with nothing sharded."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.dist import runs
from tests.dist.training import Layout, build_model, global_batch, own_batch, train
from trainer import build
from trainer.config.sections import Config
from trainer.data.batch import TokenBatch
from trainer.parallel import fsdp
from trainer.parallel.one_rank import FSDP_KEEPS_DTYPE_OF_GRADIENTS

DDP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
BF16 = {"mixed_precision_param": "bfloat16", "loss": "plain"}  # chunks are added up in the parameter's dtype
COMPILED = {"enable": True, "backend": "aot_eager", "components": ("model",)}
LAYOUTS = {
    "fp32": Layout("ddp", 2, DDP),
    "mixed, recomputed": Layout("ddp", 2, DDP, BF16, {"activation_checkpoint": {"mode": "full"}}),
    "mixed, compiled": Layout("ddp", 2, DDP, BF16, {"compile": COMPILED}),
    "bf16 throughout": Layout("ddp", 2, DDP, BF16 | {"dtype": "bfloat16"}),
}


def train_as_hsdp(layout: Layout, flavor: str, steps: int) -> dict:
    """Case: the same under FSDP with a shard degree of 1, which is torch's own way to keep copies."""
    ours, build.is_ddp = build.is_ddp, lambda dims: False
    fsdp.is_ddp = build.is_ddp
    try:
        return train(layout, flavor, steps)
    finally:
        build.is_ddp = fsdp.is_ddp = ours


SLOW = {"mixed, compiled", "bf16 throughout"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS])
def test_numbers_are_torchs_hsdp_over_one_shard(pools, name):
    ours = pools[2].run(train, LAYOUTS[name], "debug_gqa", 2)
    torchs = pools[2].run(train_as_hsdp, LAYOUTS[name], "debug_gqa", 2)
    assert ours[0] == ours[1]
    if FSDP_KEEPS_DTYPE_OF_GRADIENTS and name.startswith("mixed"):
        # A CPU computes the gradient of a norm's weight in fp32. DDP's cast rounds it to bf16 (2^-9 of it), FSDP from
        # torch 2.15 on does not. Those weights have less than a hundredth of the squared norm of all.
        norms, theirs = (each[0].pop("norms") for each in (ours, torchs))
        assert norms == pytest.approx(theirs, rel=2**-9 / 100, abs=0)
        ours, torchs = ours[:1], torchs[:1]
    assert ours == torchs  # to the last bit


@pytest.mark.slow
def test_chunks_of_the_loss_differ_by_the_rounding_of_one_gradient(pools):
    layout = Layout("ddp", 2, DDP, {"mixed_precision_param": "bfloat16"})
    ours, torchs = (pools[2].run(case, layout, "debug_gqa", 2)[0] for case in (train, train_as_hsdp))
    assert ours["losses"] == pytest.approx(torchs["losses"], abs=1e-5, rel=0)
    assert ours["norms"] == pytest.approx(torchs["norms"], rel=3e-3)


def gradients_and_sums(layout: Layout, sizes: tuple[int, ...]) -> tuple[dict, Counter, Counter]:
    """Case: gradients of a step in batches of `sizes`; the sizes of the parameters, and those of what was summed."""
    model, summed, whole = build_model(layout, "debug_gqa"), Counter(), dist.all_reduce

    def counted(tensor, **settings):
        summed[tensor.numel()] += 1
        return whole(tensor, **settings)

    batch, num_units = own_batch(model, 0), global_batch(0).num_units
    *most, last = [
        TokenBatch(*pair) for pair in zip(batch.tokens.split(sizes), batch.targets.split(sizes), strict=True)
    ]
    dist.all_reduce = counted
    try:
        with model.accumulating():
            for part in most:
                model.forward_backward(part, num_units)
        model.forward_backward(last, num_units)
    finally:
        dist.all_reduce = whole
    parameters = model.named_parameters()
    gradients = {fqn: parameter.grad for fqn, parameter in parameters.items()}
    return gradients, Counter(parameter.numel() for parameter in parameters.values()), summed


@pytest.mark.parametrize("sizes", [pytest.param((4,), marks=pytest.mark.slow), (1, 1, 2)])
def test_accumulated_batches_are_summed_over_ranks_once(pools, sizes):
    ((expected, _, _),) = pools[1].run(gradients_and_sums, Layout("one rank"), (8,))
    for gradients, parameters, summed in pools[2].run(gradients_and_sums, LAYOUTS["fp32"], sizes):
        assert summed == parameters
        for fqn, gradient in gradients.items():
            assert (gradient - expected[fqn]).norm() <= 1e-5 * expected[fqn].norm(), fqn


def gradients_of_two_batches(layout: Layout) -> list[torch.Tensor]:
    """Case: one batch after another, each summed at once, and nothing cleared in between."""
    model = build_model(layout, "debug_gqa")
    for step in range(2):
        model.forward_backward(own_batch(model, step), global_batch(step).num_units)
    return [parameter.grad for parameter in model.named_parameters().values()]


def test_gradients_that_were_summed_before_count_once(pools):
    (expected,) = pools[1].run(gradients_of_two_batches, Layout("one rank"))
    for gradients in pools[2].run(gradients_of_two_batches, LAYOUTS["fp32"]):
        for ours, one in zip(gradients, expected, strict=True):
            assert (ours - one).norm() <= 1e-5 * one.norm()


def config(data, dump, degree: int, **sections) -> Config:
    parallelism = {"data_parallel_replicate_degree": degree, "data_parallel_shard_degree": 1}
    sections = {"parallelism": parallelism, "training": {"local_batch_size": 1, "global_batch_size": 8}} | sections
    return runs.make_config(data, dump, validation={"enable": True, "local_batch_size": 1}, **sections)


@pytest.mark.slow
def test_going_on_is_bit_equal_also_where_the_order_of_a_sum_shows(pools, data, tmp_path):
    # from three ranks on, and with accumulation
    assert not any(pools[4].run(runs.run, config(data, tmp_path / "whole", 4)))
    runs.begin_from(tmp_path / "again", tmp_path / "whole", 2)
    assert not any(pools[4].run(runs.run, config(data, tmp_path / "again", 4)))
    expected = runs.read_losses(tmp_path / "whole")
    assert runs.read_losses(tmp_path / "again") == {step: expected[step] for step in (3, 4)}
    last = "checkpoint/step-4"
    assert not runs.differences(tmp_path / "whole" / last, tmp_path / "again" / last)

    # and its checkpoint is that of any other layout
    fsdp2 = runs.make_config(data, tmp_path, parallelism={"data_parallel_shard_degree": 2})
    pools[2].run(runs.copy_step, fsdp2, tmp_path / "whole" / last, tmp_path / "copied")
    assert not runs.differences(tmp_path / "whole" / last, tmp_path / "copied", without_rng=True)
    one = config(data, tmp_path / "one", 1)
    assert not any(pools[1].run(runs.run, one))
    assert list(runs.read_losses(tmp_path / "one").values()) == pytest.approx(list(expected.values()), abs=5e-6, rel=0)
