"""The compiled loss: only where compile.components says so, by the backend it names, with the eager one's numbers."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.registry import register_backend

from trainer.config.sections import ActivationCheckpoint, Compile
from trainer.data.batch import IGNORED
from trainer.loss.chunked import ChunkedOutput
from trainer.loss.cross_entropy import cross_entropy_sum, sharded_cross_entropy_sum
from trainer.loss.install import maybe_compile_loss
from trainer.parallel.compile import compile_machine_problems

CPU = torch.device("cpu")
INDUCTOR_HERE = not compile_machine_problems(Compile(enable=True), ActivationCheckpoint(), CPU, tp=1)
BACKENDS = ["aot_eager", *([pytest.param("inductor", marks=pytest.mark.slow)] if INDUCTOR_HERE else [])]
graphs: list[torch.fx.GraphModule] = []


@register_backend(name="counted_for_the_loss")
def counted(graph, inputs):
    graphs.append(graph)
    return graph.forward


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/file", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    graphs.clear()


def sample(length: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    logits_BLV = (10 * torch.randn(2, length, 50)).bfloat16().requires_grad_()
    targets_BL = torch.randint(50, (2, length))
    targets_BL[0, :3] = IGNORED
    return logits_BLV, targets_BL


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_compiled_loss_is_the_loss(group, is_sharded, backend):
    def sharded(logits_BLV, targets_BL):
        return sharded_cross_entropy_sum(logits_BLV, targets_BL, group=group)

    loss_sum = sharded if is_sharded else cross_entropy_sum
    compiled = maybe_compile_loss(loss_sum, Compile(enable=True, backend=backend))
    logits_BLV, targets_BL = sample()
    expected, found = loss_sum(logits_BLV, targets_BL), compiled(logits_BLV, targets_BL)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted, ours = (torch.autograd.grad(loss, logits_BLV)[0] for loss in (expected, found))
    torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [Compile(), Compile(enable=True, components=("model",)), Compile(enable=True, components=())],
)
def test_a_loss_that_is_not_named_is_not_compiled(settings):
    assert maybe_compile_loss(cross_entropy_sum, settings) is cross_entropy_sum


def test_the_loss_of_a_piece_is_what_is_compiled_once_for_all_pieces():
    output = torch.nn.Linear(16, 50)
    compiled = maybe_compile_loss(cross_entropy_sum, Compile(enable=True, backend="counted_for_the_loss"))
    chunked = ChunkedOutput(output, compiled, chunk_tokens=5, in_backward=False)
    h_BLD, (_, targets_BL) = torch.randn(2, 10, 16, requires_grad=True), sample()
    with chunked.given(targets_BL):
        chunked(h_BLD).backward()
    assert len(graphs) == 1
    made = [node.meta["example_value"] for node in graphs[0].graph.nodes if "example_value" in node.meta]
    assert max(tensor.numel() for tensor in made) == 5 * 50
