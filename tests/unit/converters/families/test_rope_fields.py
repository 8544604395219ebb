"""Fields of RoPE in config.json: written as published files state them, and versions that compute others."""

import json

import pytest

from converters.families.registry import get_family, read_hf_config
from converters.families.rope import LinearRope
from converters.model.model_info import read_model_info
from tests.unit.converters.families.test_deepseek_config import PUBLISHED as DEEPSEEK

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 131072, "rope_theta": 5e5,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4, "max_position_embeddings": 40960}
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 131072, "rope_theta": 150000.0,
}  # fmt: skip
V3, V2_LITE = (
    {key: value for key, value in DEEPSEEK[name][0].items() if key != "auto_map"} for name in ("671B", "16B")
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"}
# What the configs of these models state in rope_scaling
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA, {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }),
    "a linear Llama": (LLAMA, {"rope_type": "linear", "factor": 4.0}),
    "Qwen3-8B for long texts": (QWEN3, YARN),
    "gpt-oss-20b": (GPT_OSS, {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }),
    "a GPT-OSS that truncates": (GPT_OSS, {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": True,
    }),
    "DeepSeek-V3": (V3, {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    }),
    "DeepSeek-V2-Lite": (V2_LITE, {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_of_the_published_config_is_written(name):
    """Readers such as vLLM look up fields by name, also those with their default."""
    config, rope = PUBLISHED[name]
    family, args = read_hf_config(config | {"rope_scaling": rope})
    written = family.hf_config(args)
    assert written["rope_scaling"].items() >= rope.items()
    assert written["rope_parameters"].items() >= {key: rope[key] for key in rope if key != "type"}.items()
    assert read_hf_config(written)[1] == args
    assert read_hf_config({k: v for k, v in written.items() if k not in ("rope_scaling", "rope_theta")})[1] == args


OLD, MIDDLE, V2 = "YaRN before 4.51", "YaRN of 4.51 to 4.56", "attention of 4.54 to 5.14"


@pytest.mark.parametrize(
    ("config", "rope", "version", "said"),
    [
        (LLAMA, YARN, "4.50.3", OLD),
        (LLAMA, YARN | {"original_max_position_embeddings": 131072}, "4.50.3", ""),
        (LLAMA, YARN, "4.52.0.dev0", ""),  # 4 × 32,768 = 131,072
        (QWEN3, YARN, "4.51.3", MIDDLE),
        (QWEN3, YARN, "4.56.2", MIDDLE),
        (QWEN3, YARN, "4.57.6", ""),
        (QWEN3, YARN, "5.23.0", ""),
        (QWEN3, None, "4.51.3", ""),
        (QWEN3, YARN, None, ""),
        (V2_LITE, PUBLISHED["DeepSeek-V2-Lite"][1], "4.57.6", V2),
        (V2_LITE, PUBLISHED["DeepSeek-V2-Lite"][1], "5.14.1", V2),
        (V2_LITE, PUBLISHED["DeepSeek-V2-Lite"][1], "5.15.0", ""),
        (V2_LITE, PUBLISHED["DeepSeek-V2-Lite"][1], "4.39.3", ""),  # before there was a class
        (V2_LITE | {"auto_map": {"AutoModel": "m.M"}}, PUBLISHED["DeepSeek-V2-Lite"][1], "4.57.6", ""),
        (V3, PUBLISHED["DeepSeek-V3"][1], "4.50.0", ""),
        (V3, PUBLISHED["DeepSeek-V3"][1], "4.57.6", ""),
    ],
)
def test_a_version_that_computes_another_model_is_noted(config, rope, version, said, tmp_path):
    config = config | {"rope_scaling": rope} | ({"transformers_version": version} if version else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes = read_model_info(tmp_path).notes
    assert len(notes) == bool(said)
    if said:
        assert said in notes[0] and f"transformers {version}" in notes[0]


def test_a_linear_rope_has_no_other_fields():
    args = get_family("llama3").args_type(8, 1, 1, 1, 8, 8, rope_scaling=LinearRope(2.0), vocab_size=9)
    assert get_family("llama3").hf_config(args)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
