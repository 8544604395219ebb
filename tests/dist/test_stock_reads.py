"""Stock `dcp.load` on eight ranks reads hardly more than each rank holds, from what is cut for their mesh."""

import io
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from converters.families.args import DecoderArgs
from converters.families.qwen3 import Qwen3Args
from converters.families.registry import get_family
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo, write_model_info
from tests.dist.training import Layout
from tests.doors import convert, reshard
from trainer.build import build
from trainer.job.job import resolve_job
from trainer.optim.optimizer import build_optimizer, optimizer_state
from trainer.ranks.mesh import make_meshes

# Large tensors and few: torch looks around in each item's zip, 34 kB a time, which is nothing beside a real model's
ARGS = DecoderArgs(dim=256, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32, ffn_hidden=1024, vocab_size=16384)
EXPERTS = Qwen3Args(**asdict(ARGS), num_experts=8, experts_per_token=2, expert_hidden=512)
LAYOUTS = [
    (Layout("fsdp 8", 8), MeshShape(dp_shard=8)),
    (Layout("fsdp 4 tp 2", 8, {"tensor_parallel_degree": 2}), MeshShape(dp_shard=4, tp=2)),
    (
        Layout("fsdp 2 tp 2 pp 2", 8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
        MeshShape(dp_shard=2, tp=2, pp=2),
    ),
]
EXPERT_LAYOUT = Layout(
    "efsdp 2 ep 2 etp 2",
    8,
    {"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2},
)


class _Counted(io.FileIO):
    num_bytes = 0

    def readinto(self, buffer):
        num = super().readinto(buffer)
        _Counted.num_bytes += num
        return num


@contextmanager
def counted_stream(self, path, mode):
    """In place of FileSystem.create_stream: counts what is asked of the kernel, read-ahead of the buffer included."""
    assert mode == "rb"
    with io.BufferedReader(_Counted(str(path))) as stream:
        yield stream


def load(layout: Layout, folder: Path, with_optimizer: bool, family: str = "llama3") -> tuple[int, int, bool]:
    """Case: bytes that this rank holds and bytes that stock dcp.load read for them; whether all values are right."""
    config = layout.config(f"{family}/debug_gqa")
    job = resolve_job(config, layout.world_size, args=EXPERTS if family == "qwen3" else ARGS)
    model = build(job, make_meshes(job.dims, "cpu"), torch.device("cpu"))
    model.initialize(0)
    state = dict(model.state_dict())
    if with_optimizer:
        optimizer = build_optimizer(model.named_parameters(), config.optimizer)
        states = {k: v for k, v in optimizer_state(optimizer).items() if isinstance(v, torch.Tensor)}
        state |= {f"optimizer.{key}": value for key, value in states.items()}
    usual, FileSystem.create_stream = FileSystem.create_stream, counted_stream
    _Counted.num_bytes = 0
    try:
        dcp.load(state, checkpoint_id=str(folder))
    finally:
        FileSystem.create_stream = usual
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}
    right = all(bool((t == value_of(name)).all()) for name, t in local.items())
    return sum(t.nbytes for t in local.values()), _Counted.num_bytes, right


def value_of(name: str) -> float:
    """What fills a tensor: a number of its own."""
    return float(sum(name.encode()) % 251 + 1)


@pytest.fixture(scope="module")
def one_file(tmp_path_factory) -> Path:
    return save_as_one_rank(tmp_path_factory.mktemp("one") / "step-1", ModelInfo("llama3", ARGS))


def save_as_one_rank(folder: Path, info: ModelInfo) -> Path:
    """Weights and moments as one rank leaves them."""
    parameters = get_family(info.family).parameters(info.args)
    shapes = {p.fqn: p.shape for p in parameters if p.is_trained}
    state = {p.fqn: torch.full(p.shape, value_of(p.fqn)) for p in parameters}
    for fqn, shape in shapes.items():
        names = {f"optimizer.state.{fqn}.{kind}": shape for kind in ("exp_avg", "exp_avg_sq")}
        names[f"optimizer.state.{fqn}.step"] = ()
        state |= {name: torch.full(size, value_of(name)) for name, size in names.items()}
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    write_model_info(folder, info)
    return folder


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in LAYOUTS[:-1]), LAYOUTS[-1]],
    ids=[layout.name for layout, _ in LAYOUTS],
)
def test_ranks_read_what_they_hold(layout, mesh, one_file, pools, tmp_path):
    convert(one_file, tmp_path / "hf", to="hf")
    convert(tmp_path / "hf", tmp_path / "weights", to="dcp", options=OutputOptions(mesh=mesh))
    reshard(one_file, tmp_path / "all", mesh=mesh)
    for name, with_optimizer in (("weights", False), ("all", True)):
        for held, read, right in pools[8].run(load, layout, tmp_path / name, with_optimizer):
            assert right
            assert read <= 1.3 * held, f"{name}: {read:,} bytes read for {held:,}"


@pytest.mark.slow
def test_ranks_read_the_experts_that_they_hold(pools, tmp_path):
    whole = save_as_one_rank(tmp_path / "step-1", ModelInfo("qwen3", EXPERTS))
    reshard(whole, tmp_path / "all", mesh=MeshShape(dp_shard=4, tp=2, ep=2, etp=2))
    for held, read, right in pools[8].run(load, EXPERT_LAYOUT, tmp_path / "all", True, "qwen3"):
        assert right
        assert read <= 1.3 * held, f"{read:,} bytes read for {held:,}"


@pytest.mark.slow
def test_one_file_is_read_by_every_rank_whole(one_file, pools):
    """What the cut saves, and that the count counts."""
    layout, _ = LAYOUTS[0]
    for held, read, right in pools[8].run(load, layout, one_file, False):
        assert right and read > 6 * held
