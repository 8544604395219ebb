"""What a config asks of attention within documents, and what is refused with the nearest setting."""

from dataclasses import replace

import pytest
import torch

from converters.families.registry import get_family
from trainer.config.load import load_config
from trainer.config.sections import Config, Model, Parallelism, Training
from trainer.data.sample import DocumentRules
from trainer.job.job import layout_problems, resolve, resolve_job
from trainer.models import registry
from trainer.next_token.numbers import documents_of
from trainer.parallel.document_mask import attention_kernel, document_rules, masked_machine_problems

LLAMA = get_family("llama3")
FLEX, VARLEN = ("debugmodel_flex_attn", "8B_flex"), ("debugmodel_varlen_attn", "8B_varlen")


def problems(world_size: int = 2, *, flavor: str = "debug_gqa", attn_type: str | None = None, **keys) -> list[str]:
    training = {
        name: keys.pop(name) for name in ("document_mask", "packing", "dataset", "dataset_path") if name in keys
    }
    config = Config(
        model=Model(flavor=flavor, attn_type=attn_type), parallelism=Parallelism(**keys), training=Training(**training)
    )
    return layout_problems(config, LLAMA.flavors[flavor], resolve(config.parallelism, world_size))


@pytest.mark.parametrize("flavor", FLEX + VARLEN)
def test_torchtitans_flavors_have_the_numbers_of_the_plain_ones_and_masks(flavor):
    """torchtitan v0.2.2, models/llama3/__init__.py: they differ in attn_type and attn_mask_type alone."""
    plain = flavor.partition("_")[0]
    assert LLAMA.flavors[flavor] == LLAMA.flavors[plain]
    config = Config(model=Model(flavor=flavor))
    assert document_rules(config, LLAMA) == DocumentRules("offsets", "concatenated")
    assert attention_kernel(config, LLAMA) == ("flex" if flavor in FLEX else "varlen")
    assert document_rules(Config(model=Model(flavor=plain)), LLAMA).mask == "none"
    assert problems(flavor=flavor) == []


@pytest.mark.parametrize("mask", ["none", "offsets", "eos"])
def test_the_key_decides_for_any_flavor(mask):
    for flavor in ("debugmodel", "debugmodel_flex_attn"):
        config = Config(model=Model(flavor=flavor), training=Training(document_mask=mask))
        assert document_rules(config, LLAMA).mask == mask
    qwen = load_config("qwen3_debug", ["--training.document_mask", mask])
    assert documents_of(resolve_job(qwen)).mask == mask


@pytest.mark.parametrize(
    ("keys", "message", "nearest"),
    [
        ({"packing": "best_fit"}, "document_mask is none", {"document_mask": "offsets"}),
        ({"packing": "best_fit", "document_mask": "eos"}, "document_mask is eos", {"document_mask": "offsets"}),
        ({"attn_type": "varlen"}, "is a kernel of attention within documents", {"document_mask": "offsets"}),
        (
            {"packing": "best_fit", "document_mask": "offsets", "dataset": "c4"},
            "c4 is streamed",
            {"packing": "concatenated"},
        ),
        (
            {"flavor": "debugmodel_varlen_attn", "context_parallel_degree": 2},
            "varlen's kernel needs whole sequences",
            {"attn_type": "flex"},
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_nearest_setting(keys, message, nearest):
    (problem,) = problems(**keys)
    assert message in problem and "nearest: " in problem
    assert all(value in problem.partition("nearest: ")[2] for value in nearest.values())
    assert problems(**keys | nearest) == []


def test_a_split_backward_does_not_take_flex_attention():
    keys = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble", "document_mask": "offsets"}
    others = set(problems(**keys | {"document_mask": "none"}))
    (problem,) = set(problems(**keys)) - others
    assert "pytorch#161904" in problem and "model.attn_type = varlen" in problem
    assert set(problems(**keys, attn_type="varlen")) == others


def test_a_model_that_takes_no_documents_is_refused(monkeypatch):
    plain = replace(registry.get_trainer_family("llama3"), takes_documents=False)
    monkeypatch.setitem(registry._FAMILIES, "llama3", plain)
    (problem,) = problems(document_mask="eos")
    assert "takes_documents" in problem
    assert problems() == []


def test_varlen_on_a_gpu_needs_16_bits():
    gpu, wide = torch.device("cuda"), Training(document_mask="offsets", mixed_precision_param="float32")
    config = Config(model=Model(attn_type="varlen"), training=wide)
    (problem,) = masked_machine_problems(config, LLAMA, gpu)
    assert "nearest: model.attn_type = flex" in problem
    assert masked_machine_problems(config, LLAMA, torch.device("cpu")) == []
    assert masked_machine_problems(replace(config, training=Training(document_mask="eos")), LLAMA, gpu) == []


def problems_of(family: str, flavor: str, attn_type: str | None = None, mask: str | None = None, **keys) -> list[str]:
    config = Config(
        model=Model(name=family, flavor=flavor, attn_type=attn_type),
        parallelism=Parallelism(**keys),
        training=Training(document_mask=mask),
    )
    return layout_problems(config, get_family(family).flavors[flavor], resolve(config.parallelism, 2))


@pytest.mark.parametrize(("family", "flavor"), [("gpt_oss", "debug_window"), ("llama4", "debug_scout")])
def test_windows_chunks_and_sinks_need_the_kernel_with_documents_and_without(family, flavor):
    split = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}
    for mask in ("none", "offsets"):
        assert problems_of(family, flavor, mask=mask) == problems_of(family, flavor, "flex", mask) == []
        for keys in ({}, {"context_parallel_degree": 2}):
            (problem,) = problems_of(family, flavor, "varlen", mask, **keys)
            assert f"varlen's kernel computes no windows, chunks or sinks, which {family} has" in problem
            assert problem.endswith("nearest: model.attn_type = flex")
        (problem,) = (each for each in problems_of(family, flavor, mask=mask, **split) if "pytorch#161904" in each)
        assert problem.endswith("nearest: schedule Interleaved1F1B")


def test_without_triton_they_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    gpu, family = torch.device("cuda"), get_family("gpt_oss")
    (problem,) = masked_machine_problems(Config(model=Model(name="gpt_oss", flavor="debug_window")), family, gpu)
    assert "FlexAttention needs Triton" in problem and "varlen" not in problem
    assert masked_machine_problems(Config(model=Model(flavor="debug_gqa")), LLAMA, gpu) == []
