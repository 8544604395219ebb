"""converters/reshard.py: stock dcp.load finds every tensor and value again, cut as the new mesh holds them."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from converters.common.errors import CheckpointError, ConfigError
from converters.containers.dcp_names import SMALL_TENSOR_FILE
from converters.engine.read import CatalogReader
from converters.families.args import DecoderArgs
from converters.families.llama3 import LLAMA3
from converters.layout.layout import local_box
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, write_model_info
from converters.source.open import open_checkpoint
from converters.verify import verify
from tests.doors import convert, reshard
from tests.models.llama import write as write_llama
from tests.uploaded import STORES, in_store


@pytest.fixture(autouse=True, params=STORES)
def store(request, monkeypatch):
    in_store(request, monkeypatch, writes=["reshard"])


ARGS = DecoderArgs(dim=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, ffn_hidden=20, vocab_size=30)
SHAPES = {p.fqn: p.shape for p in LLAMA3.parameters(ARGS)}
MOMENTS = ("exp_avg", "exp_avg_sq")

TOKENIZER = (
    '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
)


def training_state():
    """A state dict as the trainer saves it: bf16 weights, fp32 moments, counters, plain values, RNG."""
    generator = torch.Generator().manual_seed(0)
    state = {fqn: torch.randn(shape, generator=generator).bfloat16() for fqn, shape in SHAPES.items()}
    optimizer = {}
    for fqn, shape in SHAPES.items():
        optimizer |= {f"state.{fqn}.{moment}": torch.randn(shape, generator=generator) for moment in MOMENTS}
        optimizer[f"state.{fqn}.step"] = torch.tensor(12.0)
        optimizer |= {f"param_groups.{fqn}.lr": 3e-4, f"param_groups.{fqn}.betas": (0.9, 0.95)}
    return state | {
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": 12},
        "dataloader": {"version": 1, "fingerprint": "abc", "seed": 0, "consumed_samples": 96},
        "train_state": {"step": 12, "ntokens_seen": torch.tensor(4096)},
        "rng": {"cpu.0": torch.get_rng_state(), "cpu.1": torch.get_rng_state()},
    }


def save(folder, state):
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    write_model_info(folder, ModelInfo("llama3", ARGS))
    (folder / "assets").mkdir()
    (folder / "assets" / "tokenizer.json").write_text(TOKENIZER)
    return folder


@pytest.fixture
def step(tmp_path):
    return save(tmp_path / "step-12", training_state())


def blanked(value):
    """The same nesting with other values in it."""
    if isinstance(value, dict):
        return {key: blanked(item) for key, item in value.items()}
    return torch.full_like(value, 7) if isinstance(value, torch.Tensor) else None


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("mesh", [None, MeshShape(dp_shard=8), MeshShape(pp=2, dp_shard=2, cp=2, tp=2)], ids=str)
def test_stock_torch_loads_everything_again(step, mesh, tmp_path):
    report = reshard(step, tmp_path / "out", mesh=mesh)
    loaded = blanked(training_state())
    dcp.load(loaded, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert_equal(loaded, training_state())
    assert report.sections["optimizer"] == 5 * len(SHAPES)
    assert (tmp_path / "out" / "assets" / "tokenizer.json").read_text() == TOKENIZER
    assert verify(tmp_path / "out").ok


def test_moments_take_their_parameter_s_boxes(step, tmp_path):
    mesh = MeshShape(dp_shard=3, tp=2)
    reshard(step, tmp_path / "out", mesh=mesh)
    listed = FileSystemReader(str(tmp_path / "out")).read_metadata()
    for parameter in LLAMA3.parameters(ARGS):
        wanted = {(b.offsets, b.sizes) for r in range(6) if (b := local_box(parameter, mesh, r))}
        for name in (parameter.fqn, *(f"optimizer.state.{parameter.fqn}.{moment}" for moment in MOMENTS)):
            found = {(tuple(c.offsets), tuple(c.sizes)) for c in listed.state_dict_metadata[name].chunks}
            assert found == wanted
    files = {i.fqn: s.relative_path for i, s in listed.storage_data.items()}
    assert files["optimizer.state.norm.weight.step"] == files["rng.cpu.0"] == SMALL_TENSOR_FILE


def test_nested_paths_survive(step, tmp_path):
    reshard(step, tmp_path / "out", mesh=MeshShape(dp_shard=2))
    before = FileSystemReader(str(step)).read_metadata().planner_data
    assert FileSystemReader(str(tmp_path / "out")).read_metadata().planner_data == before


def test_values_are_copied_as_bytes(step, tmp_path):
    """Even what only torch could decode: nothing is unpickled on the way."""
    state = training_state()
    state["dataloader"] = {"dp_rank_0": torch.nn.Linear(1, 1), "world_size": 1}
    save(tmp_path / "odd", state)
    report = reshard(tmp_path / "odd", tmp_path / "out", mesh=MeshShape(tp=2))
    catalogs = [open_checkpoint(tmp_path / name) for name in ("odd", "out")]
    with CatalogReader(catalogs[0]) as a, CatalogReader(catalogs[1]) as b:
        assert catalogs[0].values.keys() == catalogs[1].values.keys()
        assert all(a.read_blob(name) == b.read_blob(name) for name in catalogs[0].values)
    assert any("same dp degree" in remark for remark in report.remarks)


def test_sections_are_dropped_on_request(step, tmp_path):
    report = reshard(step, tmp_path / "out", mesh=MeshShape(tp=2), drop=["optimizer", "rng"])
    catalog = open_checkpoint(tmp_path / "out")
    assert report.dropped_sections == {"optimizer": 5 * len(SHAPES), "rng": 2}
    assert set(report.sections) == {"model", "lr_scheduler", "dataloader", "train_state"}
    assert not any(n.startswith(("optimizer", "rng")) for n in (*catalog.names, *catalog.planner_data))


def test_cast_leaves_the_optimizer(step, tmp_path):
    reshard(step, tmp_path / "out", dtype="float32")
    dtypes = {name: entry.dtype for name, entry in open_checkpoint(tmp_path / "out").tensors.items()}
    assert dtypes["norm.weight"] == dtypes["optimizer.state.norm.weight.exp_avg"] == "float32"
    reshard(step, tmp_path / "out2", dtype="float16")
    dtypes = {name: entry.dtype for name, entry in open_checkpoint(tmp_path / "out2").tensors.items()}
    assert (dtypes["norm.weight"], dtypes["optimizer.state.norm.weight.exp_avg"]) == ("float16", "float32")


def test_what_casts_did_is_reported(step, tmp_path):
    report = reshard(step, tmp_path / "out", optimizer_dtype="bfloat16")
    moved = report.relative_error["optimizer.state.norm.weight.exp_avg"]
    assert 0 < moved <= 2**-8 and not report.relative_error.keys() & SHAPES.keys()


def test_optimizer_that_does_not_fit_the_model(tmp_path):
    state = training_state()
    optimizer = state["optimizer"]
    del optimizer["state.norm.weight.exp_avg_sq"]
    optimizer["state.layers.9.ffn_norm.weight.exp_avg"] = torch.zeros(16)
    optimizer["state.output.weight.exp_avg"] = torch.zeros(16, 30)
    save(tmp_path / "bad", state)
    with pytest.raises(CheckpointError) as error:
        reshard(tmp_path / "bad", tmp_path / "out", mesh=MeshShape(dp_shard=2))
    for part in (
        "3 problems",
        "missing     optimizer.state.norm.weight.exp_avg_sq",
        "unexpected  optimizer.state.layers.9.ffn_norm.weight.exp_avg",
        "shape       optimizer.state.output.weight.exp_avg  is [16, 30], its parameter [30, 16]",
    ):
        assert part in error.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]
    assert "--drop optimizer" in error.value.tries[0] and "--allow-missing" in error.value.tries[1]
    reshard(tmp_path / "bad", tmp_path / "out", drop=["optimizer"])


def test_weights_that_do_not_fit_the_model(tmp_path):
    state = training_state()
    state["layers.0.attention.wq.weight"] = torch.zeros(3, 3)
    state["surprise"] = torch.zeros(1)
    save(tmp_path / "bad", state)
    with pytest.raises(CheckpointError, match="2 problems"):
        reshard(tmp_path / "bad", tmp_path / "out")


def test_what_is_refused(step, tmp_path):
    with pytest.raises(ConfigError, match="optimzer"):
        reshard(step, tmp_path / "out", drop=["optimzer"])
    with pytest.raises(ConfigError, match="pipeline stages"):
        reshard(step, tmp_path / "out", mesh=MeshShape(pp=9))
    with pytest.raises(ConfigError, match="tp=3 does not divide 4 attention heads, 2 key/value heads, 20 feed"):
        reshard(step, tmp_path / "out", mesh=MeshShape(tp=3))
    with pytest.raises(ConfigError, match="--optimizer-dtype bfloat16: the checkpoint has no moments to cast"):
        reshard(step, tmp_path / "out", drop=["optimizer"], optimizer_dtype="bfloat16")
    with pytest.raises(CheckpointError, match="is the source itself"):
        reshard(step, step)
    write_llama(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is a Hugging Face checkpoint .*, which has no layout"):
        reshard(tmp_path / "hf", tmp_path / "out")
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    (tmp_path / "dcp" / "titan_manifest.json").unlink()
    (tmp_path / "dcp" / "titan_model.json").unlink()
    with pytest.raises(CheckpointError, match="describes the model"):
        reshard(tmp_path / "dcp", tmp_path / "out")
    reshard(tmp_path / "dcp", tmp_path / "out", model_from=tmp_path / "hf")
    assert verify(tmp_path / "out").ok and (tmp_path / "out" / "titan_model.json").is_file()


def test_another_number_of_files(step, tmp_path):
    report = reshard(step, tmp_path / "out", num_files=3)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.distcp"))
    assert files == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__blobs_0.distcp", SMALL_TENSOR_FILE]
    assert report.cut == "3 files"
    loaded = blanked(training_state())
    dcp.load(loaded, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert_equal(loaded, training_state())
    with pytest.raises(ConfigError, match="--num-files and --shard-size cannot be combined"):
        reshard(step, tmp_path / "more", num_files=3, shard_bytes=1000)
    many = reshard(step, tmp_path / "many", shard_bytes=10_000)
    assert many.num_files > 5


def test_an_interrupted_reshard_resumes_to_the_same_bytes(step, tmp_path):
    whole, parted, units = tmp_path / "whole", tmp_path / "parted", iter(range(40))
    reshard(step, whole, mesh=MeshShape(dp_shard=2))

    def advance(num_bytes):
        if next(units, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard(
            step, parted, mesh=MeshShape(dp_shard=2), resume=True, progress=lambda total, what: nullcontext(advance)
        )
    assert not parted.exists()
    report = reshard(step, parted, mesh=MeshShape(dp_shard=2), resume=True)
    assert report.resumed_bytes > 0
    assert sorted(p.name for p in parted.iterdir()) == sorted(p.name for p in whole.iterdir())
    for path in whole.glob("*.distcp"):
        assert (parted / path.name).read_bytes() == path.read_bytes()


def test_dry_run(step, tmp_path):
    report = reshard(step, tmp_path / "out", mesh=MeshShape(dp_shard=2), dry_run=True)
    assert report.num_files == 5 and report.num_bytes > 0  # two ranks, small tensors, values, .metadata
    assert not (tmp_path / "out").exists()
