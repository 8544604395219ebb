"""families/llama3_config.py: config.json as transformers writes and reads it, params.json as Meta's code reads it."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from converters.errors import CheckpointError, UnsupportedError
from converters.families.base import ModelArgs, RopeScaling
from converters.families.llama3 import FLAVORS, LLAMA3

ODD = ModelArgs(
    dim=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    ffn_hidden=250,
    vocab_size=1007,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_seq_len=512,
    tied=True,
)
ALL = {**FLAVORS, "odd": ODD}


@pytest.mark.parametrize("name", ALL)
def test_transformers_reads_what_we_write(name, tmp_path):
    args = ALL[name]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3.hf_config(args)))
    config = LlamaConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size) == (
        args.dim,
        args.num_layers,
        args.ffn_hidden,
        args.vocab_size,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        args.num_heads,
        args.num_kv_heads,
        args.head_dim,
    )
    rope = config.rope_parameters
    assert rope["rope_theta"] == args.rope_theta
    assert rope["rope_type"] == ("llama3" if args.rope_scaling else "default")
    if args.rope_scaling:
        assert rope["factor"] == args.rope_scaling.factor
        assert rope["original_max_position_embeddings"] == 8192
    assert config.tie_word_embeddings == args.tied
    assert (config.max_position_embeddings, config.rms_norm_eps) == (args.max_seq_len, args.norm_eps)


@pytest.mark.parametrize("name", ALL)
def test_we_read_what_transformers_5_writes(name, tmp_path):
    args = ALL[name]
    LlamaConfig(**LLAMA3.hf_config(args)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_scaling" not in written and "rope_parameters" in written
    assert LLAMA3.args_from_hf_config(written) == args


@pytest.mark.parametrize("name", ALL)
def test_we_read_the_spelling_of_transformers_4(name):
    config = LLAMA3.hf_config(ALL[name])
    del config["rope_parameters"]
    assert LLAMA3.args_from_hf_config(config) == ALL[name]


def test_defaults_of_a_sparse_config():
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 300,
        "head_dim": None,
        "rope_scaling": None,
    }
    args, theirs = LLAMA3.args_from_hf_config(config), LlamaConfig(**config)
    assert (args.num_kv_heads, args.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert args.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (args.max_seq_len, args.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)


def test_other_variants_are_refused():
    config = LLAMA3.hf_config(FLAVORS["debug_gqa"])
    with pytest.raises(UnsupportedError) as error:
        LLAMA3.args_from_hf_config(config | {"attention_bias": True, "hidden_act": "gelu"})
    assert "attention_bias = True" in error.value.message and "hidden_act = 'gelu'" in error.value.message
    with pytest.raises(UnsupportedError, match="'yarn'"):
        LLAMA3.args_from_hf_config(config | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}})
    with pytest.raises(CheckpointError, match="low_freq_factor"):
        LLAMA3.args_from_hf_config(config | {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}})
    with pytest.raises(CheckpointError, match="hidden_size\n  vocab_size"):
        LLAMA3.args_from_hf_config({k: v for k, v in config.items() if k not in ("hidden_size", "vocab_size")})


# params.json of the releases, and the flavor each one is
RELEASES = {
    "8B": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "vocab_size": 128256,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 1024,
        "norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
    },
    "1B": {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "vocab_size": 128256,
        "ffn_dim_multiplier": 1.5,
        "multiple_of": 256,
        "norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
    },
}


@pytest.mark.parametrize("flavor", RELEASES)
def test_meta_releases(flavor):
    shapes = {p.fqn: p.shape for p in LLAMA3.parameters(FLAVORS[flavor])}
    shapes["output.weight"] = shapes["tok_embeddings.weight"]  # Meta ships it, tied or not
    assert LLAMA3.args_from_meta_params(RELEASES[flavor], shapes) == FLAVORS[flavor]
    assert LLAMA3.args_from_meta_params(RELEASES[flavor], {}) == FLAVORS[flavor]


def test_llama_3_0_has_no_scaling():
    params = {k: v for k, v in RELEASES["8B"].items() if k != "use_scaled_rope"}
    expected = replace(FLAVORS["8B"], rope_scaling=None, max_seq_len=8192)
    assert LLAMA3.args_from_meta_params(params, {}) == expected


@pytest.mark.parametrize("name", [*FLAVORS, "odd"])
def test_meta_round_trip(name):
    # The head size and the context length are what Meta's code takes or is told by its user
    length = 131072 if ALL[name].rope_scaling else 8192
    args = replace(ALL[name], head_dim=ALL[name].dim // ALL[name].num_heads, max_seq_len=length)
    shapes = {p.fqn: p.shape for p in LLAMA3.parameters(args)}
    params = LLAMA3.meta_params(args)
    assert LLAMA3.args_from_meta_params(params, shapes) == args
    # Meta's code sees no shapes: its formula must give the same width
    assert LLAMA3.args_from_meta_params(params, {}).ffn_hidden == args.ffn_hidden


def test_every_width_has_a_formula():
    for hidden in [*range(100, 140), 5461, 8191]:
        args = replace(FLAVORS["debug_gqa"], ffn_hidden=hidden, rope_scaling=RopeScaling())
        assert LLAMA3.args_from_meta_params(LLAMA3.meta_params(args), {}).ffn_hidden == hidden


def test_meta_cannot_say_everything():
    with pytest.raises(UnsupportedError, match="head_dim 32"):
        LLAMA3.meta_params(ODD)
    for scaling in (RopeScaling(low_freq_factor=2.0), RopeScaling(original_max_position_embeddings=64)):
        with pytest.raises(UnsupportedError, match="params.json cannot say RopeScaling"):
            LLAMA3.meta_params(replace(FLAVORS["8B"], rope_scaling=scaling))
    with pytest.raises(CheckpointError, match="n_heads"):
        LLAMA3.args_from_meta_params({"dim": 64, "n_layers": 2}, {})
