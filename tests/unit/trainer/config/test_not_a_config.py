"""What is said where a model's folder, its config.json, a name on the Hub or another file is named as a config."""

import json
from dataclasses import replace

import pytest

from converters.common.errors import ConfigError
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo, write_hf_config, write_model_info
from trainer.config.load import load_config
from trainer.config.preset import preset_models
from trainer.config.upgrade import upgrade

LLAMA = get_family("llama3").flavors["8B"]
PARAMS = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024}
PARAMS |= {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0}


def refused(source) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load_config(str(source))
    return error.value


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_hugging_face_folder_and_its_config_name_the_preset_of_the_same_numbers(tmp_path, name):
    write_hf_config(tmp_path, ModelInfo("llama3", LLAMA), dtype="bfloat16")
    error = refused(tmp_path / name)
    assert "its config.json is of a llama3 model with 32 layers, dim 4096" in error.message
    assert "its numbers are those of flavor 8B" in error.hint
    assert error.tries[0] == "titan estimate-memory llama3_8b --world-size 8"
    assert f"titan train llama3_8b --checkpoint.initial_load_path {tmp_path}" in error.tries
    with pytest.raises(ConfigError, match="is of a llama3 model"):  # and other readers of configs
        upgrade(tmp_path / name)


@pytest.mark.parametrize("name", ["", "params.json"])
def test_metas_folder_has_the_shapes_of_a_flavor(tmp_path, name):
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    error = refused(tmp_path / name)
    assert "its params.json is of a llama3 model" in error.message
    assert "flavor 8B but for rope_scaling" in error.hint
    assert not any(line.startswith("titan train") for line in error.tries)


def test_titans_own_folder_and_a_file_of_weights_in_it(tmp_path):
    write_model_info(tmp_path, ModelInfo("qwen3", get_family("qwen3").flavors["0.6B"]))
    (tmp_path / "model.safetensors").write_bytes(b"\x00")
    for source in (tmp_path, tmp_path / "titan_model.json", tmp_path / "model.safetensors"):
        assert refused(source).tries[0] == "titan estimate-memory qwen3_0.6b --world-size 8"


def test_other_numbers_name_what_differs_from_the_nearest_flavor(tmp_path):
    write_hf_config(tmp_path, ModelInfo("llama3", replace(LLAMA, ffn_hidden=12288)), dtype="bfloat16")
    error = refused(tmp_path)
    assert "no flavor of llama3 has these (the nearest, 8B, differs in ffn_hidden)" in error.hint
    assert error.tries[0] == "titan estimate-memory llama3_8b --world-size 8"


def test_a_flavor_without_a_preset_is_set(tmp_path):
    write_hf_config(tmp_path, ModelInfo("llama2", get_family("llama2").flavors["13B"]), dtype="bfloat16")
    words = "llama3_8b --model.name llama2 --model.flavor 13B"
    assert refused(tmp_path).tries[0] == f"titan estimate-memory {words} --world-size 8"
    assert load_config(words.split()[0], words.split()[1:]).model.flavor == "13B"


@pytest.mark.parametrize("flavor", [("llama3", "1B"), ("qwen3", "30B-A3B"), ("deepseek_v3", "16B"), ("gpt_oss", "20b")])
def test_each_family_is_found_by_its_config(tmp_path, flavor):
    write_hf_config(tmp_path, ModelInfo(flavor[0], get_family(flavor[0]).flavors[flavor[1]]), dtype="bfloat16")
    preset = refused(tmp_path).tries[0].split()[2]
    assert preset_models()[preset] == flavor


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", '{"training": {"steps": 5}}', "is JSON, not a config file: it describes no model"),
        ("list.json", "[1]", "is JSON, not a config file: .* a JSON list"),
        ("config.json", '{"model_type": "gpt2"}', "is JSON, not a config file: .*gpt2.*no family supports"),
        ("config.json", '{"model_type": "llama", "hidden_size": 0}', "is JSON, not a config file"),
        ("run.yaml", "a: 1", "is YAML, not a config file"),
        ("run.py", "a = 1", "is Python, not a config file"),
        ("x.gguf", "GGUF", "is a file of weights, not a config file"),
    ],
)
def test_other_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(str(tmp_path / name))
    assert "titan's configs are TOML files and presets" in error.value.hint


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3_8b"),
        ("meta-llama/Llama-3.1-405B-Instruct", "llama3_405b"),
        ("Qwen/Qwen3-0.6B", "qwen3_0.6b"),
        ("openai/gpt-oss-20b", "gpt_oss_20b"),
    ],
)
def test_a_name_on_the_hub(name, preset):
    error = refused(name)
    assert "no such config file or preset" in error.message and "titan download" in error.hint
    assert error.tries[0] == f"titan estimate-memory {preset} --world-size 8"


def test_a_folder_of_configs_and_an_empty_one(tmp_path):
    assert "is a folder, not a config file" in refused(tmp_path).message
    (tmp_path / "run.toml").write_text("")
    assert refused(tmp_path).tries == (str(tmp_path / "run.toml"),)
    assert load_config(tmp_path / "run.toml").model.name == "llama3"
