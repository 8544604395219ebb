"""Frequencies and scale of every RoPE type against transformers' own functions, bit for bit, and the way to it."""

import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from converters.common.errors import CheckpointError
from converters.families.args import args_to_json
from converters.families.blocks import rope_of
from converters.families.llama3 import LLAMA3
from converters.families.model_numbers import check_args
from converters.families.registry import get_family, read_hf_config
from converters.model.model_info import ModelInfo, read_model_info, write_model_info
from trainer.models.rope import RotaryAngles

_LENGTHS = st.integers(1, 2**20)
_FACTORS = st.floats(0.25, 64) | st.integers(1, 64)


def _maybe(key, values):
    return st.just({}) | st.fixed_dictionaries({key: values})


@st.composite
def ropes(draw):
    kind = draw(st.sampled_from(("default", "linear", "dynamic", "llama3", "yarn")))
    rope = {"rope_type": kind, "rope_theta": draw(st.sampled_from((10.0, 1e4, 5e5, 1e6, 12345.5)))}
    if kind == "default":
        return rope
    rope["factor"] = draw(_FACTORS)
    if kind == "llama3":
        low = draw(st.floats(0.5, 4))
        rope |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 8))}
    if kind in ("llama3", "yarn"):
        rope |= draw(_maybe("original_max_position_embeddings", _LENGTHS))
    if kind == "yarn":
        for key in ("beta_fast", "beta_slow"):
            rope |= draw(_maybe(key, st.floats(0.25, 64) | st.integers(0, 64)))
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            rope |= draw(_maybe(key, st.floats(0.1, 4)))
        rope |= draw(_maybe("truncate", st.booleans()))
    return rope


@settings(max_examples=150, deadline=None)
@given(ropes(), st.sampled_from((4, 8, 24, 64, 128)), _LENGTHS, st.booleans())
def test_frequencies_and_scale_are_those_of_transformers(rope, head_dim, length, is_old):
    sizes = {"vocab_size": 64, "hidden_size": 4 * head_dim, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": length}
    inside = {key: value for key, value in rope.items() if key != "rope_theta"}
    spelled = {"rope_theta": rope["rope_theta"], "rope_scaling": inside} if is_old else {"rope_parameters": rope}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(sizes | spelled))))
    args = read_hf_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | sizes | spelled)[1]
    try:
        check_args(args, what="config.json")
    except CheckpointError:
        assume(False)
    ours = RotaryAngles(rope_of(args, pairs=True))
    assert torch.equal(ours.frequencies_P, theirs.inv_freq)
    assert ours.scale == theirs.attention_scaling
    again = read_hf_config(json.loads(json.dumps(LLAMA3.hf_config(args))))[1]  # as titan writes it
    assert again == args


@settings(max_examples=20, deadline=None)
@given(ropes())
def test_titan_model_json_keeps_every_type(tmp_path_factory, rope):
    folder = tmp_path_factory.mktemp("model")
    config = LLAMA3.hf_config(LLAMA3.flavors["debug_gqa"]) | {"rope_parameters": rope}
    config = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    family, args = read_hf_config(config | {"attention_bias": True})
    write_model_info(folder, ModelInfo(family.name, args))
    assert read_model_info(folder).args == args


def test_titan_model_json_of_a_model_that_was_there_before_is_the_same():
    """An older titan reads it, and its bytes do not change."""
    written = args_to_json(LLAMA3.flavors["debug_gqa"])
    assert list(written)[-3:] == ["max_seq_len", "tied", "qk_norm"]
    assert list(written["rope_scaling"]) == [
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ]


def test_numbers_of_another_family_are_an_error(tmp_path):
    args = args_to_json(get_family("qwen3").flavors["debug_gqa"]) | {"mlp_bias": True}
    (tmp_path / "titan_model.json").write_text(json.dumps({"family": "qwen3", "args": args}))
    with pytest.raises(CheckpointError, match="a qwen3 model has no such parameters") as error:
        read_model_info(tmp_path)
    assert "feed_forward.w1.bias" in error.value.message
    assert error.value.hint == "the family's naming 'hf' has no rule for them"


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "linear"}, "is not factor"),
        ({"rope_type": "linear", "factor": None}, "factor is null"),
        ({"rope_type": "linear", "factor": "2"}, "factor = 2"),
        ({"rope_type": "longrope", "factor": 2.0}, "a rope_type 'longrope', not one of llama3, linear, dynamic, yarn"),
        ("linear", "rope_type None"),
        ({"rope_type": ["linear"]}, "rope_type ['linear']"),
        ({}, "is not factor"),
    ],
)
def test_a_scaling_that_is_none_is_an_error(scaling, said, tmp_path):
    content = {"family": "llama3", "args": args_to_json(LLAMA3.flavors["debug_gqa"]) | {"rope_scaling": scaling}}
    (tmp_path / "titan_model.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="titan_model.json") as error:
        read_model_info(tmp_path)
    assert said in error.value.message
