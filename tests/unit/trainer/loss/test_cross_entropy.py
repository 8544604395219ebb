"""The summed loss, whole and on vocabulary shards, against torch's cross-entropy."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.data.batch import IGNORED
from trainer.loss.cross_entropy import cross_entropy_sum, sharded_cross_entropy_sum


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (30 * torch.randn(2, 9, 50, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(50, (2, 9), generator=generator)
    targets[0, 3:7] = IGNORED
    return logits, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_loss_and_gradient_are_those_of_torch(group, sharded, dtype):
    logits, targets = sample(dtype)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = sharded_cross_entropy_sum(logits, targets, group=group) if sharded else cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (0.5 * loss).backward()
    (0.5 * expected).backward()
    assert logits.grad.dtype == dtype
    assert torch.allclose(logits.grad.double(), exact.grad, atol=1e-6 if dtype == torch.float32 else 4e-3)
    assert (logits.grad[0, 3:7] == 0).all()


@pytest.mark.parametrize("sharded", [False, True])
def test_nothing_to_learn_is_a_loss_of_zero(group, sharded):
    logits, targets = sample(torch.float32)
    targets[:] = IGNORED
    loss = sharded_cross_entropy_sum(logits, targets, group=group) if sharded else cross_entropy_sum(logits, targets)
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()
