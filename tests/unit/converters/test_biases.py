"""Models with biases through every format that can hold them, and the reason where one cannot."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from converters.common.box import Box
from converters.common.errors import UnsupportedError
from converters.families.registry import get_family
from converters.families.rope import LinearRope
from converters.model.model_info import ModelInfo, read_model_info
from converters.source.weights import open_native
from tests.doors import convert
from tests.models.dense import write as write_tiny
from trainer.models.initial_weights import InitialWeights

LINEAR = {"rope_type": "linear", "factor": 4.0}
MODELS = {
    "llama": ("llama3", {"attention_bias": True, "mlp_bias": True, "rope_scaling": LINEAR}),
    "llama, attention alone": ("llama2", {"attention_bias": True, "num_hidden_layers": 2}),
    "llama, MLP alone": ("llama3_tied", {"mlp_bias": True}),
    "qwen3": ("qwen3", {"attention_bias": True, "num_hidden_layers": 2}),
}
TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79]])


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    name, numbers = MODELS[request.param]
    write_tiny(tmp_path / "hf", name, numbers=numbers)
    return tmp_path


def logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits


@pytest.mark.parametrize("through", ["dcp", "torch"])
def test_there_and_back_is_bit_equal(folder, through):
    convert(folder / "hf", folder / "between", to=through)
    convert(folder / "between", folder / "back", to="hf")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys() and any(name.endswith(".bias") for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(folder / "hf"), logits(folder / "back"))
    assert read_model_info(folder / "between").args == read_model_info(folder / "hf").args


def test_rows_of_biases_follow_those_of_their_weights(folder):
    """Llama's q and k change to neighbouring pairs; all others stay."""
    info, stored = read_model_info(folder / "hf"), load_file(folder / "hf" / "model.safetensors")
    with open_native(folder / "hf") as weights:
        for fqn, (name,) in weights.source.ledger.used.items():
            if not fqn.endswith(".bias"):
                continue
            whole = Box.whole(weights.source.tensors[fqn].shape)
            expected = stored[name]
            if info.family != "qwen3" and fqn.endswith(("wq.bias", "wk.bias")):
                expected = expected.view(-1, 2, info.args.head_dim // 2).transpose(1, 2).flatten()
            np.testing.assert_array_equal(weights.source.read(fqn, whole), expected.numpy())


def test_biases_begin_at_zero_and_are_counted():
    for name, biases in (("llama3", 128 + 64 * 2 + 128 + 384 * 2 + 128), ("qwen3", 256 + 128 * 2 + 128)):
        family = get_family(name)
        plain = family.flavors["debug_gqa"]
        changed = {"attention_bias": True, "mlp_bias": name == "llama3"}
        args = replace(plain, **changed)
        assert family.num_parameters(args) == family.num_parameters(plain) + plain.num_layers * biases
        first = InitialWeights(ModelInfo(name, args), seed=1)
        zeros = [fqn for fqn in first.tensors if fqn.endswith(".bias")]
        assert len(zeros) == plain.num_layers * (7 if name == "llama3" else 4)
        assert not any(first.read(fqn, Box.whole(first.tensors[fqn].shape)).any() for fqn in zeros)


@pytest.mark.parametrize(
    ("to", "said"), [("meta", "the naming 'meta' has no names"), ("torchtune", "biases of linear layers")]
)
def test_formats_without_biases_say_so(tmp_path, to, said):
    write_tiny(tmp_path / "hf", "llama3", numbers=MODELS["llama"][1])
    with pytest.raises(UnsupportedError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to=to)
    assert said in error.value.message and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "said"), [("meta", "Llama 2 cannot express RoPE of type linear"), ("torchtune", "RoPE of type linear")]
)
def test_formats_of_fewer_rope_types_say_so(tmp_path, to, said):
    write_tiny(tmp_path / "hf", "llama2", numbers={"rope_scaling": LINEAR, "num_hidden_layers": 1})
    assert read_model_info(tmp_path / "hf").args.rope_scaling == LinearRope(4.0)
    with pytest.raises(UnsupportedError) as error:
        convert(tmp_path / "hf", tmp_path / "out", to=to)
    assert said in error.value.message and not (tmp_path / "out").exists()
