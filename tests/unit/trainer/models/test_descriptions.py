"""The decoder that blocks describe, against classes of transformers of which titan has no family."""

import math
from dataclasses import replace

import pytest
import torch
import transformers

from converters.api import convert, diff
from converters.families.args import DecoderArgs
from converters.families.blocks import Block, Dense, Ends, GroupedQuery, Norm, Rope, Temperature
from converters.families.parameters import parameters_of
from converters.families.rope import YarnRope
from converters.source.weights import open_native
from tests.greedy_reference import assert_same, greedy, ragged_prompts
from tests.models import gemma3
from tests.tiny_infer import complete, load
from trainer.models.decoder import Transformer
from trainer.models.registry import check_parameters, get_trainer_family

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBERS = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256, "rms_norm_eps": 1e-3,
    "pad_token_id": None,
}  # fmt: skip
ARGS = DecoderArgs(32, 5, 4, 2, 24, 56, vocab_size=97, norm_eps=1e-3, rope_theta=1e4)
NORM, DENSE, ROPE = Norm(1e-3), Dense(56), Rope(1e4, 24, pairs=False)
PLAIN = Block(GroupedQuery(ROPE), DENSE, NORM)
YARN = YarnRope(4.0, 16, mscale=1.0, mscale_all_dim=1.0)
SLIDES = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]


def attend(**changes) -> Block:
    return replace(PLAIN, attention=replace(PLAIN.attention, **changes))


# Class, its numbers, and what its layers compute
CLASSES = {
    "Qwen 2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        lambda n: attend(qkv_bias=True, window=8 if n >= 3 else None),
    ),
    "Mistral": ("Mistral", {"sliding_window": 8}, lambda n: attend(window=8)),
    "Ministral 3": (
        "Ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
        },
        lambda n: attend(rope=replace(ROPE, scaling=YARN), temperature=Temperature(0.3, 16)),
    ),
    "SmolLM 3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1, 1, 0], "tie_word_embeddings": False, "rope_theta": 1e4},
        lambda n: attend(rope=ROPE if n not in (1, 4) else None),
    ),
    "Seed-OSS": ("SeedOss", {"attention_dropout": 0.0, "residual_dropout": 0.0}, lambda n: attend(qkv_bias=True)),
    "EXAONE 4": (
        "Exaone4",
        {"sliding_window": 8, "layer_types": SLIDES},
        lambda n: replace(
            attend(qk_norm=NORM, window=8 if n % 2 == 0 else None, rope=ROPE if n % 2 == 0 else None),
            before=None,
            after=NORM,
        ),
    ),
    "Granite": (
        "Granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 5.0, "embedding_multiplier": 1.0},
        lambda n: replace(attend(scale=0.3), residual=0.4),
        Ends(NORM, logit_scale=0.2),
    ),
    "Command R 7B": (
        "Cohere2",
        {"sliding_window": 8, "layer_types": SLIDES, "layer_norm_eps": 1e-3, "logit_scale": 0.3},
        lambda n: replace(
            attend(rope=replace(ROPE, pairs=True) if n % 2 == 0 else None, window=8 if n % 2 == 0 else None),
            before=replace(NORM, centers=True),
            parallel=True,
        ),
        Ends(replace(NORM, centers=True), logit_scale=0.3),
    ),
    "GLM 4.5, dense": (
        "Glm4Moe",
        {"first_k_dense_replace": 5, "use_qk_norm": True, "attention_bias": True},
        lambda n: attend(rope=replace(ROPE, width=12), qkv_bias=True, qk_norm=NORM),
    ),
}


def randomize(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))


def native(name: str, *, is_post_norm: bool) -> str:
    """A parameter's native name."""
    renamed = {
        "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.": "attention.",
        "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm", "post_feedforward_layernorm": "ffn_post_norm",
        "post_attention_layernorm": "attention_post_norm" if is_post_norm else "ffn_norm",
    }  # fmt: skip
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("name", CLASSES)
def test_logits_of_a_description_are_those_of_transformers(name):
    called, numbers, block, *ends = CLASSES[name]
    config = getattr(transformers, f"{called}Config")(**NUMBERS | {"rope_theta": 1e4} | numbers)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{called}ForCausalLM")(config).eval()
    randomize(theirs)
    ours = Transformer(ARGS, lambda args, layer: block(layer), *(ends or [Ends(NORM)]))
    weights = {native(n, is_post_norm=block(0).before is None): w for n, w in theirs.state_dict().items()}
    ours.load_state_dict(weights)
    listed = parameters_of(lambda args, layer: block(layer))(ARGS)
    assert {(p.fqn, p.shape) for p in listed} == {(fqn, tuple(w.shape)) for fqn, w in ours.state_dict().items()}
    tokens = torch.randint(97, (2, 60))
    with torch.no_grad():
        found, wanted = ours(tokens), theirs(tokens).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with gemma3.registered():
        folder = tmp_path_factory.mktemp("gemma3") / "hf"
        yield folder, gemma3.write(folder)


def test_gemma_3_is_a_description(folder):
    """Logits and gradients of the trainer's model, in fp32 and in bf16."""
    src, theirs = folder
    with open_native(src) as weights:
        family, args = gemma3.GEMMA3, weights.info.args
        state = {fqn: torch.from_numpy(weights.read(fqn)) for fqn in weights.tensors}
    assert family.args_from_hf_config(family.hf_config(args)) == args
    ours = get_trainer_family("gemma3").build_model(args)
    check_parameters(ours, family.parameters(args), family="gemma3")
    ours.load_state_dict(state | {"output.weight": state["tok_embeddings.weight"]})
    tokens = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(0))
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        mine, other = ours.to(dtype), theirs.to(dtype)
        found, wanted = mine(tokens), other(tokens, use_cache=False).logits
        assert (found - wanted).abs().max() <= limit * wanted.abs().max()
    theirs.float()
    assert math.isclose(ours.embedding_scale, 32**0.5)


def test_gemma_3_speaks_and_is_converted(folder, tmp_path):
    src, theirs = folder
    prompts = ragged_prompts(num=4, longest=40, vocab_size=97)
    expected = greedy(theirs.float(), prompts, 12)
    convert(src, tmp_path / "dcp", to="dcp")
    for place in (src, tmp_path / "dcp"):
        said = [each.tokens for each in complete(load(place), prompts, rows=3, max_new_tokens=12)]
        assert_same(theirs, prompts, said, expected)
    convert(tmp_path / "dcp", tmp_path / "back", to="hf")
    assert diff(src, tmp_path / "back").equal
