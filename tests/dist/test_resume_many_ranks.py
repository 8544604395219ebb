"""Runs on meshes of several axes that stop and resume: bit-equal. Eight ranks are slow on a laptop: in the slow set."""

import pytest

from converters.store.manifest import check_files
from tests.dist import runs

FSDP2_TP2_PP2 = {
    "data_parallel_shard_degree": 2,
    "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 2,
}
FSDP2_CP2 = {"data_parallel_shard_degree": 2, "context_parallel_degree": 2}


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [2, 4])
@pytest.mark.parametrize(
    ("num_ranks", "parallelism", "flavor"),
    [(8, FSDP2_TP2_PP2, "debug_tied"), (8, FSDP2_TP2_PP2, "debug_gqa"), (4, FSDP2_CP2, "debug_gqa")],
    ids=["fsdp 2 tp 2 pp 2, tied", "fsdp 2 tp 2 pp 2", "fsdp 2 cp 2"],
)
def test_going_on_is_bit_equal(pools, tmp_path, num_ranks, parallelism, flavor, stop_after):
    data = runs.make_data(tmp_path)
    keys = {"flavor": flavor, "steps": 6, "parallelism": parallelism}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert not any(pools[num_ranks].run(runs.run, runs.make_config(data, whole, **keys)))
    runs.begin_from(stopped, whole, stop_after)
    assert not any(pools[num_ranks].run(runs.run, runs.make_config(data, stopped, **keys)))

    expected = runs.read_losses(whole)
    assert runs.read_losses(stopped) == {step: expected[step] for step in range(stop_after + 1, 7)}
    last = stopped / "checkpoint" / "step-6"
    assert runs.differences(last, whole / "checkpoint" / "step-6") == []
    assert check_files(last) == []
