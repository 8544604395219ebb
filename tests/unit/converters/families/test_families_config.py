"""config.json ⇄ numbers ⇄ params.json for every family, whatever the numbers; transformers reads what is written."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from converters.common.errors import CheckpointError, UnsupportedError
from converters.families.deepseek_config import DEEPSEEK_V2_FIELDS, DEEPSEEK_V3_FIELDS
from converters.families.gpt_oss_config import GPT_OSS_FIELDS
from converters.families.hf_config import USUAL_FIELDS
from converters.families.llama4_config import LLAMA4_FIELDS
from converters.families.model_numbers import check_args, check_blocks
from converters.families.qwen3 import QWEN3_FIELDS, QWEN3_MOE_FIELDS
from converters.families.registry import get_family, read_hf_config, read_meta_params
from converters.families.rope import RopeScaling, YarnRope
from converters.model.model_info import ModelInfo, read_model_info, write_hf_config, write_meta_params, write_model_info

FAMILIES = ("llama2", "llama3", "qwen3", "deepseek_v3")
THETAS = (10000.0, 500000.0, 1e6, 5e6, 12345.5)


@st.composite
def models(draw, family: str | None = None, like_meta: bool = False) -> ModelInfo:
    """A family and numbers that it claims; `like_meta`: only such as Meta's code can build."""
    family = family or draw(st.sampled_from(FAMILIES))
    kv_heads, head_dim = draw(st.integers(1, 8)), 2 * draw(st.integers(1, 64))
    heads = kv_heads * draw(st.integers(1, 8))
    dim = heads * head_dim if like_meta else heads * draw(st.integers(1, 128))
    scaling = None
    if family != "llama2" and draw(st.booleans()):
        low, original = (1.0, 8192) if like_meta else (draw(st.floats(0.5, 2)), draw(st.integers(1, 2**20)))
        scaling = RopeScaling(draw(st.floats(1, 64)), low, low + draw(st.floats(0.5, 8)), original)
    args = get_family(family).args_type(
        dim=dim,
        num_layers=draw(st.integers(1, 200)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden=draw(st.integers(max(1, dim // 2), 8 * dim)),
        vocab_size=draw(st.sampled_from((97, 2048, 32000, 32016, 128256, 151936))),
        norm_eps=draw(st.sampled_from((1e-5, 1e-6))),
        rope_theta=draw(st.sampled_from(THETAS)),
        rope_scaling=scaling,
        max_seq_len=draw(st.integers(1, 2**20)),
        tied=draw(st.booleans()),
    )
    if family == "qwen3" and draw(st.booleans()):
        num = draw(st.integers(1, 512))
        args = replace(
            args,
            num_experts=num,
            experts_per_token=draw(st.integers(1, num)),
            expert_hidden=draw(st.integers(1, 4096)),
            normalize_weights=draw(st.booleans()),
            sparse_step=draw(st.integers(1, 5)),
            dense_layers=tuple(sorted(draw(st.sets(st.integers(0, args.num_layers - 1), max_size=5)))),
        )
    if family == "deepseek_v3":
        num_groups, in_group = draw(st.integers(1, 8)), draw(st.integers(2, 32))
        top_groups, is_v3 = draw(st.integers(1, num_groups)), draw(st.booleans())
        if num_groups == 1 or not is_v3:
            in_group = draw(st.integers(1, 64))
        rotary_dim, plain_dim = 2 * draw(st.integers(1, 32)), 2 * draw(st.integers(1, 64))
        yarn = YarnRope(draw(st.floats(1, 64)), draw(st.integers(1, 2**20)), mscale=0.5, mscale_all_dim=0.7)
        args = replace(
            args,
            dim=heads * draw(st.integers(1, 128)),  # which the class of V2 wants
            num_kv_heads=heads,
            head_dim=plain_dim + rotary_dim,
            rope_scaling=draw(st.sampled_from((None, yarn))),
            q_rank=draw(st.integers(0, 2048)),
            kv_rank=draw(st.integers(1, 1024)),
            rotary_dim=rotary_dim,
            value_dim=draw(st.integers(1, 256)),
            num_dense_layers=draw(st.integers(0, args.num_layers)),
            num_experts=num_groups * in_group,
            experts_per_token=draw(st.integers(1, top_groups * in_group)),
            expert_hidden=draw(st.integers(1, 4096)),
            num_shared_experts=draw(st.integers(1, 4)),
            score="sigmoid" if is_v3 else "softmax",
            normalize_weights=is_v3 and draw(st.booleans()),
            route_scale=draw(st.floats(0.1, 20)),
            num_groups=num_groups,
            top_groups=top_groups,
        )
        check_blocks(get_family(family), args, what="the test's model")
    if not get_family(family).claims(args):  # made so that it does
        args = (
            replace(args, rope_theta=10000.0) if family == "llama2" else replace(args, rope_theta=5e5, vocab_size=999)
        )
    check_args(args, what="the test's model")
    return ModelInfo(family, args)


@settings(max_examples=200, deadline=None)
@given(models())
def test_config_json_there_and_back(info):
    """As written, and as either version of transformers alone spells it."""
    config = json.loads(json.dumps(get_family(info.family).hf_config(info.args)))
    for left_out in ((), ("rope_parameters",), ("rope_theta", "rope_scaling")):
        spelled = {key: value for key, value in config.items() if key not in left_out}
        family, args = read_hf_config(spelled)
        assert (family.name, args) == (info.family, info.args), left_out


@settings(max_examples=60, deadline=None)
@given(models())
def test_transformers_says_the_same_numbers(tmp_path_factory, info):
    """What its config class makes of our file, saved by itself, is the same model."""
    folder = tmp_path_factory.mktemp("config")
    write_hf_config(folder, info, dtype="bfloat16")
    theirs = AutoConfig.from_pretrained(folder)
    kinds = {"qwen3": Qwen3MoeConfig if getattr(info.args, "num_experts", 0) else Qwen3Config}
    if info.family == "deepseek_v3":
        kinds["deepseek_v3"] = DeepseekV3Config if info.args.score == "sigmoid" else DeepseekV2Config
    assert type(theirs) is kinds.get(info.family, LlamaConfig)
    assert str(theirs.dtype) == "torch.bfloat16"
    theirs.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert "rope_scaling" not in written and "torch_dtype" not in written  # version 5's spelling alone
    family, args = read_hf_config(written | {"architectures": list(get_family(info.family).hf_architectures)})
    assert (family.name, args) == (info.family, info.args)


@settings(max_examples=200, deadline=None)
@given(models(family="llama2", like_meta=True) | models(family="llama3", like_meta=True))
def test_params_json_there_and_back(info):
    """With the weights' shapes; what params.json cannot say is the length, for which titan_model.json goes along."""
    family = get_family(info.family)
    params = json.loads(json.dumps(family.meta.params(info.args)))
    shapes = {p.fqn: p.shape for p in family.parameters(info.args)}
    found, args = read_meta_params(params, shapes)
    expected = replace(info.args, max_seq_len=args.max_seq_len)
    if (expected.dim, expected.num_layers) in ((2048, 16), (3072, 28)):
        expected = replace(expected, tied=args.tied)
    assert (found.name, args) == (info.family, expected)
    again = json.loads(json.dumps(found.meta.params(args)))
    assert read_meta_params(again, {})[1].ffn_hidden == info.args.ffn_hidden  # Meta's code sees no shapes


@settings(max_examples=50, deadline=None)
@given(models(family="llama2", like_meta=True) | models(family="llama3", like_meta=True))
def test_every_file_says_the_same_model(tmp_path_factory, info):
    """titan_model.json, config.json and Meta's folder, one from the other around the circle."""
    folder = tmp_path_factory.mktemp("circle")
    for place in ("titan", "hf", "meta"):
        (folder / place).mkdir()
    write_model_info(folder / "titan", info)
    write_hf_config(folder / "hf", read_model_info(folder / "titan"), dtype="float32")
    write_meta_params(folder / "meta", read_model_info(folder / "hf"))
    write_model_info(folder / "meta", read_model_info(folder / "hf"))
    assert read_model_info(folder / "meta") == read_model_info(folder / "hf") == info


@pytest.mark.parametrize("name", FAMILIES)
def test_flavors_are_claimed_by_their_family(name):
    for args in get_family(name).flavors.values():
        check_args(args, what=name)
        assert read_hf_config(get_family(name).hf_config(args)) == (get_family(name), args)


# Llama 2


def test_params_json_of_the_llama2_releases():
    llama2, shapes = get_family("llama2"), {"tok_embeddings.weight": (32000, 4096), "output.weight": (32000, 4096)}
    released = {  # as Meta ships them: the vocabulary is the tokenizer's, theta goes without saying
        "7B": {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-5, "vocab_size": -1},
        "13B": {"dim": 5120, "multiple_of": 256, "n_heads": 40, "n_layers": 40, "norm_eps": 1e-5, "vocab_size": -1},
        "70B": {
            "dim": 8192,
            "multiple_of": 4096,
            "ffn_dim_multiplier": 1.3,
            "n_heads": 64,
            "n_kv_heads": 8,
            "n_layers": 80,
            "norm_eps": 1e-5,
            "vocab_size": -1,
        },
    }
    for flavor, params in released.items():
        assert read_meta_params(params, shapes) == (llama2, llama2.flavors[flavor])
        # Meta's code for Llama 2 calls ModelArgs(max_seq_len=…, max_batch_size=…, **params), which knows these alone
        known = {
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "vocab_size",
            "multiple_of",
            "ffn_dim_multiplier",
            "norm_eps",
        }
        written = llama2.meta.params(llama2.flavors[flavor])
        assert written.keys() <= known
        assert {key: written[key] for key in params} == params | {"vocab_size": 32000}
        assert read_meta_params(written, {}) == (llama2, llama2.flavors[flavor])
    chat = released["7B"] | {"norm_eps": 1e-6}
    assert read_meta_params(chat, shapes)[1].norm_eps == 1e-6


def test_code_llama_is_a_llama2_by_its_vocabulary():
    params = {"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256, "norm_eps": 1e-5, "vocab_size": 32016}
    family, args = read_meta_params(params | {"rope_theta": 1e6}, {})
    assert (family.name, args.rope_theta, args.ffn_hidden) == ("llama2", 1e6, 11008)
    assert family.meta.params(args)["rope_theta"] == 1e6


def test_llama2_has_no_scaling_in_params_json():
    args = replace(get_family("llama2").flavors["7B"], rope_scaling=RopeScaling())
    with pytest.raises(UnsupportedError, match="Llama 2 cannot express RoPE of type llama3"):
        get_family("llama2").meta.params(args)


def test_an_unknown_vocabulary_is_an_error(tmp_path):
    (tmp_path / "params.json").write_text('{"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": -1}')
    with pytest.raises(CheckpointError, match="vocab_size = 0"):
        read_model_info(tmp_path)


# Qwen 3

# Qwen3-8B's own file, in the spelling of transformers 4
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_released_qwen3():
    assert read_hf_config(QWEN3_8B) == (get_family("qwen3"), get_family("qwen3").flavors["8B"])
    assert read_hf_config(QWEN3_8B | {"rope_theta": 5000000})[1].rope_theta == 5e6  # the 2507 variants


def test_qwen3_defaults_are_those_of_transformers():
    output = (
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    )
    sparse = {key: QWEN3_8B[key] for key in output}
    args, theirs = read_hf_config(sparse)[1], Qwen3Config(**sparse)
    assert (args.num_kv_heads, args.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (args.max_seq_len, args.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (args.rope_theta, args.tied) == (theirs.rope_parameters["rope_theta"], theirs.tie_word_embeddings)
    assert set(theirs.layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    "named",
    [
        {"architectures": None},
        {"architectures": []},
        {"model_type": None},
        {"architectures": ["Qwen3Model"]},  # its weights lack the output, which a tied model does not need
        {"architectures": ["Qwen3ForCausalLM", "MyOwnHead"]},  # AutoModelForCausalLM goes by model_type
    ],
)
def test_the_class_is_chosen_as_transformers_chooses_it(named):
    assert read_hf_config(QWEN3_8B | named) == (get_family("qwen3"), get_family("qwen3").flavors["8B"])


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"model_type": "llama"}, "architectures ['Qwen3ForCausalLM'] and model_type 'llama', which are of different"),
        ({"model_type": "mistral"}, "['Qwen3ForCausalLM'] and model_type 'mistral', which are of different models"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "['Qwen3ForSequenceClassification']"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "'mistral', which no family supports"),
        ({"architectures": None, "model_type": "qwen2"}, "architectures [] and model_type 'qwen2', which no family"),
        ({"architectures": None, "model_type": None}, "architectures [], which no family supports"),
        ({"architectures": ["Qwen3ForCausalLM", "Other"], "model_type": None}, "['Qwen3ForCausalLM', 'Other']"),
    ],
)
def test_a_class_that_is_not_read_is_named(named, said):
    with pytest.raises(UnsupportedError) as error:
        read_hf_config(QWEN3_8B | named)
    assert said in error.value.message
    assert "Qwen3ForCausalLM (qwen3)" in error.value.hint


def test_a_file_that_means_two_models_lists_both():
    """transformers 4 does not look into rope_parameters, transformers 5 prefers them to rope_theta."""
    both = QWEN3_8B | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}}
    with pytest.raises(UnsupportedError) as error:
        read_hf_config(both)
    for said in (
        "transformers 4: type default, theta 1,000,000",
        "transformers 5: type linear, theta 5,000, factor 4.0",
        "rope_theta = 1000000",
        "rope_parameters = {",
    ):
        assert said in error.value.message
    assert read_hf_config(both | {"transformers_version": "5.2.0"})[1].rope_theta == 5e3  # it says for which it is
    own = {key: value for key, value in both.items() if key not in ("rope_theta", "rope_scaling")}
    assert read_hf_config(own)[1].rope_theta == 5e3  # so does its spelling
    agreeing = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    assert read_hf_config(QWEN3_8B | agreeing)[1].rope_theta == 1e6


REFUSED = {
    "is_causal = False": {"is_causal": False},
    "hidden_act = 'gelu'": {"hidden_act": "gelu"},
    "'longrope'": {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}},
    "'proportional'": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6}},
    "RoPE parameters of full_attention": {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
    "per_layer_config": {"per_layer_config": {"0": {"intermediate_size": 64}}},
    "layer_types = ": {"layer_types": ["full_attention"]},
    "partial_rotary_factor = 0.5": {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "from layer 28 on": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
    "layer_types: sliding_attention": {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_means_another_computation_is_refused(said):
    with pytest.raises(UnsupportedError, match="Qwen 3 variant") as error:
        read_hf_config(QWEN3_8B | REFUSED[said])
    assert said in error.value.message


def test_all_that_is_refused_is_listed_at_once(tmp_path):
    output = REFUSED["'longrope'"] | REFUSED["is_causal = False"] | REFUSED["from layer 28 on"]
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | output))
    with pytest.raises(UnsupportedError) as error:
        read_model_info(tmp_path)
    assert all(
        said in error.value.message for said in ("'longrope'", "is_causal = False", "use_sliding_window", str(tmp_path))
    )


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * 36},
        {"attention_bias": None, "rope_parameters": None},
    ],
)
def test_a_window_that_no_layer_uses_is_harmless(harmless):
    assert read_hf_config(QWEN3_8B | harmless)[1] == get_family("qwen3").flavors["8B"]
    if None not in harmless.values():  # transformers agrees that every layer sees all
        assert set(Qwen3Config(**QWEN3_8B | harmless).layer_types) == {"full_attention"}


def test_what_we_write_of_a_qwen3_has_no_window():
    theirs = Qwen3Config(**get_family("qwen3").hf_config(get_family("qwen3").flavors["4B"]))
    assert set(theirs.layer_types) == {"full_attention"} and theirs.sliding_window is None
    assert theirs.tie_word_embeddings and theirs.head_dim == 128


@pytest.mark.parametrize(
    ("config_class", "listed"),
    [
        (LlamaConfig, USUAL_FIELDS),
        (Qwen3Config, QWEN3_FIELDS),
        (Qwen3MoeConfig, QWEN3_MOE_FIELDS),
        (DeepseekV3Config, DEEPSEEK_V3_FIELDS),
        (DeepseekV2Config, DEEPSEEK_V2_FIELDS),
        (GptOssConfig, GPT_OSS_FIELDS),
        (Llama4TextConfig, LLAMA4_FIELDS),
    ],
)
def test_every_field_of_the_class_is_classified(config_class, listed):
    """Two classes read more without listing them: Qwen3MoeConfig num_experts' name in files, and both head_dim."""
    unlisted = {Qwen3MoeConfig: {"num_local_experts", "head_dim"}, DeepseekV3Config: {"head_dim"}}.get(
        config_class, set()
    )
    assert {f.name for f in fields(config_class)} == listed.keys() - unlisted
