"""Our Qwen 3 against transformers' on tiny random models that transformers made, near and far from position 0."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from converters.families.base import ModelArgs
from converters.families.qwen3 import FLAVORS, Qwen3Args
from converters.families.registry import get_family
from tests.hf_names import interleaved, native_name
from trainer.models.decoder import Transformer
from trainer.models.qwen3 import build_model

SEQ_LEN = 48
STARTS = (0, 5000, 16000)
COMMON = {"norm_eps": 1e-6, "rope_theta": 1e6}
ARGS = {
    "grouped": Qwen3Args(64, 3, 4, 2, 16, 160, 256, **COMMON),
    "tied": Qwen3Args(64, 3, 4, 1, 16, 160, 256, tied=True, **COMMON),
    "head_dim apart": Qwen3Args(48, 2, 4, 2, 32, 96, 256, **COMMON),
}


def their_model(args: ModelArgs) -> Qwen3ForCausalLM:
    """Weights of std 0.2, and norms that are not all ones: else a norm left out or in the wrong place hardly shows."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=args.dim,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.ffn_hidden,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": args.rope_theta, "rope_type": "default"},
        tie_word_embeddings=args.tied,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def our_model(theirs: Qwen3ForCausalLM, args: ModelArgs, *, permute: bool = False) -> Transformer:
    model = build_model(args)
    pairs = {native_name(name): weight for name, weight in theirs.state_dict().items()}
    if permute:  # what Llama's weights need on the way here, and Qwen's must not get
        for n in range(args.num_layers):
            for ours, heads in (("wq", args.num_heads), ("wk", args.num_kv_heads)):
                fqn = f"layers.{n}.attention.{ours}.weight"
                pairs[fqn] = interleaved(pairs[fqn], heads)
    model.load_state_dict(pairs)
    return model


@pytest.fixture(params=ARGS, ids=list(ARGS))
def args(request) -> ModelArgs:
    return ARGS[request.param]


@torch.no_grad()
def errors(args: ModelArgs, start: int, *, permute: bool = False, spoil=None) -> tuple[float, float]:
    """max |Δlogit| between the two models in fp32, and transformers' own in fp32 against fp64."""
    theirs = their_model(args)
    ours = our_model(theirs, args, permute=permute)
    if spoil is not None:
        spoil(ours)
    tokens = torch.randint(args.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(start, start + SEQ_LEN)
    output = theirs(tokens, position_ids=positions[None].expand(2, -1)).logits
    exact = theirs.double()(tokens, position_ids=positions[None].expand(2, -1)).logits
    difference = (ours(tokens, positions) - output).abs().max().item()
    return difference, (output.double() - exact).abs().max().item()


@pytest.mark.parametrize("start", STARTS)
def test_logits_are_those_of_transformers(args, start):
    difference, own_error = errors(args, start)
    assert difference <= 3 * own_error


@pytest.mark.parametrize("start", STARTS[-1:])
def test_a_permutation_shows(args, start):
    difference, own_error = errors(args, start, permute=True)
    assert difference > 100 * own_error


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_a_norm_without_its_weight_shows(norm):
    def spoil(model):
        for layer in model.layers.values():
            getattr(layer.attention, norm).weight.fill_(1.0)

    difference, own_error = errors(ARGS["grouped"], 0, spoil=spoil)
    assert difference > 100 * own_error


def test_a_whole_long_sequence_is_like_transformers():
    args = ARGS["grouped"]
    theirs = their_model(args)
    tokens = torch.randint(args.vocab_size, (1, 4096), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output, ours = theirs(tokens).logits, our_model(theirs, args)(tokens)
        own_error = (output - theirs.double()(tokens).logits).abs().max()
    assert (ours - output).abs().max() <= 3 * own_error


@pytest.mark.parametrize("flavor", list(FLAVORS))
def test_parameters_are_those_that_converters_list(flavor):
    args = FLAVORS[flavor]
    with torch.device("meta"):
        model = build_model(args)
    listed = get_family("qwen3").parameters(args)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {p.fqn: p.shape for p in listed if p.is_trained}
    assert {n: tuple(b.shape) for n, b in model.named_buffers()} == {p.fqn: p.shape for p in listed if not p.is_trained}
