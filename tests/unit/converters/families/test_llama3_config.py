"""Llama 3: config.json as transformers writes and reads it, params.json as Meta's code reads it."""

import json
from dataclasses import asdict, replace

import pytest
from transformers import LlamaConfig

from converters.common.errors import CheckpointError, UnsupportedError
from converters.families.llama3 import FLAVORS, LLAMA3
from converters.families.rope import RopeScaling
from converters.model.model_info import read_model_info


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
        LLAMA3.args_from_hf_config(config | {"is_causal": False, "hidden_act": "gelu"})
    assert "is_causal = False" in error.value.message and "hidden_act = 'gelu'" in error.value.message
    with pytest.raises(UnsupportedError, match="'axial'"):
        LLAMA3.args_from_hf_config(config | {"rope_scaling": {"rope_type": "axial", "factor": 4}})
    with pytest.raises(CheckpointError, match="low_freq_factor"):
        LLAMA3.args_from_hf_config(config | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
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
    assert LLAMA3.meta.args_from_params(RELEASES[flavor], shapes) == FLAVORS[flavor]
    assert LLAMA3.meta.args_from_params(RELEASES[flavor], {}) == FLAVORS[flavor]


def test_llama_3_0_has_no_scaling():
    params = {k: v for k, v in RELEASES["8B"].items() if k != "use_scaled_rope"}
    expected = replace(FLAVORS["8B"], rope_scaling=None, max_seq_len=8192)
    assert LLAMA3.meta.args_from_params(params, {}) == expected


def test_every_width_has_a_formula():
    for hidden in [*range(100, 140), 5461, 8191]:
        args = replace(FLAVORS["debug_gqa"], ffn_hidden=hidden, rope_scaling=RopeScaling())
        assert LLAMA3.meta.args_from_params(LLAMA3.meta.params(args), {}).ffn_hidden == hidden


def test_meta_cannot_say_everything():
    with pytest.raises(UnsupportedError, match="head_dim 32"):
        LLAMA3.meta.params(replace(FLAVORS["8B"], head_dim=32))
    for scaling in (RopeScaling(low_freq_factor=2.0), RopeScaling(original_max_position_embeddings=64)):
        with pytest.raises(UnsupportedError, match="params.json cannot express RoPE of type llama3"):
            LLAMA3.meta.params(replace(FLAVORS["8B"], rope_scaling=scaling))
    with pytest.raises(CheckpointError, match="n_heads"):
        LLAMA3.meta.args_from_params({"dim": 64, "n_layers": 2}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 4_000_000_000),
        ("num_hidden_layers", True),
        ("num_attention_heads", 0),
        ("hidden_size", -8),
        ("intermediate_size", 10**30),
        ("max_position_embeddings", "many"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 1e9),
        ("rope_theta", float("inf")),
        ("rope_theta", -1.0),
        ("tie_word_embeddings", "false"),
        ("rope_parameters", {"rope_type": "llama3", "factor": float("nan")}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        ("rope_parameters", [1]),
    ],
)
def test_numbers_that_no_model_has_are_refused(key, value, tmp_path):
    config = LLAMA3.hf_config(FLAVORS["debug_gqa"]) | {key: value}
    with pytest.raises(CheckpointError, match="config.json") as error:
        LLAMA3.args_from_hf_config(config)
    assert isinstance(value, dict | list) or f"{key} = {value}: " in error.value.message
    (tmp_path / "config.json").write_text(json.dumps(config))  # NaN and Infinity, as Python spells and reads them
    with pytest.raises(CheckpointError):
        read_model_info(tmp_path)


def test_null_is_the_default():
    config = LLAMA3.hf_config(FLAVORS["debug_gqa"])
    sparse = config | dict.fromkeys(("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"))
    args = LLAMA3.args_from_hf_config(sparse)
    assert (args.norm_eps, args.max_seq_len, args.tied) == (1e-6, 2048, False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 4_000_000_000}, "num_layers = 4000000000: expected a whole number from 1 to 10,000"),
        ({"dim": None}, "dim is null"),
        ({"dim": "128"}, "dim = 128: expected a whole number"),
        ({"head_dim": 15}, "must be even"),
        ({"num_kv_heads": 3}, "8 attention heads cannot share 3"),
        ({"norm_eps": float("nan")}, "norm_eps = nan"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling is not"),
        ({"rope_scaling": asdict(RopeScaling(low_freq_factor=5.0))}, "low_freq_factor is above"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_of_titan_model_json_are_looked_at(change, said, tmp_path):
    args = asdict(FLAVORS["debug_gqa"]) | change
    (tmp_path / "titan_model.json").write_text(json.dumps({"family": "llama3", "args": args}))
    with pytest.raises(CheckpointError, match="titan_model.json") as error:
        read_model_info(tmp_path)
    assert said in error.value.message


def test_meta_numbers_are_looked_at():
    for change in ({"n_layers": 10**9}, {"norm_eps": float("nan")}, {"n_heads": 0}, {"vocab_size": -2}):
        with pytest.raises(CheckpointError, match=f"{next(iter(change))} = "):
            LLAMA3.meta.args_from_params(RELEASES["8B"] | change, {})
