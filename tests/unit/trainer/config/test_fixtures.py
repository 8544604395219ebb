"""TOML files as torchtitan v0.2.2 ships them, and as users write them: each runs unchanged, or the reason is given."""

import re
from pathlib import Path

import pytest

from converters.common.errors import ConfigError
from trainer.config.load import load_config
from trainer.config.preset import describe_presets, preset_names
from trainer.config.refused import REFUSED
from trainer.config.show import unread
from trainer.config.toml_file import read_toml
from trainer.job.job import resolve_job

CONFIGS = Path(__file__).parent / "configs"
FLUX = "it belongs to Flux"
TORCHFT = "TorchFT"

RUN = {
    "llama3_debug_model": (1, 8, 100),
    "llama3_8b": (8, 64, 96, 100, 128),
    "llama3_70b": (64, 256, 512),
    "qwen3_0.6b": (1, 8),
    "qwen3_1.7b": (1, 8),
    "qwen3_32b": (32, 64),
    "qwen3_moe_debug": (1, 8),
    "deepseek_v3_debug": (1, 8),
    "deepseek_v3_16b": (8, 64),
    "deepseek_v3_671b": (8, 64, 512),
    "gpt_oss_debug": (1, 8),
    "llama4_debug_model": (1, 8),
    "llama4_17bx16e": (8, 64),
    "llama4_17bx128e": (32, 256),
    "llama3_405b": (8, 512),
    "llama3_8b_custom": (8, 32),
    "llama3_70b_256_gpus": (256,),
    "llama3_405b_512_gpus": (512,),
    "llama3_8b_float8_rowwise": (8, 64),
    "llama3_8b_float8_tensorwise": (8, 64),
}  # and the world sizes to try

REFUSED_FILES = {
    "flux_dev": {
        "model.name": "it makes images",
        "job.custom_config_module": "a module in experimental.custom_import registers sections",
        "training.classifier_free_guidance_prob": FLUX,
        "training.img_size": FLUX,
        "encoder.t5_encoder": FLUX,
        "encoder.clip_encoder": FLUX,
        "encoder.max_t5_encoding_len": FLUX,
        "validation.enable_classifier_free_guidance": FLUX,
        "validation.denoising_steps": FLUX,
        "validation.save_img_folder": FLUX,
    },
    "llama3_ft_debug": {
        "model.name": "the model is llama3",
        "fault_tolerance.enable": TORCHFT,
        "fault_tolerance.sync_steps": TORCHFT,
        "fault_tolerance.num_fragments": TORCHFT,
    },
}


def test_every_file_is_in_one_of_the_tables():
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(RUN) | set(REFUSED_FILES)


@pytest.mark.parametrize("name", RUN)
def test_it_loads_and_its_layout_is_fine(name):
    path = CONFIGS / f"{name}.toml"
    config = load_config(path)
    for world_size in RUN[name]:
        resolve_job(config, world_size)
    written = read_toml(path)
    assert set(config.origins) == set(written)
    # what nothing reads is reported, key by key, and harmless
    output = {line.split(" ")[0] for line in unread(config)}
    assert output == {key for key in written if key in REFUSED}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_it_is_refused_with_exactly_these_reasons(name):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / f"{name}.toml")
    lines = [line for line in caught.value.message.splitlines() if "problems" not in line]
    wanted = REFUSED_FILES[name]
    assert len(lines) == len(wanted)
    for key, reason in wanted.items():
        (line,) = [line for line in lines if f" {key}" in line]
        assert reason in line and f"{name}.toml:" in line
    assert not any("upgrade" in word for word in caught.value.tries)


def world_sizes(name: str) -> list[int]:
    """What the first line of a preset says it is for."""
    return [int(number) for number in re.findall(r"(\d+) (?:GPUs?|ranks)", dict(describe_presets())[name])]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_fine_on_the_ranks_that_it_names(name):
    config = load_config(name)
    (world_size,) = world_sizes(name)
    assert resolve_job(config, world_size).dims.world_size == world_size
    assert unread(config) == []


def test_there_are_presets_of_every_size():
    flavors = {(config.model.name, config.model.flavor) for config in map(load_config, preset_names())}
    wanted = {
        "llama3": ("debug_gqa", "1B", "3B", "8B", "70B", "405B"),
        "qwen3": ("debug_gqa", "0.6B", "8B", "32B", "debug_moe", "30B-A3B", "235B-A22B"),
        "deepseek_v3": ("16B", "671B"),
        "gpt_oss": ("20b", "120b"),
        "llama4": ("17bx16e_irope", "17bx128e_irope"),
    }
    assert {(name, flavor) for name, flavors in wanted.items() for flavor in flavors} <= flavors
    assert load_config("llama3_8b_float8").model.converters == ("quantize.linear.float8",)
    assert (world_sizes("llama3_70b_256"), world_sizes("llama3_405b_512")) == ([256], [512])


def test_a_converters_name_of_an_earlier_release_is_read_as_it_is_meant():
    """torchtitan's own file for 405B has it."""
    config = load_config(CONFIGS / "llama3_405b.toml")
    assert config.model.converters == ("quantize.linear.float8",)
    assert config.origins["model.converters"].endswith("llama3_405b.toml:21, called float8 there")
