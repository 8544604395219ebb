"""What the build takes from the config and hands on, seen on a fake process group."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import trainer.build
from converters.common.errors import UnsupportedError
from converters.families.parameters import Parameter, Role
from converters.families.registry import get_family
from trainer.config.sections import (
    ActivationCheckpoint,
    Compile,
    Config,
    Dataloader,
    Model,
    Parallelism,
    Training,
)
from trainer.data.training_data import train_loader
from trainer.job.job import resolve, resolve_job
from trainer.parallel.activation_checkpoint import set_memory_budget
from trainer.ranks.mesh import make_meshes

TP2 = Parallelism(tensor_parallel_degree=2)


@contextmanager
def fake_ranks(parallelism: Parallelism, num_ranks: int):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield make_meshes(resolve(parallelism, num_ranks), "cpu")
    finally:
        dist.destroy_process_group()


def build(config: Config, meshes):
    return trainer.build.build(resolve_job(config, meshes.dims.world_size), meshes, torch.device("cpu"))


def config_of(**sections) -> Config:
    keys = {"mixed_precision_param": "float32", "seq_len": 32}
    return replace(Config(model=Model(flavor="debug_gqa"), training=Training(**keys)), **sections)


def test_a_family_that_lists_a_parameter_its_model_lacks_is_refused():
    job = resolve_job(config_of(), 1)
    extra = Parameter("layers.0.extra_norm.weight", (128,), Role.NORM)
    family = replace(job.family, parameters=lambda args: [*get_family("llama3").parameters(args), extra])
    with pytest.raises(UnsupportedError, match=r"layers\.0\.extra_norm\.weight \[128\]: only in the list"):
        trainer.build.build_part(replace(job, family=family), 0)


def test_a_norm_returns_local_shards_that_a_model_can_add():
    with fake_ranks(TP2, 2) as meshes:
        part = build(config_of(parallelism=TP2), meshes).parts[0]
        output = part.norm(torch.ones(1, 16, part.args.dim))
    assert not isinstance(output, DTensor) and output.shape == (1, 16, part.args.dim)


def test_asynchronous_tensor_parallelism_is_switched_on_for_its_group(monkeypatch):
    text = []
    monkeypatch.setattr(trainer.build, "check_hardware", lambda config, device: None)
    monkeypatch.setattr(trainer.build, "enable_async_tp", text.append)
    with fake_ranks(TP2, 2) as meshes:
        asked = replace(TP2, enable_async_tensor_parallel=True)
        build(config_of(parallelism=asked, compile=Compile(enable=True)), meshes)
        assert text == [meshes["tp"].get_group()]
        build(config_of(parallelism=TP2, compile=Compile(enable=True)), meshes)
        assert len(text) == 1


def test_the_compiler_gets_its_budget(tmp_path):
    settings = ActivationCheckpoint(mode="memory_budget", memory_budget=0.25)
    try:
        with fake_ranks(Parallelism(), 1) as meshes:
            compiled = Compile(enable=True, backend="aot_eager")
            build(config_of(activation_checkpoint=settings, compile=compiled), meshes)
            assert torch._functorch.config.activation_memory_budget == 0.25
            build(config_of(compile=compiled), meshes)
            assert torch._functorch.config.activation_memory_budget == 1.0
    finally:
        set_memory_budget(ActivationCheckpoint(mode="none"), tmp_path)


def test_what_float8_puts_in_place_of_tensor_parallel_styles_is_applied(monkeypatch):
    styles, text = {"layers.0.attention.wq": object()}, []
    monkeypatch.setattr(trainer.build, "float8_styles", lambda *args, device_type, **keys: styles)
    monkeypatch.setattr(trainer.build, "apply_tp", lambda *args, converted, **keys: text.append(converted))
    float8 = replace(Config().float8, emulate=True)
    with fake_ranks(TP2, 2) as meshes:
        converters = Model(flavor="debug_gqa", converters=("quantize.linear.float8",))
        build(config_of(parallelism=TP2, model=converters, float8=float8), meshes)
        build(config_of(parallelism=TP2), meshes)
    assert text == [styles, None]


@pytest.mark.parametrize("pins", [True, False])
def test_training_data_is_pinned_if_asked(monkeypatch, pins):
    monkeypatch.setattr("trainer.data.training_data.open_training_data", lambda *args, pin_memory, **keys: pin_memory)
    with fake_ranks(Parallelism(), 1) as meshes:
        config = config_of(dataloader=Dataloader(pin_memory=pins))
        assert train_loader(resolve_job(config, 1), meshes, None, group=None) is pins
