"""Every sort of mesh saves what it loaded, cut as `titan reshard --for-mesh` cuts it."""

from dataclasses import dataclass, field
from functools import cache

import pytest

from converters.common.box import Box
from converters.layout.mesh_shape import MeshShape
from converters.source.open import open_checkpoint
from converters.store.manifest import check_files
from tests.dist import runs
from tests.doors import reshard

KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


@dataclass(frozen=True)
class Case:
    mesh: MeshShape
    flavor: str = "debug_gqa"
    options: dict = field(default_factory=dict)

    @property
    def parallelism(self) -> dict:
        return {key: getattr(self.mesh, axis) for axis, key in KEYS.items()} | self.options


CASES = [
    Case(MeshShape(dp_shard=2, tp=2, ep=2, etp=2), "qwen3/debug_moe_mixed"),
]
SLOW_CASES = [
    Case(MeshShape(pp=2, dp_shard=2), "debug_tied", {"pipeline_parallel_schedule": "ZBVZeroBubble"}),
    Case(MeshShape(dp_replicate=2, dp_shard=2)),
    Case(MeshShape(dp_shard=3, tp=2)),  # 3 divides no dim of the model
    Case(MeshShape(dp_shard=2, tp=2)),
    Case(MeshShape(dp_shard=2, cp=2), "debug_tied"),
    Case(MeshShape(pp=2, dp_shard=2, tp=2), "debug_tied"),
    Case(MeshShape(dp_shard=4, ep=2), "qwen3/debug_moe_mixed"),
    Case(MeshShape(dp_shard=8, tp=2, ep=4), "qwen3/debug_moe_mixed"),  # efsdp 4: two ranks have no expert
    Case(MeshShape(dp_replicate=2, dp_shard=2, tp=2, ep=4), "qwen3/debug_moe_mixed"),
    Case(MeshShape(dp_shard=2, tp=2, ep=2, etp=2), "gpt_oss/debug_window"),
    Case(MeshShape(dp_shard=3, tp=2), "gpt_oss/debug_window"),
    Case(MeshShape(dp_shard=8, tp=2, ep=4), "gpt_oss/debug_window"),
    Case(MeshShape(dp_shard=2, tp=2, ep=2, etp=2), "llama4/debug_maverick"),
]


@pytest.fixture(scope="module")
def sources(pools, data, tmp_path_factory):
    """Flavor → a step that two FSDP ranks saved."""

    @cache
    def made(flavor: str):
        dump = tmp_path_factory.mktemp(flavor.replace("/", "_"))
        fsdp2 = {"data_parallel_shard_degree": 2}
        config = runs.make_config(data, dump, steps=2, model=_model(flavor), parallelism=fsdp2)
        assert pools[2].run(runs.run, config) == ["", ""]
        return dump / "checkpoint" / "step-2"

    return made


def _model(flavor: str) -> dict[str, str]:
    family, _, name = flavor.rpartition("/")
    return {"name": family or "llama3", "flavor": name}


def _boxes(step) -> dict[str, list[Box]]:
    tensors = open_checkpoint(step).tensors
    return {
        fqn: sorted((chunk.box for chunk in entry.chunks), key=lambda box: box.offsets)
        for fqn, entry in tensors.items()
        if not fqn.startswith("rng.")
    }


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda case: f"{case.mesh} {case.flavor}",
)
def test_loaded_and_saved_is_the_same_cut_for_the_mesh(pools, data, sources, tmp_path, case):
    source, copy, resharded = sources(case.flavor), tmp_path / "copy", tmp_path / "resharded"
    config = runs.make_config(
        data,
        tmp_path,
        model=_model(case.flavor),
        parallelism=case.parallelism,
        training={"global_batch_size": -1},
    )
    progress = pools[case.mesh.world_size].run(runs.copy_step, config, source, copy)
    assert all(output.step == 2 for output in progress)
    assert runs.differences(copy, source, without_rng=True) == []
    assert check_files(copy) == []

    reshard(source, resharded, mesh=case.mesh)
    assert runs.differences(resharded, source, without_rng=True) == []
    assert _boxes(copy) == _boxes(resharded)
    num_chunks = {fqn: len(boxes) for fqn, boxes in _boxes(copy).items()}
    assert num_chunks["layers.0.attention.wq.weight"] == case.mesh.fsdp * case.mesh.tp  # it was cut, replicas once
