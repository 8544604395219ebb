"""Seed checkpoints: stock DCP reads them, values depend on the seed alone, files are those of the mesh; torch-free."""

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from converters.common.box import Box
from converters.common.errors import CheckpointError, ConfigError
from converters.diff import diff
from converters.families.llama3 import FLAVORS, LLAMA3
from converters.layout.layout import local_box
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, read_model_info
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.store.manifest import check_files, read_manifest
from converters.verify import verify
from tests.uploaded import STORES, in_store
from trainer.config.load import load_config
from trainer.config.sections import Config, Debug, Model, Parallelism, Training
from trainer.job.job import resolve_job
from trainer.models.initial_weights import InitialWeights
from trainer.seed import job_of_seed, seed

ROOT = Path(__file__).resolve().parents[3]
CONFIG = Config(model=Model(flavor="debug_gqa"), training=Training(seq_len=64), debug=Debug(seed=3))


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, reads=["diff", "open_checkpoint", "open_native", "verify"], writes=["seed"])


def _cut(**degrees):
    return replace(CONFIG, parallelism=Parallelism(**degrees))


def test_stock_dcp_reads_the_first_weights(tmp_path):
    report = seed(resolve_job(_cut(data_parallel_shard_degree=2, tensor_parallel_degree=2)), tmp_path / "seed")
    weights = InitialWeights(ModelInfo("llama3", FLAVORS["debug_gqa"]), seed=3)
    loaded = {fqn: torch.zeros(info.shape) for fqn, info in weights.tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=str(tmp_path / "seed"))
    for fqn, tensor in loaded.items():
        expected = torch.from_numpy(weights.read(fqn, Box.whole(tuple(tensor.shape))))
        assert torch.equal(tensor, expected), fqn
    assert report.num_parameters == LLAMA3.num_parameters(FLAVORS["debug_gqa"])
    assert read_model_info(tmp_path / "seed").args == FLAVORS["debug_gqa"]
    assert check_files(tmp_path / "seed") == []


def test_each_rank_of_the_mesh_finds_its_boxes_as_whole_chunks(tmp_path):
    seed(
        resolve_job(_cut(data_parallel_shard_degree=2, tensor_parallel_degree=2, pipeline_parallel_degree=2)),
        tmp_path / "seed",
    )
    catalog, mesh = open_checkpoint(tmp_path / "seed"), MeshShape(pp=2, dp_shard=2, tp=2)
    assert verify(tmp_path / "seed").ok
    assert sorted({c.file for t in catalog.tensors.values() for c in t.chunks}) == [f"__{r}_0.distcp" for r in range(8)]
    for parameter in LLAMA3.parameters(FLAVORS["debug_gqa"]):
        boxes = {chunk.box for chunk in catalog.tensors[parameter.fqn].chunks}
        assert boxes == {local_box(parameter, mesh, rank) for rank in range(8)}


def test_values_depend_on_the_seed_and_not_on_the_mesh(tmp_path):
    for name, config in (
        ("one", CONFIG),
        ("cut", _cut(tensor_parallel_degree=4, pipeline_parallel_degree=2)),
        ("other", replace(CONFIG, debug=Debug(seed=4))),
        ("half", replace(CONFIG, training=Training(seq_len=64, dtype="bfloat16"))),
    ):
        seed(resolve_job(config), tmp_path / name)
    sums = {name: read_manifest(tmp_path / name).tensors for name in ("one", "cut", "other", "half")}
    assert sums["one"] == sums["cut"]
    assert sums["one"]["output.weight"] != sums["other"]["output.weight"]
    assert {t.dtype for t in sums["half"].values()} == {"bfloat16"}


def test_experts_are_drawn_one_by_one_and_balanced_by_zeros(tmp_path):
    """In bfloat16 but for the balancing bias; the same on a mesh that shards 12 experts unevenly."""
    config = replace(
        CONFIG, model=Model(name="qwen3", flavor="debug_moe"), training=Training(seq_len=64, dtype="bfloat16")
    )
    seed(resolve_job(config), tmp_path / "one")
    uneven = replace(config, parallelism=Parallelism(data_parallel_shard_degree=5))
    seed(resolve_job(uneven, 5), tmp_path / "five")
    assert diff(tmp_path / "one", tmp_path / "five").equal
    with open_native(tmp_path / "one") as weights:
        for layer in (0, 3):
            moe, depth = f"layers.{layer}.moe.", 0.02 / (2 * (layer + 1)) ** 0.5
            assert weights.tensors[f"{moe}expert_bias"].dtype == "float32"
            assert not weights.read(f"{moe}expert_bias").any()
            for name, std in (("w1", 0.02), ("w2", depth), ("w3", depth)):  # torchtitan's moe.py, init_weights
                values = weights.read(f"{moe}experts.{name}")
                assert values.dtype == "bfloat16"
                assert [abs(float(one.astype("float32").std()) / std - 1) < 0.05 for one in values] == [True] * 12
                assert len({one.tobytes() for one in values}) == 12
            gate = weights.read(f"{moe}router.gate.weight").astype("float32")
            assert abs(float(gate.std()) / depth - 1) < 0.1


def test_a_layout_that_cannot_be_and_a_folder_that_is_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="tensor_parallel_degree = 3"):
        seed(resolve_job(_cut(tensor_parallel_degree=3)), tmp_path / "seed")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / ".metadata").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        seed(resolve_job(CONFIG), tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    seed(resolve_job(CONFIG), tmp_path / "taken", overwrite=True)
    assert check_files(tmp_path / "taken") == []


def test_presets_can_be_seeded_without_torch(tmp_path):
    assert load_config("debug").parallelism.pipeline_parallel_degree == 2
    code = f"""
import sys
from titan_tools.cli import run
sys.argv = ["titan", "seed", "debug", {str(tmp_path / "seed")!r}, "--json"]
assert run() == 0 and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 0 and len(list((tmp_path / "seed").glob("*.distcp"))) == 8


def test_a_machine_without_memory_for_the_values_drawn_at_a_time_is_refused(tmp_path, monkeypatch):
    job, rows = resolve_job(CONFIG), 2048  # of the embedding, whose blocks are of 8,192
    needed = rows * FLAVORS["debug_gqa"].dim * 4
    monkeypatch.setattr("trainer.seed.available_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match="seed needs at least 1.0 MiB of memory on this machine"):
        seed(job, tmp_path / "seed")
    assert not (tmp_path / "seed").exists()
    assert seed(job, tmp_path / "seed", ignore_memory=True).num_files == 1
    monkeypatch.setattr("trainer.seed.available_bytes", lambda: needed)
    assert seed(job, tmp_path / "again").num_files == 1


def test_ranks_of_a_seed_need_not_divide_the_global_batch():
    config = load_config("debug", ["--parallelism.data_parallel_shard_degree=16"])
    with pytest.raises(ConfigError, match="global_batch_size"):
        resolve_job(config)
    assert job_of_seed(config).dims.dp_shard == 16
