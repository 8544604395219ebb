"""Every format that is written, from every model that transformers writes: back in Hugging Face's, bit for bit."""

import base64
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from converters.common.errors import UnsupportedError
from converters.formats.base import OutputOptions
from converters.layout.mesh_shape import MeshShape
from converters.source.weights import open_native
from converters.verify import verify
from tests.doors import convert
from tests.models.dense import SCALING
from trainer.models.registry import get_trainer_family

NUMBERS = {
    "vocab_size": 302,  # 256 bytes and what Llama 3's special tokens need
    "hidden_size": 32,
    "intermediate_size": 90,
    "num_hidden_layers": 11,  # `layers.1` must not take `layers.10`
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "initializer_range": 0.2,
}
LLAMA = {"rope_parameters": {"rope_theta": 500000.0, **SCALING}}
QWEN = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "head_dim": 16}
MOE = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}
GPT_OSS = {
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "attn_implementation": "eager",
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 9,
    "n_group": 4,
    "topk_group": 2,
}
V3 = {
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "n_shared_experts": 1,
    "num_mtp_layers": 0,
}
V2 = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "topk_method": "group_limited_greedy"}
LLAMA4 = {
    "head_dim": 8,
    "intermediate_size_mlp": 120,
    "num_local_experts": 12,
    "interleave_moe_layer_step": 2,
    "attn_temperature_tuning": False,  # transformers takes it from a token's place in the prompt, not from its position
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}
MODELS = {
    "untied": (LlamaConfig, LlamaForCausalLM, LLAMA),
    "tied": (LlamaConfig, LlamaForCausalLM, LLAMA | {"tie_word_embeddings": True}),
    "transformers 4": (LlamaConfig, LlamaForCausalLM, LLAMA),
    "head_dim apart": (LlamaConfig, LlamaForCausalLM, LLAMA | {"head_dim": 16}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, QWEN),
    "qwen3 tied": (Qwen3Config, Qwen3ForCausalLM, QWEN | {"tie_word_embeddings": True}),
    "qwen3 moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN | MOE),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, GPT_OSS),
    "deepseek v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | V3),
    "deepseek v2": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | V2),
    "llama4": (Llama4TextConfig, Llama4ForCausalLM, LLAMA4),
}
FORMATS = {
    "dcp": ("dcp", "out", OutputOptions()),
    "dcp for a mesh": ("dcp", "out", OutputOptions(mesh=MeshShape(pp=2, dp_shard=3, tp=2))),
    "dcp for FSDP": ("dcp", "out", OutputOptions(mesh=MeshShape(pp=2, dp_shard=5))),
    "hf": ("hf", "out", OutputOptions(shard_bytes=40_000)),
    "torch folder": ("torch", "out", OutputOptions()),
    "torch file": ("torch", "out.pt", OutputOptions()),
    "meta": ("meta", "out", OutputOptions()),
    "meta, 2 shards": ("meta", "out", OutputOptions(num_shards=2)),
    "torchtune": ("torchtune", "out", OutputOptions()),
    "torchtune's meta": ("torchtune", "out", OutputOptions(style="meta")),
    "torchtune's own": ("torchtune", "out", OutputOptions(style="torchtune")),
}
_NOT_TORCHTUNES = ("head_dim apart", "qwen3", "qwen3 tied", "qwen3 moe", "llama4", "gpt-oss")
REFUSED = {  # (model, format written) → why; torchtune and Meta's code build no such models
    ("head_dim apart", "meta"): "params.json cannot express head_dim 16",
    ("qwen3", "meta"): "Meta's format has no qwen3 models",
    ("qwen3 tied", "meta"): "Meta's format has no qwen3 models",
    ("qwen3 moe", "meta"): "Meta's format has no qwen3 models",
    ("gpt-oss", "meta"): "Meta's format has no gpt_oss models",
    **{(f"deepseek v{n}", "meta"): "Meta's format has no deepseek_v3 models" for n in (2, 3)},
    **{(f"deepseek v{n}", "torchtune"): "torchtune 0.6.1" for n in (2, 3)},
    **{(model, "torchtune"): "torchtune 0.6.1" for model in _NOT_TORCHTUNES},
}
TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.stack([torch.arange(24), 20_000 + torch.arange(24)])  # near, and far where RoPE's scaling shows


def _is_refused(model: str, form: str) -> bool:
    """Whether a format cannot hold a model, or training cannot run it on the mesh (experts with tp)."""
    return (model, FORMATS[form][0]) in REFUSED or (model, form) == ("qwen3 moe", "dcp for a mesh")


def _every_pair() -> list:
    """Every model in every format that can hold it. Most are slow tests: all go through all formats in turn, too."""
    pairs = [(model, form) for model in MODELS for form in FORMATS if not _is_refused(model, form)]
    return [pytest.param(*pair, marks=() if pair[0] == "tied" else pytest.mark.slow) for pair in pairs]


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory) -> tuple[str, Path, torch.nn.Module]:
    """The name of a model, the folder that transformers wrote, and the model."""
    folder = tmp_path_factory.mktemp("hf")
    config, kind, numbers = MODELS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config(**NUMBERS | numbers)).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones, as they begin, would hide that one was taken for another
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
    model.save_pretrained(folder)
    if request.param == "transformers 4":
        path = folder / "config.json"
        written = json.loads(path.read_text())
        rope = written.pop("rope_parameters")
        written |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": written.pop("dtype")}
        path.write_text(json.dumps(written))
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tokenizer.model").write_text(ranks)
    return request.param, folder, model


def logits(model) -> torch.Tensor:
    model.set_experts_implementation("eager")  # the one that computes in float64
    with torch.no_grad():
        return model(TOKENS, position_ids=POSITIONS).logits


def assert_same_model(folder: Path, source_folder: Path, model) -> None:
    written = {}
    for file in folder.glob("*.safetensors"):
        written |= load_file(file)
    expected = load_file(source_folder / "model.safetensors")
    assert written.keys() == expected.keys()
    differing = [n for n, t in written.items() if t.dtype != expected[n].dtype or not torch.equal(t, expected[n])]
    assert differing == []
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder).eval()), logits(model))


@pytest.mark.parametrize(("source", "form"), _every_pair(), indirect=["source"])
def test_there_and_back(source, form, tmp_path):
    _, folder, model = source
    to, dst, options = FORMATS[form]
    convert(folder, tmp_path / dst, to=to, options=options)
    assert verify(tmp_path / dst).ok
    lone = dst == "out.pt"
    convert(tmp_path / dst, tmp_path / "back", to="hf", model_from=folder if lone else None)
    assert_same_model(tmp_path / "back", folder, model)


@pytest.mark.parametrize(("source", "to"), REFUSED, indirect=["source"])
def test_what_a_format_cannot_say_is_refused(source, to, tmp_path):
    name, folder, _ = source
    with pytest.raises(UnsupportedError, match=REFUSED[name, to]):
        convert(folder, tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == []


# All formats of such models: test_families.py, test_family_forms.py
IN_STORE = ("tied", "qwen3 moe")  # the others, in an object store, are slow tests
LIKE_OTHERS = ("transformers 4", "head_dim apart", "qwen3 tied", "deepseek v2")


@pytest.mark.parametrize(
    ("source", "store"),
    [
        *(pytest.param(name, "folder", marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in MODELS),
        *(pytest.param(name, "pretend", marks=[pytest.mark.slow] * (name not in IN_STORE)) for name in MODELS),
    ],
    indirect=True,
)
def test_through_every_format_in_turn(source, place, tmp_path):
    """No pair of formats is special: each is written from the one before, not from Hugging Face's."""
    name, folder, model = source
    last = folder
    for number, (form, (to, _, options)) in enumerate(FORMATS.items()):
        only_paths = to == "torchtune" and place is not tmp_path  # its recipe names the folder
        if form != "torch file" and not only_paths and not _is_refused(name, form):
            convert(last, place / str(number), to=to, options=options)
            last = place / str(number)
    convert(last, tmp_path / "back", to="hf")
    assert_same_model(tmp_path / "back", folder, model)


def test_logits_of_the_trainer_s_model(source, tmp_path):
    """HF → DCP → the model that `titan train` builds, against transformers; bound by transformers' own rounding."""
    name, folder, model = source
    mesh = MeshShape(dp_shard=3, tp=1 if name == "qwen3 moe" else 2)
    convert(folder, tmp_path / "dcp", to="dcp", source="hf", options=OutputOptions(mesh=mesh))
    with open_native(tmp_path / "dcp") as weights:
        ours = get_trainer_family(weights.info.family).build_model(weights.info.args)
    state = {fqn: torch.full_like(value, torch.nan) for fqn, value in ours.state_dict().items()}
    if name.endswith("tied") and name != "untied":
        del state["output.weight"]  # the embedding again
    torch.distributed.checkpoint.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert not ours.load_state_dict(state, strict=False).unexpected_keys
    output = logits(model)
    exact = model.double()
    try:
        own_error = (output.double() - logits(exact)).abs().max()
    finally:
        model.float()
    with torch.no_grad():
        found = torch.cat([ours(TOKENS[row : row + 1], POSITIONS[row]) for row in range(2)])
    assert (found - output).abs().max() <= 3 * own_error


def test_what_is_written_depends_on_the_model_not_on_the_road_to_it(source, tmp_path):
    _, folder, _ = source
    convert(folder, tmp_path / "a", to="torch")
    convert(folder, tmp_path / "dcp", to="dcp", options=OutputOptions(mesh=MeshShape(dp_shard=2)))
    convert(tmp_path / "dcp", tmp_path / "b", to="torch")
    assert (tmp_path / "a" / "model.pt").read_bytes() == (tmp_path / "b" / "model.pt").read_bytes()
