"""What a rank holds for good, against the model that titan really builds on a fake process group."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_tools.memory.formula.rank import groups_of_stage
from titan_tools.memory.formula.run_shape import run_shape
from trainer.build import build
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import make_meshes

LAYOUTS = {
    "one rank": {},
    "FSDP 2": {"data_parallel_shard_degree": 2},
    "FSDP 3, uneven": {"data_parallel_shard_degree": 3},
    "HSDP 2 x 2": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    "TP 4": {"tensor_parallel_degree": 4},
    "FSDP 4 x TP 2": {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2},
    "FSDP 2 x CP 2": {"data_parallel_shard_degree": 2, "context_parallel_degree": 2},
    "PP 2": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "FSDP 2 x TP 2 x PP 2": {
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "GPipe",
    },
    "PP 2, two stages each": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
}


def make_config(flavor: str, **parallelism):
    parallelism = {
        "data_parallel_shard_degree": 1,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        **parallelism,
    }
    words = [f"--parallelism.{key}={value}" for key, value in parallelism.items()]
    fixed = ["--validation.no_enable", "--training.seq_len=48", "--parallelism.pipeline_parallel_microbatch_size=1"]
    fixed.append("--training.global_batch_size=-1")
    return load_config("debug", [f"--model.flavor={flavor}", *fixed, *words])


def held_bytes(config, world_size: int, rank: int, args=None) -> dict[str, int]:
    """Bytes of parameters, gradients and moments that a rank of the real, sharded model holds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        job = resolve_job(config, world_size, args=args)
        model = build(job, make_meshes(job.dims, "cpu"), torch.device("cpu"))
        named = model.named_parameters()
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        states = build_optimizer(named, config.optimizer).state.values()
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        return {
            "parameters": sum(map(local_bytes, named.values())),
            "gradients": sum(local_bytes(p.grad) for p in named.values()),
            "optimizer": sum(map(local_bytes, moments)),
        }
    finally:
        dist.destroy_process_group()


def local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


@pytest.mark.parametrize("flavor", ["debug_gqa", "debug_tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_held_are_those_of_the_real_model(layout, flavor):
    config = make_config(flavor, **LAYOUTS[layout])
    run = run_shape(resolve_job(config))
    world_size, pp = run.mesh.world_size, run.mesh.pp
    for pp_rank in range(pp):
        held = held_bytes(config, world_size, rank=pp_rank * (world_size // pp))
        stages = range(pp_rank, len(run.stages), pp)
        shards = sum(g.local_elements for stage in stages for g in groups_of_stage(run, stage)) * run.param_bytes
        assert held == {"parameters": shards, "gradients": shards, "optimizer": 2 * shards}, pp_rank


@pytest.mark.parametrize("flavor", ["debug_gqa", "debug_tied"])
def test_groups_of_a_whole_model_are_fsdps(flavor):
    config = make_config(flavor, data_parallel_shard_degree=2)
    run = run_shape(resolve_job(config))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        job = resolve_job(config, 2)
        model = build(job, make_meshes(job.dims, "cpu"), torch.device("cpu"))
        real = fsdp_groups(model.parts[0])
    finally:
        dist.destroy_process_group()
    assert sorted(real) == sorted(group.full_elements for group in groups_of_stage(run, 0))


def fsdp_groups(part: torch.nn.Module) -> list[int]:
    """Elements of each parameter group that FSDP2 made, each once."""
    groups = {}
    for module in part.modules():
        if isinstance(module, FSDPModule) and (group := fully_shard.state(module)._fsdp_param_group):
            groups[id(group)] = sum(p._orig_size.numel() for p in group.fsdp_params)
    return list(groups.values())
