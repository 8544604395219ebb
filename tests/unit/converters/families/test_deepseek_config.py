"""config.json of the published DeepSeek V3, V2, Kimi K2 and Moonlight, and what is refused."""

import json
from dataclasses import replace

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config

from converters.common.errors import CheckpointError, UnsupportedError
from converters.families.model_numbers import check_args, check_blocks
from converters.families.registry import get_family, read_hf_config
from converters.families.rope import YarnRope
from converters.model.hf_fields import read_untranslated
from converters.model.model_info import ModelInfo, read_model_info, write_model_info

FAMILY = get_family("deepseek_v3")
COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}


def yarn(factor=40, fast=32, mscale=1.0):
    return {
        "beta_fast": fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": yarn(),
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "transformers_version": "4.33.1",
    "vocab_size": 129280,
}
V2_LITE = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": yarn(mscale=0.707),
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "rope_scaling": yarn(),
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
KIMI_K2 = V3 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(factor=32.0, fast=1.0),
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
PUBLISHED = {  # flavor → config, trained values (Kimi's published number counts 23,040 offsets of experts, too)
    "671B": (V3, 671_026_404_352),
    "16B": (V2_LITE, 15_706_484_224),
    "236B": (V2, 235_741_434_880),
    "Kimi-K2": (KIMI_K2, 1_026_408_232_448 - 60 * 384),
    "Moonlight-16B-A3B": (MOONLIGHT, 15_960_108_544),
}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_a_published_config(flavor):
    config, size = PUBLISHED[flavor]
    assert read_hf_config(config) == (FAMILY, FAMILY.flavors[flavor])
    assert FAMILY.num_parameters(FAMILY.flavors[flavor]) == size
    carried = read_untranslated(config, FAMILY, FAMILY.flavors[flavor], {}, carried_ids={})
    written = FAMILY.hf_config(FAMILY.flavors[flavor]) | carried
    dropped = {"architectures", "model_type", "auto_map", "torch_dtype", "transformers_version"}
    theirs = {key: value for key, value in config.items() if key not in dropped}
    for key, value in theirs.items():
        if key == "rope_scaling" and value:
            assert {"rope_type": "yarn"} | {k: v for k, v in value.items() if k in written[key]} == written[key]
        elif key != "num_nextn_predict_layers":
            assert written[key] == value, key


def test_every_output_names_what_other_readers_need():
    """vLLM and SGLang read fields that transformers' classes do not have."""
    v3, v2 = (FAMILY.hf_config(FAMILY.flavors[flavor]) for flavor in ("671B", "236B"))
    assert (v3["scoring_func"], v3["topk_method"], v3["moe_layer_freq"]) == ("sigmoid", "noaux_tc", 1)
    assert (v2["scoring_func"], v2["topk_method"], v2["moe_layer_freq"]) == ("softmax", "group_limited_greedy", 1)
    assert v3["num_nextn_predict_layers"] == 0  # whose weights are not there
    assert "num_nextn_predict_layers" not in v2
    assert FAMILY.hf_config(FAMILY.flavors["Kimi-K2"])["model_type"] == "deepseek_v3"  # transformers has no kimi_k2


@pytest.mark.parametrize(("config", "kind"), [(V3, DeepseekV3Config), (V2, DeepseekV2Config)])
def test_defaults_are_those_of_transformers(config, kind):
    needed = ("architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    sparse = {key: config[key] for key in (*needed, "vocab_size")}
    given = sparse if kind is DeepseekV3Config else sparse | {"num_experts_per_tok": 6}
    theirs = kind(**given)
    assert read_hf_config(given)[1] == read_hf_config(theirs.to_dict() | {"architectures": config["architectures"]})[1]


REFUSED = {
    "rope_interleave = False": V3 | {"rope_interleave": False},
    "attention_bias = True": V3 | {"attention_bias": True},
    "topk_method = 'greedy'": V3 | {"topk_method": "greedy"},
    "topk_method = 'noaux_tc'": V2 | {"topk_method": "noaux_tc"},
    "scoring_func = 'softmax'": V3 | {"scoring_func": "softmax"},
    "scoring_func = 'sigmoid'": V2 | {"scoring_func": "sigmoid"},
    "norm_topk_prob = True": V2 | {"norm_topk_prob": True},
    "moe_layer_freq = 2": V3 | {"moe_layer_freq": 2},
    "num_key_value_heads = 8": V3 | {"num_key_value_heads": 8},
    "index_topk = 2048": V3 | {"index_topk": 2048},
    "RoPE of type linear": V3 | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "compressed-tensors": KIMI_K2 | {"quantization_config": {"quant_method": "compressed-tensors", "bits": 4}},
    "model_type 'deepseek_v32' is not": V3
    | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_means_another_computation_is_refused(said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in REFUSED[said].items() if k != "auto_map"}))
    with pytest.raises(UnsupportedError) as error:
        read_model_info(tmp_path)
    assert said in error.value.message
    if "v32" in said:
        assert "an indexer chooses" in error.value.hint


def test_v3_needs_whole_groups():
    with pytest.raises(CheckpointError, match="n_group and topk_group are null"):
        read_hf_config(V3 | {"n_group": None})
    assert read_hf_config(V2_LITE | {"n_group": None, "topk_group": None})[1] == FAMILY.flavors["16B"]
    assert read_hf_config(V2_LITE | {"n_group": 8, "topk_group": 3})[1] == FAMILY.flavors["16B"]  # greedy: not used


def test_two_numbers_of_experts():
    assert (
        read_hf_config({k: v for k, v in V3.items() if k != "n_routed_experts"} | {"num_local_experts": 256})[1]
        == (FAMILY.flavors["671B"])
    )
    with pytest.raises(CheckpointError, match="n_routed_experts 256, num_local_experts 64"):
        read_hf_config(V3 | {"num_local_experts": 64})


WRONG = {  # numbers of "debug_v3" that cannot be → what is said
    "12 experts cannot stand in 5 groups": {"num_groups": 5, "top_groups": 2},
    "5 groups of 4 per token": {"top_groups": 5},
    "groups of 1 experts, which are rated by their 2 best": {"num_groups": 12},
    "8 experts per token, but 2 groups have only 6": {"experts_per_token": 8},
    "13 experts per token of 12": {"experts_per_token": 13, "num_groups": 1, "top_groups": 1},
    "7 rotated features of a head": {"rotary_dim": 7},
    "24 rotated features, which leave none": {"rotary_dim": 24},
    "4 dense layers, but there are only 3": {"num_dense_layers": 4},
    "a score 'relu' of experts: expected softmax or sigmoid": {"score": "relu"},
    "route_scale = 0.0: expected a number": {"route_scale": 0.0},
    "kv_rank = 0: expected a whole number": {"kv_rank": 0},
    "value_dim = 0: expected a whole number": {"value_dim": 0},
    "q_rank = -1: expected a whole number": {"q_rank": -1},
    "num_shared_experts = 0: expected a whole number": {"num_shared_experts": 0},
    "num_groups = True: expected a whole number": {"num_groups": True},
    "normalize_weights = 1: expected true or false": {"normalize_weights": 1},
}


@pytest.mark.parametrize("said", WRONG)
def test_numbers_that_cannot_be(said, tmp_path):
    args = replace(FAMILY.flavors["debug_v3"], **WRONG[said])
    with pytest.raises(CheckpointError) as error:
        check_args(args, what="the model")
        check_blocks(FAMILY, args, what="the model")
    assert said in error.value.message
    write_model_info(tmp_path, ModelInfo(FAMILY.name, args))
    with pytest.raises(CheckpointError) as error:
        read_model_info(tmp_path)
    assert said in error.value.message


def test_v2_weighs_without_normalizing():
    """No class of transformers computes softmax scores that are normalized in this attention."""
    args = replace(FAMILY.flavors["debug_v2"], normalize_weights=True)
    with pytest.raises(CheckpointError, match="softmax scores whose weights are normalized"):
        check_blocks(FAMILY, args, what="the model")


@pytest.mark.parametrize("flavor", FAMILY.flavors)
def test_titan_model_json_there_and_back(flavor, tmp_path):
    info = ModelInfo(FAMILY.name, replace(FAMILY.flavors[flavor], rope_scaling=YarnRope(3.0, 17, truncate=False)))
    write_model_info(tmp_path, info)
    assert json.loads((tmp_path / "titan_model.json").read_text())["args"]["kv_rank"] in (32, 512)
    assert read_model_info(tmp_path).args == info.args
