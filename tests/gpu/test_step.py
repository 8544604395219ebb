"""A training step on a GPU: how often the host waits, steps that are not finite, one rank without FSDP."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.dist.training import Layout
from trainer.build import build
from trainer.data.batch import TokenBatch
from trainer.job.job import resolve_job
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import make_meshes
from trainer.step import TrainStep
from trainer.train_model import TrainModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = {"mixed_precision_param": "bfloat16", "local_batch_size": 2}
FSDP = {"fsdp_reshard_after_forward": "always"}
OP = {"mode": "selective", "selective_ac_option": "op"}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """This process alone, with NCCL."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def make_run(
    parallelism: dict, sections: dict, flavor: str = "debug_gqa"
) -> tuple[TrainModel, torch.optim.Optimizer, TrainStep]:
    """One rank in mixed precision, with initial weights."""
    config = Layout("", 1, parallelism, BF16, sections).config(flavor)
    job = resolve_job(config, 1)
    meshes = make_meshes(job.dims, "cuda")
    model = build(job, meshes, torch.device("cuda", 0))
    model.initialize(0)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    return model, optimizer, TrainStep(model, meshes, max_norm=1.0, local_batch_size=2)


@pytest.mark.parametrize(
    ("parallelism", "sections", "flavor"),
    [
        ({}, {}, "debug_gqa"),
        (FSDP, {}, "debug_gqa"),
        ({}, {"activation_checkpoint": OP}, "debug_gqa"),
        ({}, {"compile": {"enable": True}}, "debug_gqa"),
        ({}, {"optimizer": {"state_dtype": "bfloat16"}}, "debug_gqa"),
        (FSDP, {"activation_checkpoint": OP}, "qwen3/debug_moe_mixed"),
        ({}, {"compile": {"enable": True}}, "qwen3/debug_moe_mixed"),
    ],
    ids=["one rank", "fsdp", "op", "compiled", "bf16 moments", "experts", "experts, compiled"],
)
def test_the_host_waits_once_and_after_the_update_was_launched(group, parallelism, sections, flavor):
    _, optimizer, step = make_run(parallelism, sections, flavor)
    tokens = torch.randint(2048, (4, 64))  # two batches, in memory that is not pinned
    waits: list[bool] = []
    is_updated = False
    own = torch.cuda.Event.synchronize

    def synchronize(event):
        waits.append(is_updated)
        own(event)

    def after_update(*_):
        nonlocal is_updated
        is_updated = True

    optimizer.register_step_post_hook(after_update)
    for _ in range(3):  # compiles, captures, settles
        step.run(TokenBatch(tokens, tokens), optimizer)
        optimizer.zero_grad()
    torch.cuda.synchronize()
    is_updated = False
    torch.cuda.set_sync_debug_mode("error")  # raises at any operation that makes the host wait
    try:
        with patch.object(torch.cuda.Event, "synchronize", synchronize):
            result = step.run(TokenBatch(tokens, tokens), optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == [True]
    assert result.is_finite and result.num_units == tokens.numel()


def test_a_step_that_is_not_finite_leaves_weights_and_moments(group):
    model, optimizer, step = make_run({}, {})
    tokens = torch.randint(2048, (2, 64))
    assert step.run(TokenBatch(tokens, tokens), optimizer).is_finite

    def held():
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*model.named_parameters().values(), *states)]

    optimizer.zero_grad()
    before = held()
    norm = model.parts[0].norm
    hook = norm.register_forward_hook(lambda module, args, output: output * float("inf"))
    assert not step.run(TokenBatch(tokens, tokens), optimizer).is_finite
    hook.remove()
    assert all(map(torch.equal, held(), before))
    optimizer.zero_grad()
    assert step.run(TokenBatch(tokens, tokens), optimizer).is_finite
    assert not any(map(torch.equal, held(), before))


@pytest.mark.parametrize(
    "sections",
    [
        {"activation_checkpoint": {"mode": "none"}},
        {"activation_checkpoint": {"mode": "full"}},
        {"activation_checkpoint": OP, "compile": {"enable": True}},
    ],
    ids=["eager", "full", "op, compiled"],
)
def test_one_rank_without_fsdp_has_its_numbers(group, sections):
    found = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for parallelism in ({}, FSDP):
            model, optimizer, step = make_run(parallelism, sections)
            is_sharded = any(isinstance(p, DTensor) for p in model.named_parameters().values())
            assert is_sharded == (parallelism == FSDP)
            for number in range(5):
                tokens = torch.randint(2048, (4, 64), generator=torch.Generator().manual_seed(number))  # two batches
                found.append(step.run(TokenBatch(tokens, tokens), optimizer))
                optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[:5] == found[5:]
