"""The order of attention kernels by GPU, seen from inside the context; a CPU is left alone."""

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from converters.families.llama3 import FLAVORS
from converters.families.registry import get_family
from trainer.config.sections import Config
from trainer.job.job import resolve_job
from trainer.models.attention import CausalAttention
from trainer.models.decoder import Transformer
from trainer.models.registry import get_trainer_family
from trainer.parallel.attention_backend import attention_backends, widen_attention_on_cpu
from trainer.parallel.document_attention import PerDocumentAttention
from trainer.parallel.masked_attention import apply_masks, masked_layers

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((8, 0), [FLASH, EFFICIENT, MATH]),
        ((8, 9), [FLASH, EFFICIENT, MATH]),
        ((9, 0), [CUDNN, FLASH, EFFICIENT, MATH]),
        ((10, 0), [FLASH, EFFICIENT, MATH]),
    ],
)
def test_cudnn_is_asked_first_on_hopper_alone(capability, order, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with attention_backends(torch.device("cuda")):
        assert _cur_sdpa_kernel_backends(with_priority=True) == order
    assert _cur_sdpa_kernel_backends(with_priority=True) == before


def test_a_cpu_keeps_what_it_has():
    before = _cur_sdpa_kernel_backends(with_priority=True)
    with attention_backends(torch.device("cpu")):
        assert _cur_sdpa_kernel_backends(with_priority=True) == before


def _gradients(model, tokens):
    model.zero_grad()
    model(tokens).float().logsumexp(-1).mean().backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def test_on_a_cpu_attention_in_bf16_is_computed_in_fp32():
    torch.manual_seed(0)
    model, tokens = Transformer(FLAVORS["debug_gqa"]).bfloat16(), torch.randint(2048, (2, 64))
    names = [name for name, _ in model.named_parameters()]
    narrow = _gradients(model, tokens)
    seen = []
    for layer in model.layers.values():
        layer.attention.inner_attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    widen_attention_on_cpu([model], torch.device("cuda"))
    model(tokens)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    widen_attention_on_cpu([model], torch.device("cpu"))
    wide = _gradients(model, tokens)
    assert set(seen) == {torch.float32} and len(seen) == len(model.layers)
    assert [name for name, _ in model.named_parameters()] == names
    exact = _gradients(model.double(), tokens)
    assert (wide - exact).norm() <= 1.05 * (narrow - exact).norm()


@pytest.mark.parametrize(("family", "flavor"), [("gpt_oss", "debug_window"), ("llama4", "debug_scout")])
def test_so_are_windows_chunks_and_sinks(family, flavor):
    cpu, seen = torch.device("cpu"), []
    model = get_trainer_family(family).build_model(get_family(family).flavors[flavor]).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    apply_masks(model, masked_layers(model, PerDocumentAttention, has_documents=False), cpu)
    widen_attention_on_cpu([model], cpu)
    for module in model.modules():
        if isinstance(module, PerDocumentAttention | CausalAttention):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    model(torch.randint(2048, (1, 64))).sum().backward()
    assert seen == [torch.float32] * len(model.layers)


def test_a_run_on_a_cpu_has_it(monkeypatch):
    from trainer import train

    output = []
    monkeypatch.setattr(train, "widen_attention_on_cpu", lambda parts, device: output.append((parts, device)) or 1 / 0)
    monkeypatch.setattr(train, "build", lambda *args: SimpleNamespace(parts=["a part"]))
    monkeypatch.setattr(train, "make_meshes", lambda *args: None)
    monkeypatch.setattr(train, "Timeouts", lambda *args: None)
    nothing = SimpleNamespace(candidates=lambda initial: [], recorded=lambda paths, **options: None)
    monkeypatch.setattr(train, "Checkpoints", lambda *args, **options: nullcontext(nothing))
    ranks = SimpleNamespace(device=torch.device("cpu"), agreement=None)
    with pytest.raises(ZeroDivisionError), ExitStack() as held:
        train.train_locked(resolve_job(Config(), 1), ranks, None, None, held)
    assert output == [(["a part"], ranks.device)]
