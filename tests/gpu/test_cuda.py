"""What runs on a GPU gives what the CPU gives. One device is enough; skipped where there is none."""

import copy
import json

import pytest
import torch

from converters.families.llama3 import FLAVORS
from tests.gpu.running import read_losses, titan, write_job
from tests.models.llama import write as write_llama
from trainer.models.decoder import Transformer
from trainer.optim.clip import square_sums_on_cpu, square_sums_on_gpu
from trainer.parallel.context import attend_to_prefix

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_logits_and_gradients_are_those_of_the_cpu():
    torch.manual_seed(0)
    on_cpu = Transformer(FLAVORS["debug_gqa"])
    on_gpu = copy.deepcopy(on_cpu).cuda()
    tokens = torch.randint(FLAVORS["debug_gqa"].vocab_size, (2, 128))
    expected, found = on_cpu(tokens), on_gpu(tokens.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    expected.logsumexp(-1).mean().backward()
    found.logsumexp(-1).mean().backward()
    ours = dict(on_gpu.named_parameters())
    for fqn, parameter in on_cpu.named_parameters():
        difference = (ours[fqn].grad.cpu() - parameter.grad).norm()
        assert difference <= 1e-4 * parameter.grad.norm(), fqn


def _attend_by_hand(q_BCNH, k_BEKH, v_BEKH):
    """Every query sees the keys up to its own place, the last query being the last key's: softmax written out."""
    num_groups = q_BCNH.shape[2] // k_BEKH.shape[2]
    k_BENH, v_BENH = (x.repeat_interleave(num_groups, dim=2) for x in (k_BEKH, v_BEKH))
    num_queries, num_keys = q_BCNH.shape[1], k_BEKH.shape[1]
    scores_BNCE = torch.einsum("bcnh,benh->bnce", q_BCNH, k_BENH) / q_BCNH.shape[-1] ** 0.5
    places_C = torch.arange(num_queries) + num_keys - num_queries
    hidden_CE = torch.arange(num_keys) > places_C[:, None]
    return torch.einsum("bnce,benh->bcnh", scores_BNCE.masked_fill(hidden_CE, -torch.inf).softmax(-1), v_BENH)


@pytest.mark.parametrize("num_keys", [32, 96], ids=["as many keys", "more keys"])
@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "tolerance"),
    [(torch.bfloat16, 2, 3e-2), (torch.float32, 2, 2e-3), (torch.float32, 8, 2e-3)],
    ids=["bf16, grouped", "fp32, grouped", "fp32"],
)
def test_attention_to_a_prefix_is_masked_attention(dtype, num_kv_heads, tolerance, num_keys):
    """bf16 goes to flash attention, fp32 to the memory-efficient kernel, grouped fp32 to a mask."""
    torch.manual_seed(0)
    shapes = [(2, 32, 8, 64), (2, 128, num_kv_heads, 64), (2, 128, num_kv_heads, 64)]
    on_gpu = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    by_hand = [x.detach().cpu().double().requires_grad_() for x in on_gpu]
    q, k, v = on_gpu
    found = attend_to_prefix(q, k[:, :num_keys], v[:, :num_keys])  # views, as context parallelism takes them
    q, k, v = by_hand
    expected = _attend_by_hand(q, k[:, :num_keys], v[:, :num_keys])
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weights).sum().backward()
    (found * weights.to("cuda", dtype)).sum().backward()
    assert (found.cpu().double() - expected).norm() <= tolerance * expected.norm()
    for ours, exact in zip(on_gpu, by_hand, strict=True):
        assert (ours.grad.cpu().double() - exact.grad).norm() <= tolerance * exact.grad.norm()


def test_square_sums_are_those_of_the_cpu():
    torch.manual_seed(0)
    shapes = [(300, 70), (64,), (4096, 1024), (0, 8), (1, 1)]  # empty, too: a shard may be
    tensors = [torch.randn(shape) for shape in shapes]
    found = square_sums_on_gpu([tensor.cuda() for tensor in tensors])
    assert found.is_cuda and found.dtype == torch.float64
    torch.testing.assert_close(found.cpu(), square_sums_on_cpu(tensors), rtol=1e-5, atol=0)


def test_a_run_saves_loads_and_has_the_losses_of_the_cpu(tmp_path):
    config = write_job(tmp_path)
    titan("train", config, "--nproc", 1)
    whole = read_losses(tmp_path / "whole")
    assert set(whole) == {1, 2, 3}

    titan("train", config, "--nproc", 1, "--job.dump_folder", tmp_path / "stopped", "--training.steps", 2)
    resumed = titan("train", config, "--nproc", 1, "--job.dump_folder", tmp_path / "stopped")
    assert "resumed from" in resumed.stderr
    assert list(read_losses(tmp_path / "stopped").values()) == pytest.approx(list(whole.values()), abs=1e-5)

    titan("train", config, "--nproc", 1, "--job.dump_folder", tmp_path / "cpu", on_cpu=True)
    assert list(read_losses(tmp_path / "cpu").values()) == pytest.approx(list(whole.values()), abs=1e-3)


def test_infer_says_what_it_says_on_the_cpu(tmp_path):
    write_llama(tmp_path / "hf")
    ask = ["infer", tmp_path / "hf", "--prompt", "def main(", "--max-new-tokens", 24, "--dtype", "float32", "--json"]
    on_gpu, on_cpu = (json.loads(titan(*ask, on_cpu=on_cpu).stdout)["results"][0] for on_cpu in (False, True))
    assert on_gpu["tokens"] == on_cpu["tokens"] and len(on_gpu["tokens"]) > 1
