"""The loss in pieces gives the gradients of whole logits in any layout; compiled ones and a user's own fit in alike."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.dist.training import Layout, build_model, global_batch, own_batch, whole_loss
from trainer.data.batch import IGNORED, TokenBatch
from trainer.loss import registry as loss_registry
from trainer.loss.cross_entropy import cross_entropy_sum, sharded_cross_entropy_sum
from trainer.loss.registry import register_loss
from trainer.step import TrainStep

TP, PP, CP = "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"
MICROBATCH = "pipeline_parallel_microbatch_size"
BF16 = {"mixed_precision_param": "bfloat16"}
COMPILED = {"compile": {"enable": True, "components": ("loss",), "backend": "aot_eager"}}
ZB = {PP: 2, MICROBATCH: 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"}


def losses_and_gradients(layouts: list[Layout], flavor: str) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Of the first step in each of the layouts, of this rank's shards."""
    found = []
    for layout in layouts:
        model = build_model(layout, flavor)
        share = model.forward_backward(own_batch(model, 0), global_batch(0).num_units)
        model.sum_tied_gradients()
        gradients = {
            fqn: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for fqn, p in model.named_parameters().items()
        }
        found.append((whole_loss(model, share), gradients))
    return found


def assert_alike(found, *, bound: float) -> None:
    for ranks in found:
        (loss, gradients), *others = ranks
        for other_loss, other in others:
            assert other_loss == pytest.approx(loss, rel=1e-6)
            for fqn, gradient in gradients.items():
                assert (other[fqn] - gradient).norm() <= bound * gradient.norm(), fqn


def with_loss(layout: Layout, **training) -> Layout:
    return replace(layout, training=layout.training | training)


CASES = [
    (Layout("tp", 2, {TP: 2}), "debug_tied"),
    (Layout("tp, whole logits", 2, {TP: 2, "disable_loss_parallel": True}), "debug_gqa"),
    (Layout("cp", 2, {CP: 2}), "debug_gqa"),
    (Layout("1F1B", 2, {PP: 2}), "debug_tied"),
]
# Nothing that these do not have
SLOW_CASES = [
    (Layout("zero bubble, tp", 4, ZB | {TP: 2}), "debug_gqa"),
    (Layout("replicas", 2, {"data_parallel_replicate_degree": 2}), "debug_tied"),
    (Layout("hsdp", 4, {"data_parallel_replicate_degree": 2}), "qwen3/debug_tied"),
    (Layout("always resharded", 2, {"fsdp_reshard_after_forward": "always"}), "debug_gqa"),
    (Layout("one"), "debug_tied"),
    (Layout("fsdp", 2), "debug_gqa"),
    (Layout("GPipe", 2, {PP: 2, "pipeline_parallel_schedule": "GPipe"}), "debug_tied"),
]


@pytest.mark.parametrize(
    ("layout", "flavor"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda value: getattr(value, "name", value),
)
def test_gradients_in_pieces_are_those_of_whole_logits(pools, layout, flavor):
    layouts = [with_loss(layout, loss="plain"), with_loss(layout, loss_chunks=5)]
    assert_alike(pools[layout.world_size].run(losses_and_gradients, layouts, flavor), bound=1e-6)


@pytest.mark.slow
def test_in_bf16_they_differ_by_its_rounding(pools):
    layout = Layout("fsdp tp", 4, {TP: 2}, BF16)
    layouts = [with_loss(layout, loss="plain"), with_loss(layout, loss_chunks=5)]
    assert_alike(pools[4].run(losses_and_gradients, layouts, "debug_gqa"), bound=2e-2)


@pytest.mark.parametrize(
    ("parallelism", "loss"),
    [
        pytest.param({TP: 2}, "plain", id="tp, plain", marks=pytest.mark.slow),
        pytest.param({PP: 2}, "chunked", id="pp, chunked", marks=pytest.mark.slow),
        pytest.param({TP: 2}, "chunked", id="tp, chunked"),
        pytest.param({PP: 2}, "plain", id="pp, plain", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_loss_changes_nothing(pools, parallelism, loss):
    eager = Layout("eager", 2, parallelism, {"loss": loss})
    layouts = [eager, replace(eager, sections=COMPILED)]
    assert_alike(pools[2].run(losses_and_gradients, layouts, "debug_tied"), bound=1e-6)


def own_losses(layouts: list[Layout], flavor: str):
    """Losses as a user would register them, one of whole logits and one that can take vocabulary shards."""

    def of_columns(logits_BLV, targets_BL, group=None):
        return sharded_cross_entropy_sum(logits_BLV, targets_BL, group=group)

    register_loss("whole", lambda logits_BLV, targets_BL: cross_entropy_sum(logits_BLV, targets_BL))
    register_loss("columns", of_columns, takes_columns=True)
    try:
        return losses_and_gradients(layouts, flavor)
    finally:
        loss_registry._REGISTERED.clear()


def test_a_registered_loss_trains_with_whole_logits_or_with_shards(pools):
    layouts = [
        Layout("plain", 2, {TP: 2}, {"loss": "plain"}),
        Layout("columns", 2, {TP: 2}, {"loss": "columns"}),
        Layout("whole", 2, {TP: 2, "disable_loss_parallel": True}, {"loss": "whole"}),
    ]
    assert_alike(pools[2].run(own_losses, layouts, "debug_gqa"), bound=2e-6)


def looped_validation(layout: Layout, flavor: str) -> tuple[float, list[int], list[list[str]]]:
    """The loss of a batch, the stages that this rank computed, and its messages, batch by batch."""
    model = build_model(layout, flavor)
    computed, batches = [], []
    exchange = dist.batch_isend_irecv

    def record(messages):
        batches.append(sorted(message.op.__name__ for message in messages))
        return exchange(messages)

    for stage, part in getattr(model._runner, "parts", {0: model.parts[0]}).items():
        part.register_forward_pre_hook(lambda part, inputs, stage=stage: computed.append(stage))
    with (
        mock.patch.object(dist, "batch_isend_irecv", record),
        mock.patch.object(dist, "send", side_effect=AssertionError),
        mock.patch.object(dist, "recv", side_effect=AssertionError),
    ):
        share = model.forward_loss(own_batch(model, 0))
    return whole_loss(model, share), computed, batches


def test_validation_in_a_looped_pipeline_keeps_all_ranks_busy_with_batched_messages(pools):
    """A rank computes two microbatches of its first stage while the first one passes the other rank and comes back."""
    looped = Layout("looped", 2, {PP: 2, MICROBATCH: 2, "pipeline_parallel_schedule": "Interleaved1F1B"})
    ((expected, _, _),) = pools[1].run(looped_validation, Layout("one"), "debug_gqa")
    first, last = pools[2].run(looped_validation, looped, "debug_gqa")
    assert first[0] == last[0] == pytest.approx(expected, rel=1e-6)
    assert first[1] == [0, 0, 2, 2, 0, 0, 2, 2] and last[1] == [1, 1, 3, 3, 1, 1, 3, 3]
    assert first[2][:3] == [["isend"], ["irecv", "isend"], ["irecv", "isend"]]
    assert sum(map(len, first[2])) == sum(map(len, last[2])) == 3 * 4  # between four stages, of four microbatches


def unevenly_valid_step(layout: Layout, samples: TokenBatch) -> tuple[float, float, int]:
    """A step on samples of which some ranks and some passes hold nothing but ignored targets."""
    config, model = layout.config("debug_gqa"), build_model(layout, "debug_gqa")
    mesh = model.meshes["batch"]
    own = TokenBatch(*(t.chunk(mesh.size())[mesh.get_local_rank()] for t in (samples.tokens, samples.targets)))
    step = TrainStep(model, model.meshes, max_norm=1.0, local_batch_size=config.training.local_batch_size)
    result = step.compute_gradients(own).read()
    return result.loss, result.grad_norm, result.num_units


def test_ranks_and_passes_without_a_valid_token_weigh_nothing(pools):
    samples = global_batch(0)
    targets = samples.targets.clone()
    targets[:5] = IGNORED  # the first of two ranks, and one of the second's four passes
    targets[6, 5:] = IGNORED
    samples = TokenBatch(samples.tokens, targets)
    ((loss, norm, num_valid),) = pools[1].run(unevenly_valid_step, Layout("one"), samples)
    assert num_valid == samples.num_units
    accumulated = Layout("accumulated", 2, training={"local_batch_size": 1})
    for output in pools[2].run(unevenly_valid_step, accumulated, samples):
        assert output[0] == pytest.approx(loss, abs=2e-6)
        assert output[1] == pytest.approx(norm, rel=1e-5)
        assert output[2] == num_valid


def test_a_step_without_any_valid_token_is_a_loss_of_zero(pools):
    samples = global_batch(0)
    ((loss, norm, num_valid),) = pools[1].run(
        unevenly_valid_step, Layout("one"), TokenBatch(samples.tokens, torch.full_like(samples.targets, IGNORED))
    )
    assert (loss, norm, num_valid) == (0.0, 0.0, 0)
