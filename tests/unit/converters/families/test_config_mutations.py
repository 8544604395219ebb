"""Every field of transformers' config classes, changed one by one and in pairs: transformers' logits, or an error.

transformers makes and loads each model from the changed config.json; the same folder goes through titan's reader and
model. Field lists come from the classes themselves.
"""

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from converters.common.errors import TitanError
from converters.families.deepseek_config import DEEPSEEK_V2_FIELDS, DEEPSEEK_V3_FIELDS
from converters.families.gpt_oss_config import GPT_OSS_FIELDS
from converters.families.hf_config import USUAL_FIELDS
from converters.families.llama4_config import LLAMA4_FIELDS
from converters.families.qwen3 import QWEN3_FIELDS, QWEN3_MOE_FIELDS
from converters.source.weights import open_native
from tests.models import gpt_oss
from tests.models.deepseek import native_logits
from titan_tools.infer.model.load import load_model

CLASSES = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v2": DeepseekV2Config,
    "gpt_oss": GptOssConfig,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
NUM_TOKENS = 40
ABSENT = "<absent>"  # a file without the key
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {key: value for key, value in BASE.items() if key != "head_dim"} | {
    "moe_intermediate_size": 12,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
BASES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen3": BASE,
    "deepseek_v3": _LATENT,
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy"},
    "gpt_oss": BASE | {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES = {  # each as the rope_parameters of version 5 (theta inside) and the rope_scaling of version 4
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, whole number": {"rope_type": "linear", "factor": 3},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, odd factor": {"rope_type": "dynamic", "factor": 1.1},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, betas": YARN | {"beta_fast": 8.0, "beta_slow": 2},
    "yarn, attention factor": YARN | {"attention_factor": 0.7},
    "yarn, mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 1.3},
    "yarn, one mscale": YARN | {"mscale": 0.8},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, its length the model's": {"rope_type": "yarn", "factor": 4.0},
    "old key": {"type": "linear", "factor": 4.0},
}
COVERED = ("default", "yarn")  # types of latent attention
REFUSED_ROPES = {
    **{f"type {kind}": {"rope_type": kind, "factor": 2.0} for kind in (*ROPE_INIT_FUNCTIONS, "axial", "su", None, 5)},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0},
    "proportional": {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.5},
    "no type": {"factor": 4.0},
    "both keys": {"type": "linear", "rope_type": "dynamic", "factor": 4.0},
    "no factor": {"rope_type": "linear"},
    "a factor in quotes": {"rope_type": "linear", "factor": "4.0"},
    "yarn, null factor": YARN | {"factor": None},
    "yarn, null truncate": YARN | {"truncate": None},
    "yarn, null length": YARN | {"original_max_position_embeddings": None},
    "yarn, zero betas": YARN | {"beta_fast": 0, "beta_slow": 0},
    "yarn, length in the other place": {"rope_type": "yarn", "factor": 2.0},
    "llama3 without a length": {key: LLAMA3[key] for key in list(LLAMA3)[:4]},
    "half of the head": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "half of the head, default": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "nested": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}},
    "a key of its own": {"rope_type": "linear", "factor": 4.0, "colour": "blue"},
    "empty": {},
    "a list": [1.0],
}
# Of keys that no field of the classes is: transformers looks for some of them all the same
OTHER_KEYS: dict[str, list[Any]] = {
    "rope_theta": [5e3, 1000000, None, "10000"],
    "partial_rotary_factor": [1.0, 0.5],
    "original_max_position_embeddings": [16, None],
    "is_causal": [True, False],
    "is_decoder": [True],
    "add_cross_attention": [True],
    "attention_chunk_size": [8],
    "quantization_config": [None, {"quant_method": "fp8"}],
    "per_layer_config": [None, {"0": {"intermediate_size": 16}}],
    "pruned_heads": [{}, {"0": [1]}],
    "text_config": [{"vocab_size": 8}],
    "torch_dtype": ["bfloat16"],
    "torchscript": [True],
    "output_attentions": [True],
    "attn_implementation": ["eager", "sdpa"],
    "gradient_checkpointing": [True],
    "num_labels": [3],
    "mlp_bias": [True],
    "num_experts": [4],
    "sliding_window": [8],
    "kv_sharing_modes": [["reuse"] * 2],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2],
    "tie_encoder_decoder": [True],
    "temperature": [0.5],
    "scoring_func": ["sigmoid", "softmax"],
    "moe_layer_freq": [1, 2],
    "index_topk": [8],
    "num_local_experts": [6],
    "experts_per_token": [3, 2],
    "initial_context_length": [16, 4096],
    "swiglu_alpha": [1.702, 1.0],
    "num_nextn_predict_layers": [0, 1],
    "my_own_key": ["kept"],
}
SPECIAL: dict[str, list[Any]] = {
    "hidden_act": [*ACT2FN, None, "no_such"],
    "architectures": [None, [], ["LlamaModel"], ["Qwen2ForCausalLM"], "LlamaForCausalLM"],
    "transformers_version": ["4.57.1", "5.2.0", "dev"],
    "dtype": ["float32", "bfloat16", "float16"],
    "problem_type": ["regression"],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0}],
    "eos_token_id": [0, [1, 2], None],
    "layer_types": [
        ["full_attention"] * 2,
        ["attention"] * 2,
        ["full_attention", "sliding_attention"],
        ["sliding_attention", "full_attention"],
        ["full_attention"] * 3,
        ["chunked_attention"] * 2,
        ["linear_attention"] * 2,
        "full_attention",
    ],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", None],
    "rope_parameters": [
        None,
        *({"rope_theta": 5e3} | rope for rope in (ROPES | REFUSED_ROPES).values() if isinstance(rope, dict)),
        [1.0],
    ],
}
BY_TYPE: dict[str, list[Any]] = {
    "float": [0.25, 1e-3, 1, None, "0.1"],
    "bool": [True, False, 1, "true", None],
    "int": [1, 2, 3, 4, 6, 16, 33, None, "4", True, 8.0],
}


def changes(name: str) -> dict[str, dict[str, Any]]:
    """What to put into config.json, by a name that says it."""
    found = {}
    for f in fields(CLASSES[name]):
        kind = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        kinds = [values for word, values in BY_TYPE.items() if word in kind.replace("interval", "")]
        for value in SPECIAL.get(f.name) or (kinds[0] if kinds else [None]):
            found[f"{f.name} = {value!r}"] = {f.name: value}
    for key, values in OTHER_KEYS.items():
        found |= {f"{key} = {value!r}": {key: value} for value in values}
    for said, rope in (ROPES | REFUSED_ROPES).items():
        found[f"rope_scaling: {said}"] = {"rope_scaling": rope, "rope_theta": 5e3}
        both = {"rope_parameters": {"rope_theta": 3e3, "rope_type": "default"}, "rope_scaling": rope}
        found[f"rope_scaling beside rope_parameters: {said}"] = both
        found[f"rope_scaling with a theta: {said}"] = (
            {"rope_scaling": rope | {"rope_theta": 3e3}} if isinstance(rope, dict) else {"rope_scaling": rope}
        )
        for version in ("4.57.1", "5.2.0"):
            two = {"rope_parameters": rope, "rope_theta": 3e3, "transformers_version": version}
            found[f"rope_parameters, theta outside, {version}: {said}"] = two
    if name == "qwen3":
        for window in ({"max_window_layers": 1}, {"max_window_layers": 2}, {"sliding_window": None}):
            window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0} | window
            found[f"a window: {window}"] = window
    found["another model's type"] = {"model_type": "mistral"}
    found |= {f"no {key}": {key: ABSENT} for key in ("architectures", "model_type", *BASES[name])}
    return found


def accepted(name: str) -> list[str]:
    """Changes that must be read: all that titan's model computes."""
    if name.startswith("deepseek"):
        return _accepted_latent(name)
    if name == "gpt_oss":
        return _ACCEPTED_GPT_OSS
    must = [f"rope_scaling: {said}" for said in ROPES]
    must += [f"rope_scaling beside rope_parameters: {said}" for said in ROPES]
    must += [f"rope_parameters = { ({'rope_theta': 5e3} | rope)!r}" for rope in ROPES.values()]
    must += [f"rope_parameters, theta outside, 5.2.0: {said}" for said in ROPES]
    must += ["rms_norm_eps = 0.25", "rms_norm_eps = 0.001", "rope_theta = 5000.0", "rope_theta = 1000000"]
    must += ["attention_bias = True", "tie_word_embeddings = True", "hidden_act = 'swish'", "no architectures"]
    must += ["head_dim = 2", "head_dim = 4", "head_dim = 6", "head_dim = 16"]
    must += ["num_key_value_heads = 1", "num_key_value_heads = 4", "num_key_value_heads = None"]
    must += ["attention_dropout = 0.25", "initializer_range = 0.25", "use_cache = False", "my_own_key = 'kept'"]
    must += ["vocab_size = 33", "intermediate_size = 33", "num_hidden_layers = 3", "hidden_size = 16", "no model_type"]
    must += ["output_hidden_states = True", "chunk_size_feed_forward = 3", "pad_token_id = 3"]
    must += ["dtype = 'bfloat16'", "torch_dtype = 'bfloat16'", "temperature = 0.5", "num_experts = 4"]
    must += ["partial_rotary_factor = 1.0", "is_causal = True", "quantization_config = None", "is_decoder = True"]
    must += [
        "bos_token_id = 3",
        "eos_token_id = [1, 2]",
        "problem_type = 'regression'",
        "attn_implementation = 'eager'",
    ]
    if name == "llama":
        must += ["mlp_bias = True", "pretraining_tp = 4", "head_dim = None", "no num_key_value_heads"]
    else:
        must += ["layer_types = ['full_attention', 'full_attention']", "max_window_layers = 1", "sliding_window = 16"]
        must += ["mlp_bias = True"]  # no field of this class, so it has no effect
    return must


_ACCEPTED_GPT_OSS = [
    *(f"rope_scaling: {said}" for said in ROPES),
    *(f"rope_parameters = { ({'rope_theta': 5e3} | rope)!r}" for rope in ROPES.values()),
    *(f"rope_parameters, theta outside, 5.2.0: {said}" for said in ROPES),
    *(f"rope_scaling beside rope_parameters: {said}" for said in ROPES),
    *("rms_norm_eps = 0.25", "rope_theta = 5000.0", "tie_word_embeddings = True", "hidden_act = 'swish'"),
    *("num_local_experts = 16", "num_experts_per_tok = 1", "num_experts_per_tok = 6", "experts_per_token = 3"),
    *("swiglu_limit = 0.25", "swiglu_alpha = 1.702", "initial_context_length = 4096", "sliding_window = 3"),
    *("attention_bias = False", "layer_types = ['full_attention', 'full_attention']"),
    *("layer_types = ['full_attention', 'sliding_attention']", "num_hidden_layers = 3", "vocab_size = 33"),
    *("intermediate_size = 33", "head_dim = 16", "num_key_value_heads = 1", "router_aux_loss_coef = 0.25"),
    *("no num_local_experts", "no num_experts_per_tok", "no sliding_window", "no head_dim", "no rms_norm_eps"),
    *("no architectures", "no model_type", "my_own_key = 'kept'", "output_router_logits = True"),
]


def _accepted_latent(name: str) -> list[str]:
    ropes = {
        said: rope for said, rope in ROPES.items() if rope["rope_type" if said != "old key" else "type"] in COVERED
    }
    must = [f"rope_scaling: {said}" for said in ropes]
    must += [f"rope_parameters = { ({'rope_theta': 5e3} | rope)!r}" for rope in ropes.values()]
    must += ["rms_norm_eps = 0.25", "rope_theta = 5000.0", "tie_word_embeddings = True", "hidden_act = 'swish'"]
    must += ["q_lora_rank = None", "q_lora_rank = 3", "kv_lora_rank = 6", "v_head_dim = 3", "qk_nope_head_dim = 16"]
    must += ["qk_rope_head_dim = 2", "qk_rope_head_dim = 16", "n_shared_experts = 3", "moe_intermediate_size = 33"]
    must += ["first_k_dense_replace = 2", "num_experts_per_tok = 1", "num_experts_per_tok = 6", "topk_group = 1"]
    must += ["n_group = 2", "n_group = 6", "n_group = 3", "routed_scaling_factor = 0.25", "n_routed_experts = 16"]
    must += ["num_hidden_layers = 3", "vocab_size = 33", "num_key_value_heads = None", "no num_key_value_heads"]
    must += ["my_own_key = 'kept'", "no q_lora_rank", "no kv_lora_rank", "no architectures", "no model_type"]
    must += ["moe_layer_freq = 1", "scoring_func = " + ("'softmax'" if name.endswith("v2") else "'sigmoid'")]
    if name == "deepseek_v2":
        return [*must, "topk_method = 'greedy'", "n_group = 4", "no topk_method", "norm_topk_prob = False"]
    return [*must, "norm_topk_prob = False", "rope_interleave = True", "num_mtp_layers = 3", "pretraining_tp = 4"]


def write(folder: Path, name: str, change: dict[str, Any]) -> None:
    """config.json with the change, and the weights of the model that transformers makes of it."""
    folder.mkdir()
    content = {"architectures": [ARCHITECTURES[name]], "model_type": name} | BASES[name] | change
    content = {key: value for key, value in content.items() if value != ABSENT}
    (folder / "config.json").write_text(json.dumps(content))
    config_class = CLASSES[name] if content.get("model_type") is None else AutoConfig
    config = config_class.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                is_norm = parameter.ndim == 1
                parameter.copy_(torch.randn_like(parameter) * (0.2 if is_norm else 0.4) + is_norm)
            for fqn, buffer in model.named_buffers():
                if fqn.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.1)
    tensors = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits_of_transformers(folder: Path, name: str, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    auto = AutoModelForCausalLM
    if "model_type" not in json.loads((folder / "config.json").read_text()):
        auto = auto._model_mapping[CLASSES[name]]
    # of experts: grouped products need aligned sizes, and do not take float64
    experts = {"experts_implementation": "eager"} if name.startswith(("deepseek", "gpt_oss")) else {}
    model = auto.from_pretrained(folder, dtype=dtype, **experts).eval()
    with torch.no_grad():  # the last token as decoding computes it: some keys change the cache alone
        if tokens.shape[1] == 1:
            return model(tokens, return_dict=True).logits[0]
        prefill = model(tokens[:, :-1], return_dict=True, use_cache=True)
        last = model(tokens[:, -1:], past_key_values=prefill.past_key_values, return_dict=True, use_cache=True)
    return torch.cat([prefill.logits[0], last.logits[0]])


def logits_of_titan(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    with open_native(folder) as weights:
        if weights.info.family == "deepseek_v3":  # its numbers and native weights in the papers' formulas
            arrays = {fqn: weights.read(fqn) for fqn in weights.tensors}
            return native_logits(arrays, tokens[0], weights.info.args).float()
        if weights.info.family == "gpt_oss":
            arrays = {fqn: weights.read(fqn) for fqn in weights.tensors}
            return gpt_oss.native_logits(arrays, tokens[0], weights.info.args).float()
        device = torch.device("cpu")
        model = load_model(weights.source, weights.info, dtype=torch.float32, device=device, fused=False, packed=False)
        with torch.no_grad():
            return model.head(model.body(tokens))[0]


def outcome(folder: Path, name: str, change: dict[str, Any]) -> str:
    """ "same", "refused", "not transformers" where it fails itself, or what is wrong."""
    vocab_size = change.get("vocab_size")
    vocab_size = vocab_size if type(vocab_size) is int else BASES[name]["vocab_size"]
    longest = change.get("max_position_embeddings")  # titan infer takes no more, and titan train none of type dynamic
    num_tokens = max(1, min(NUM_TOKENS, longest)) if type(longest) is int else NUM_TOKENS
    generator = torch.Generator().manual_seed(1)
    try:
        write(folder, name, change)
        tokens = torch.randint(vocab_size, (1, num_tokens), generator=generator)
        theirs = logits_of_transformers(folder, name, tokens, torch.float32)
        exact = logits_of_transformers(folder, name, tokens, torch.float64)
    except Exception as error:  # whatever transformers raises: there is nothing to compare with
        theirs, why = None, error
    try:
        ours = logits_of_titan(folder, tokens if theirs is not None else torch.zeros(1, 1, dtype=torch.int64))
    except TitanError as error:
        return f"refused{'' if theirs is not None else ' by both'}: {error.message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if theirs is None:
        return f"not transformers: {why}"
    allowed = max(1e-5 * theirs.abs().max(), 4 * (theirs - exact).abs().max())
    off = (ours - theirs).abs().max()
    return "same" if off <= allowed else f"logits differ by {off:.3g}, allowed {allowed:.3g}"


def check(tmp_path: Path, name: str, chosen: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Outcomes. Fails where one is wrong, or where what must be accepted is not."""
    outcomes = {said: outcome(tmp_path / str(n), name, change) for n, (said, change) in enumerate(chosen.items())}
    fine = ("same", "refused", "not transformers")
    wrong = {said: how for said, how in outcomes.items() if not how.startswith(fine)}
    assert not wrong, wrong
    return outcomes


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


@pytest.mark.parametrize("name", CLASSES)
def test_what_must_be_accepted(name, tmp_path):
    """A fixed eighth of it; all of it is in the slow set."""
    every = changes(name)
    chosen = {said: every[said] for said in accepted(name)[::8]}
    assert set(check(tmp_path, name, chosen).values()) == {"same"}


@pytest.mark.parametrize("name", CLASSES)
def test_a_sample_of_changes(name, tmp_path):
    every = changes(name)
    chosen = random.Random(7).sample(sorted(every), 12)
    check(tmp_path, name, {said: every[said] for said in chosen})


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_change(name, tmp_path):
    outcomes = check(tmp_path, name, changes(name))
    assert {said: outcomes[said] for said in accepted(name) if outcomes[said] != "same"} == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CLASSES)
def test_pairs_of_changes(name, tmp_path):
    every, draw = changes(name), random.Random(11)
    pairs = {
        f"{one} and {two}": every[one] | every[two] for one, two in (draw.sample(sorted(every), 2) for _ in range(600))
    }
    check(tmp_path, name, pairs)
