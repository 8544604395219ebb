"""Every text decoder class that transformers registers, through convert, back and infer."""

import json
from dataclasses import fields

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.differential.compare import assert_same_or_refused, outcome_of
from tests.differential.makers import registered_types, tiny_config, tiny_model
from tests.differential.sampling import chosen

FAMILIES = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "DeepseekV3ForCausalLM": DeepseekV3Config,
    "DeepseekV2ForCausalLM": DeepseekV2Config,
    "Llama4ForCausalLM": Llama4TextConfig,
    "GptOssForCausalLM": GptOssConfig,
}
ACCEPTED = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v2", "llama4_text", "gpt_oss")
# Of these no tiny model is made, and this is why. Any other must be built, or its test fails
NOT_BUILT = {
    "blt": "96,286,240 parameters are not tiny",
    "cohere_compass_text": "KeyError: 'full_attention'",
    "dbrx": "has no attribute 'rope_theta'",
    "dots3_note": "`per_layer_config` keys must be integer layer indices",
    "dots3_note_text": "76,243,984 parameters are not tiny",
    "fuyu": "9,408,238,592 parameters are not tiny",
    "gemma3n": "requires the timm library",
    "gemma3n_text": "set of layer types producing a cache is different",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "gemma4_unified_assistant": "set of layer types producing a cache is different",
    "got_ocr2": "471,641,056 parameters are not tiny",
    "moshi": "'audio_vocab_size' expected int, got NoneType",
    "moss_transcribe_diarize": "597,278,528 parameters are not tiny",
    "musicgen": "no attribute 'dropout'",
    "musicgen_melody": "no attribute 'dropout'",
    "qwen4_exp": "unsupported operand type(s) for //",
    "reformer": "make sure that `is_decoder=True`",
    "zamba": "an issue with your definition of `tie_weights_keys`",
}
BUILT = [t for t in registered_types() if t not in NOT_BUILT]
SAMPLE = (
    "llama",
    "qwen3",
    "gemma3",
    "gpt2",
    "internlm3",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v2",
    "llama4_text",
    "gpt_oss",
)
CALLED_SAMPLE = [
    (t, "LlamaForCausalLM") for t in ("cwm", "ernie4_5", "granite", "helium", "mistral", "olmo2", "smollm3")
] + [(t, "Qwen3MoeForCausalLM") for t in ("mixtral", "olmoe", "qwen2_moe", "qwen3")]
CALLED_SAMPLE += [("glm4_moe_lite", "DeepseekV3ForCausalLM")]


def test_enough_classes_are_built():
    assert len(BUILT) >= 0.9 * len(registered_types())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in NOT_BUILT if t in registered_types()])
def test_class_that_is_not_built(model_type, count):
    """A reason that no longer holds is taken from the list."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  transformers', of whatever type
        tiny_model(tiny_config(model_type))
    assert NOT_BUILT[model_type] in f"{type(raised.value).__name__}: {raised.value}"
    count("classes", "not built")


@pytest.mark.parametrize("model_type", chosen(BUILT, SAMPLE))
def test_class(model_type, tmp_path, count):
    config = _write(tmp_path / "src", model_type)
    names = {config["model_type"], *config["architectures"]}
    outcome = outcome_of(tmp_path / "src", tmp_path / "scratch", names=names, accepted=model_type in ACCEPTED)
    count("classes", outcome.kind)
    assert_same_or_refused(outcome)


@pytest.mark.parametrize(
    ("model_type", "called"), chosen([(t, called) for t in BUILT for called in FAMILIES], CALLED_SAMPLE)
)
def test_class_that_calls_itself_by_a_name_that_titan_reads(model_type, called, tmp_path, count):
    """transformers goes by `model_type`, whatever stands in `architectures`."""
    config = _write(tmp_path / "src", model_type)
    (tmp_path / "src" / "config.json").write_text(json.dumps(config | {"architectures": [called]}))
    own_fields = config.keys() - {field.name for field in fields(FAMILIES[called])}
    lacking = {field.name for field in fields(FAMILIES[called])} - config.keys()
    names = {"model_type", config["model_type"], *own_fields, *lacking}
    outcome = outcome_of(tmp_path / "src", tmp_path / "scratch", names=names)
    count("classes under another name", outcome.kind)
    assert_same_or_refused(outcome)


def _write(folder, model_type):
    """A tiny model of that type, saved by transformers; its config.json."""
    tiny_model(tiny_config(model_type)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return {"architectures": []} | config
