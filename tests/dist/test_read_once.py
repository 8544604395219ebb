"""A resume reads hardly more than each rank holds, and a save reads back only what its own node has written."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from converters.common.errors import CheckpointError
from converters.engine.read import CatalogReader
from converters.families.args import DecoderArgs
from converters.model.model_info import ModelInfo
from converters.source.open import open_checkpoint
from converters.store.location import locate
from converters.verify import verify
from tests.dist.training import Layout
from trainer.build import build
from trainer.checkpoints import load as checkpoint_load
from trainer.checkpoints import write as checkpoint_write
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.run_state import Progress, RunState
from trainer.config.sections import Checkpoint
from trainer.job.job import resolve_job
from trainer.optim.lr_schedule import Curve, LRSchedule
from trainer.optim.optimizer import build_optimizer, optimizer_state
from trainer.ranks.mesh import local_part, make_meshes

# Large tensors and few: each item of a file has 2 kB around its values, and its reader looks at both ends of it
ARGS = DecoderArgs(dim=256, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32, ffn_hidden=1024, vocab_size=16384)
FSDP2 = Layout("fsdp 2", 2)
FSDP4 = Layout("fsdp 4", 4)
HSDP = Layout("hsdp", 4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2})
FSDP2_TP2 = Layout("fsdp 2 tp 2", 4, {"tensor_parallel_degree": 2})
PP2_TP2 = Layout("pp 2 tp 2", 4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2})


class Loader:
    def state_dict(self):
        return {"position": 7}

    def load_state_dict(self, state):
        assert state == {"position": 7}


def make_state(layout: Layout) -> RunState:
    config = layout.config("debug_gqa")
    job = resolve_job(config, layout.world_size, args=ARGS)
    model = build(job, make_meshes(job.dims, "cpu"), torch.device("cpu"))
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    return RunState(model, optimizer, LRSchedule(optimizer, Curve(1, 1, 1, "linear", 0.0)), Loader(), Progress())


def parts_of(state: RunState) -> dict[str, torch.Tensor]:
    tensors = {**state.model.state_dict(), **optimizer_state(state.optimizer)}
    return {name: local_part(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def sums_of(state: RunState) -> dict[str, str]:
    """A hash of this rank's part of each tensor."""
    return {name: hashlib.md5(part.numpy().tobytes()).hexdigest() for name, part in parts_of(state).items()}


def checkpoints_of(folder: Path) -> Checkpoints:
    group = dist.new_group(backend="gloo")
    return Checkpoints(locate(folder), Checkpoint(enable=True), ModelInfo("llama3", ARGS), group=group)


def save(layout: Layout, folder: Path) -> None:
    """Case: step 1 of a run whose every number is another."""
    state = make_state(layout)
    state.model.initialize(0)
    for name, part in parts_of(state).items():
        if name.startswith("state."):
            part.copy_(torch.arange(part.numel()).view(part.shape) + dist.get_rank())
    checkpoints_of(folder).save(1, state)


@dataclass(frozen=True)
class Resumed:
    held: int  # bytes of this rank's parts
    read: int  # bytes that the process has read meanwhile, as the kernel counts them
    sums: dict[str, str]
    error: str = ""
    is_changed: bool = False


def resume(layout: Layout, folder: Path, available: int = 1 << 40) -> Resumed:
    """Case: step 1 loaded; `available` bytes of host memory are there for copies."""
    state, checkpoints, usual = make_state(layout), checkpoints_of(folder), checkpoint_load.available_bytes
    state.model.initialize(1)
    before, error = sums_of(state), ""
    checkpoint_load.available_bytes = lambda: available
    num_read = read_by_process()
    try:
        checkpoints.resume(state)
    except CheckpointError as failure:
        error = failure.message
    finally:
        checkpoint_load.available_bytes = usual
    num_read, sums = read_by_process() - num_read, sums_of(state)
    return Resumed(sum(p.nbytes for p in parts_of(state).values()), num_read, sums, error, sums != before)


def read_by_process() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """The folder of a run in each layout, saved when first asked for."""
    made = {}

    def get(layout):
        if layout.name not in made:
            made[layout.name] = tmp_path_factory.mktemp("saved")
            pools[layout.world_size].run(save, layout, made[layout.name])
        return made[layout.name]

    return get


@pytest.mark.parametrize(
    ("saved_in", "layout"),
    [
        (FSDP2_TP2, FSDP2_TP2),
        (FSDP2, FSDP4),  # half of each item
        pytest.param(FSDP2, FSDP2, marks=pytest.mark.slow),
        pytest.param(FSDP4, FSDP2, marks=pytest.mark.slow),
        pytest.param(HSDP, HSDP, marks=pytest.mark.slow),
        pytest.param(PP2_TP2, PP2_TP2, marks=pytest.mark.slow),
        pytest.param(FSDP2_TP2, FSDP4, marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_a_resume_reads_what_the_rank_holds(pools, saved, saved_in, layout):
    ranks = pools[layout.world_size].run(resume, layout, saved(saved_in))
    twice = pools[layout.world_size].run(resume, layout, saved(saved_in), 0)
    for rank, other in zip(ranks, twice, strict=True):
        assert rank.error == other.error == "" and rank.sums == other.sums and rank.is_changed
        assert rank.read <= 1.05 * rank.held + (1 << 19), f"{rank.read:,} bytes read for {rank.held:,}"
    held = sum(rank.held for rank in ranks)
    assert sum(rank.read for rank in twice) > 1.45 * held  # so that the count counts; replicas are verified once


@pytest.mark.parametrize("layout", [FSDP2, pytest.param(FSDP2_TP2, marks=pytest.mark.slow)], ids=lambda one: one.name)
@pytest.mark.parametrize(
    "available", [pytest.param(1 << 40, id="one read"), pytest.param(0, id="two reads", marks=pytest.mark.slow)]
)
def test_a_flipped_bit_is_found_before_any_rank_changes_a_weight(pools, saved, tmp_path, layout, available):
    """In values, in what is around them, and in files that no rank but one reads."""
    step = saved(FSDP2) / "step-1"
    size = (step / "__1_0.distcp").stat().st_size
    catalog = open_checkpoint(step)
    (start, length) = next(c.item for c in catalog.tensors["layers.1.attention.wo.weight"].chunks if "1_0" in c.file)
    places = [("__1_0.distcp", at) for at in (40, start + length // 2, size - 5)]
    places += [("__0_1.distcp", 700), (".metadata", 900)]
    (tmp_path / "step-1").mkdir()
    for path in step.iterdir():
        if path.is_file():
            (tmp_path / "step-1" / path.name).write_bytes(path.read_bytes())
    for name, at in places:
        with (tmp_path / "step-1" / name).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 16]))
        for rank in pools[layout.world_size].run(resume, layout, tmp_path, available):
            assert f"{name}: its bytes have changed (CRC32)" in rank.error and not rank.is_changed, (name, at)
        with (tmp_path / "step-1" / name).open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    assert all(not rank.error for rank in pools[layout.world_size].run(resume, layout, tmp_path, available))


def save_on_nodes(layout: Layout, folder: Path, nodes: list[str]) -> dict[str, int]:
    """Case: a save by ranks on these nodes; the bytes that this rank reads back, by file."""
    usual, read, num_read = checkpoint_write.socket.gethostname, CatalogReader.read, Counter()
    checkpoint_write.socket.gethostname = lambda: nodes[dist.get_rank()]

    def counted(reader, fqn, box):
        reader.on_read = lambda file, start, view: num_read.update({file: len(view)})
        return read(reader, fqn, box)

    CatalogReader.read = counted
    try:
        save(layout, folder)
    finally:
        checkpoint_write.socket.gethostname, CatalogReader.read = usual, read
    return dict(num_read)


@pytest.mark.parametrize("nodes", ["aabb", pytest.param("abab", marks=pytest.mark.slow)])
def test_a_save_reads_back_what_its_own_node_has_written(pools, tmp_path, nodes):
    """The rows of wo, w2 and their moments, which two ranks hold half of each; each rank of a node reads its share."""
    read = pools[4].run(save_on_nodes, FSDP2_TP2, tmp_path, list(nodes))
    split = 3 * 4 * 2 * (256 * 256 + 256 * 1024)  # bytes of wo and w2 in both layers, and two moments of each
    assert sum(sum(files.values()) for files in read) == split
    assert max(sum(files.values()) for files in read) < 0.4 * split
    if nodes == "aabb":
        own = [{"__0_0.distcp", "__1_0.distcp"}, {"__2_0.distcp", "__3_0.distcp"}]
        assert [set(files) <= own[rank // 2] for rank, files in enumerate(read)] == [True] * 4
    report = verify(tmp_path / "step-1")
    assert report.ok, report
    ranks = pools[2].run(resume, FSDP2, tmp_path)
    assert all(rank.error == "" for rank in ranks)
