"""A step is the mean over all valid tokens however it is cut, and the held-out loss is the same in every layout."""

import math

import pytest
import torch

from tests.dist import runs


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
