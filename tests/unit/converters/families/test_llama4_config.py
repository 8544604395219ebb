"""config.json and params.json of Llama 4: the published files, transformers' defaults, and every field changed."""

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import Llama4Config, Llama4TextConfig

from converters.common.errors import CheckpointError, UnsupportedError
from converters.families.llama4_config import TEXT
from converters.families.registry import get_family, read_hf_config, read_meta_params
from converters.families.rope import RopeScaling
from converters.model.multimodal import joined_config, split_config
from tests.models.llama4 import NUMBERS

FAMILY = get_family("llama4")
# The text_config of Llama-4-Scout-17B-16E-Instruct as Meta published it
SCOUT: dict[str, Any] = {
    "_attn_implementation_autoset": True,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 202048,
    "attn_temperature_tuning": 4,
}
OUTER = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0.dev0",
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}
MAVERICK = SCOUT | {
    "interleave_moe_layer_step": 2,
    "num_local_experts": 128,
    "max_position_embeddings": 1048576,
    "rope_scaling": None,
    "use_qk_norm": False,
}
TINY = NUMBERS["scout"] | {"num_hidden_layers": 4, "vocab_size": 64}


@pytest.mark.parametrize(("config", "flavor"), [(SCOUT, "17bx16e_irope"), (MAVERICK, "17bx128e_irope")])
def test_the_published_configs_are_the_flavors(config, flavor):
    text, outer = split_config(OUTER | {"text_config": config})
    assert read_hf_config(text) == (FAMILY, FAMILY.flavors[flavor])
    assert outer.keys() == {"boi_token_index", "eoi_token_index", "image_token_index", "vision_config"}
    assert split_config(config) == (config, {})
    joined = joined_config(FAMILY.hf_config(FAMILY.flavors[flavor]), outer, FAMILY.multimodal, FAMILY.flavors[flavor], dtype="bfloat16")  # fmt: skip  # noqa: E501
    again, other = split_config(joined)
    assert read_hf_config(again) == (FAMILY, FAMILY.flavors[flavor]) and other == outer


@pytest.mark.parametrize("flavor", FAMILY.flavors)
def test_what_is_written_is_read_and_is_what_transformers_reads(flavor, tmp_path):
    args = FAMILY.flavors[flavor]
    written = json.loads(json.dumps(FAMILY.hf_config(args)))
    assert read_hf_config(written) == (FAMILY, args)
    theirs = Llama4TextConfig(**written)
    assert read_hf_config(json.loads(theirs.to_json_string()) | {"architectures": [TEXT.architecture]})[1] == args
    rotates = [int(n not in args.layers_without_positions) for n in range(args.num_layers)]
    assert theirs.no_rope_layers == rotates and theirs.moe_layers == list(args.sparse_layers)
    by_step = Llama4TextConfig(**{k: v for k, v in written.items() if k not in ("moe_layers", "no_rope_layers", "layer_types")})  # fmt: skip  # noqa: E501
    assert (by_step.no_rope_layers, by_step.moe_layers) == (rotates, list(args.sparse_layers))  # for other readers


def test_numbers_left_out_are_the_defaults_of_the_class():
    sizes = {k: SCOUT[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    for layers in (4, 7, 48):
        found = read_hf_config({"model_type": "llama4_text", "num_hidden_layers": layers} | sizes)[1]
        full = json.loads(Llama4TextConfig(num_hidden_layers=layers).to_json_string())
        assert found == read_hf_config(full)[1]
        assert found.layers_without_positions == tuple(range(3, layers, 4)) and found.temperature == 0.1
        assert found.norm_eps == 1e-5 and found.rope_theta == 500000 and found.chunk == 8192


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers = .*not a list of 4 entries"),
        ({"no_rope_layers": [1, 2, 1, 0]}, "not a list of 0 and 1"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types = .*not a list of 4 entries"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: sliding_attention"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention in layers whose entry in no_rope_layers is 0"),
        ({"layer_types": ["chunked_attention", *["full_attention"] * 3]}, "in some of the layers"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE of type yarn"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning = 'yes'"),
        ({"attn_temperature_tuning": None}, "attn_temperature_tuning = None"),  # false in transformers 4, an error in 5
        ({"use_qk_norm": None}, "use_qk_norm = None"),
    ],
)
def test_what_no_model_of_titan_computes_is_refused(change, message):
    with pytest.raises(UnsupportedError, match=message):
        read_hf_config(TINY | {"model_type": "llama4_text"} | change)


def test_contradictions_are_errors():
    with pytest.raises(CheckpointError, match="tie_word_embeddings is True, and False in text_config"):
        split_config(OUTER | {"text_config": SCOUT | {"tie_word_embeddings": False}, "tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match="text_config is a list"):
        split_config(OUTER | {"text_config": []})
    with pytest.raises(CheckpointError, match="attention_chunk_size is null"):
        kinds = [*["chunked_attention"] * 3, "full_attention"]
        read_hf_config(TINY | {"model_type": "llama4_text", "layer_types": kinds, "attention_chunk_size": None})


def test_layers_without_chunks():
    """null is transformers 4's, with which 5.23 fails; layer_types are 5's."""
    base = TINY | {"model_type": "llama4_text"}
    for change in ({"attention_chunk_size": None}, {"layer_types": ["full_attention"] * 4}):
        args = read_hf_config(base | change)[1]
        assert args.chunk is None
        assert FAMILY.hf_config(args)["attention_chunk_size"] == args.max_seq_len
        assert read_hf_config(FAMILY.hf_config(args))[1] == args


# params.json


@pytest.mark.parametrize("flavor", [name for name in FAMILY.flavors if name != "debug_scout" and name != "debug_maverick"])  # fmt: skip  # noqa: E501
def test_params_are_read_as_they_are_written(flavor):
    args = FAMILY.flavors[flavor]
    params = json.loads(json.dumps(FAMILY.meta.params(args)))
    assert read_meta_params(params, {}) == (FAMILY, replace(args, max_seq_len=262144))
    assert read_meta_params({"model": params}, {}) == (FAMILY, replace(args, max_seq_len=262144))


def test_params_as_meta_published_them():
    """Of Scout, without what its code computes: widths 16,384 and 8,192 (args.py, moe.py), and a factor of 16."""
    params = {
        "dim": 5120,
        "n_layers": 48,
        "n_heads": 40,
        "n_kv_heads": 8,
        "vocab_size": 202048,
        "ffn_dim_multiplier": 1.2,
        "ffn_exp": 4.0,
        "multiple_of": 2048,
        "norm_eps": 1e-05,
        "attention_chunk_size": 8192,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
        "nope_layer_interval": 4,
        "use_qk_norm": True,
        "moe_args": {"num_experts": 16, "capacity_factor": 1.0, "auto_scale_F": True, "top_k": 1},
    }
    scout = replace(FAMILY.flavors["17bx16e_irope"], max_seq_len=262144, temperature=None)
    assert read_meta_params(params, {})[1] == scout
    tuned = read_meta_params(params | {"attn_temperature_tuning": True}, {})[1]
    assert tuned == replace(scout, temperature=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 64}, "head_dim 64"),
        ({"sparse_layers": (0, 3)}, r"experts in the layers \[0, 3\]"),
        ({"sparse_layers": ()}, r"experts in the layers \[\]"),
        ({"layers_without_positions": (0,)}, r"layers without positions \[0\]"),
        ({"rope_scaling": RopeScaling(16.0, 2.0, 4.0, 8192)}, "low_freq_factor"),
    ],
)
def test_params_that_cannot_say_it_are_not_written(change, message):
    with pytest.raises(UnsupportedError, match=message):
        FAMILY.meta.params(replace(FAMILY.flavors["debugmodel_irope"], **change))


@pytest.mark.parametrize("change", [{"moe_args": {}}, {"dim": None}, {"moe_args": {"num_experts": 4}, "ffn_exp": None}])
def test_missing_numbers_are_errors(change):
    with pytest.raises(CheckpointError, match="lacks numbers"):
        read_meta_params(FAMILY.meta.params(FAMILY.flavors["debugmodel"]) | change, {})


def test_a_text_model_of_the_multimodal_class():
    theirs = json.loads(Llama4Config(text_config=TINY).to_json_string()) | {"architectures": OUTER["architectures"]}
    assert read_hf_config(split_config(theirs)[0])[1] == read_hf_config(TINY | {"model_type": "llama4_text"})[1]
