"""Weights that transformers' base classes save: names without `model.`, and no output of their own."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from converters.common.errors import CheckpointError
from converters.inspect import inspect_checkpoint
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "deepseek": DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **EXPERTS, **LATENT, **GROUPS),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def save(folder, name, *, tied: bool):
    """The base model alone; the whole model."""
    config = CONFIGS[name].__class__(**{**CONFIGS[name].to_dict(), "tie_word_embeddings": tied})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.model.save_pretrained(folder / "base")
    model.save_pretrained(folder / "whole")
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_tied_base_model_is_complete(name, tmp_path):
    model = save(tmp_path, name, tied=True)
    convert(tmp_path / "base", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    tokens = torch.arange(20).view(1, -1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert inspect_checkpoint(tmp_path / "base").naming == "hf" and verify(tmp_path / "base").ok
    # embedding models are published so, under the class of the whole model
    config = json.loads((tmp_path / "base/config.json").read_text())
    whole = {"architectures": [config["architectures"][0].replace("Model", "ForCausalLM")]}
    (tmp_path / "base/config.json").write_text(json.dumps(config | whole))
    open_native(tmp_path / "base").reader.__exit__(None)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_base_model_without_an_output_is_named_as_such(name, tmp_path):
    save(tmp_path, name, tied=False)
    with pytest.raises(CheckpointError, match=r"there is no output weight \(lm_head.weight\)") as error:
        convert(tmp_path / "base", tmp_path / "dcp", to="dcp")
    assert "\n" not in error.value.message
    report = convert(tmp_path / "base", tmp_path / "dcp", to="dcp", allow_missing=True)
    assert report.missing == ("lm_head.weight",)
    convert(tmp_path / "whole", tmp_path / "expected", to="dcp")
    manifests = [json.loads((tmp_path / part / "titan_manifest.json").read_text()) for part in ("dcp", "expected")]
    tensors, expected = (manifest["tensors"] for manifest in manifests)
    del expected["output.weight"]
    assert tensors == expected


def test_a_base_model_in_a_wrapper(tmp_path):
    model = save(tmp_path, "llama", tied=True)
    state = {f"encoder.{name}": tensor for name, tensor in model.model.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    with open_native(tmp_path / "weights.pt", model_from=tmp_path / "base") as weights:
        assert torch.equal(torch.from_numpy(weights.read("norm.weight")), model.model.norm.weight)
