"""Our Llama against transformers' on tiny random models that transformers made, near and far from position 0."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from converters.families.base import ModelArgs, RopeScaling
from converters.families.llama3 import FLAVORS, parameters
from tests.hf_names import interleaved, native_name
from trainer.models.decoder import Transformer
from trainer.models.rope import RotaryAngles, rotate

SEQ_LEN = 48
STARTS = (0, 5000, 16000)
LLAMA_31 = RopeScaling(factor=8.0, original_max_position_embeddings=512)
LLAMA_32 = RopeScaling(factor=32.0, original_max_position_embeddings=512)
ARGS = {
    "grouped": ModelArgs(64, 3, 4, 2, 16, 160, 256, rope_scaling=LLAMA_31),
    "tied": ModelArgs(64, 3, 4, 1, 16, 160, 256, rope_scaling=LLAMA_32, tied=True),
    "unscaled": ModelArgs(64, 3, 4, 4, 16, 160, 256, rope_theta=10000.0),
    "head_dim apart": ModelArgs(48, 2, 4, 2, 32, 96, 256, rope_scaling=LLAMA_31),
}


def their_model(args: ModelArgs) -> LlamaForCausalLM:
    """Weights of std 0.2: at transformers' default of 0.02 even a wrong permutation hardly moves a logit."""
    rope = {"rope_type": "default"}
    if args.rope_scaling is not None:
        rope = {"rope_type": "llama3", "factor": args.rope_scaling.factor}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.dim,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.ffn_hidden,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": args.rope_theta, **rope},
        tie_word_embeddings=args.tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def our_model(theirs: LlamaForCausalLM, args: ModelArgs, *, permute=interleaved) -> Transformer:
    model = Transformer(args)
    pairs = {native_name(name): weight for name, weight in theirs.state_dict().items()}
    for n in range(args.num_layers):
        for ours, heads in (("wq", args.num_heads), ("wk", args.num_kv_heads)):
            fqn = f"layers.{n}.attention.{ours}.weight"
            pairs[fqn] = permute(pairs[fqn], heads)
    model.load_state_dict(pairs)
    return model


@pytest.fixture(params=ARGS, ids=list(ARGS))
def args(request) -> ModelArgs:
    return ARGS[request.param]


@torch.no_grad()
def errors(args: ModelArgs, start: int, *, permute=interleaved) -> tuple[float, float]:
    """max |Δlogit| between the two models in fp32, and transformers' own in fp32 against fp64."""
    theirs = their_model(args)
    ours = our_model(theirs, args, permute=permute)
    tokens = torch.randint(args.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(start, start + SEQ_LEN)
    text = theirs(tokens, position_ids=positions[None].expand(2, -1)).logits
    exact = theirs.double()(tokens, position_ids=positions[None].expand(2, -1)).logits
    difference = (ours(tokens, positions) - text).abs().max().item()
    return difference, (text.double() - exact).abs().max().item()


@pytest.mark.parametrize("start", STARTS)
def test_logits_are_those_of_transformers(args, start):
    difference, own_error = errors(args, start)
    assert difference <= 3 * own_error


@pytest.mark.parametrize("start", STARTS[-1:])
def test_a_wrong_permutation_shows(args, start):
    difference, own_error = errors(args, start, permute=lambda weight, num_heads: weight)
    assert difference > 100 * own_error


def test_a_whole_long_sequence_is_like_transformers():
    args = ARGS["grouped"]
    theirs = their_model(args)
    tokens = torch.randint(args.vocab_size, (1, 4096), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        text, ours = theirs(tokens).logits, our_model(theirs, args)(tokens)
        own_error = (text - theirs.double()(tokens).logits).abs().max()
    assert (ours - text).abs().max() <= 3 * own_error


@pytest.mark.parametrize("flavor", list(FLAVORS))
def test_parameters_are_those_that_converters_list(flavor):
    args = FLAVORS[flavor]
    with torch.device("meta"):
        model = Transformer(args)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {p.fqn: p.shape for p in parameters(args)}
    assert not list(model.buffers())


def test_positions_of_each_sample_count():
    torch.manual_seed(0)
    model = Transformer(ARGS["grouped"])
    tokens = torch.randint(256, (2, 16))
    positions = torch.stack((torch.arange(16), torch.arange(700, 716)))
    together = model(tokens, positions)
    assert torch.allclose(together[0], model(tokens[:1])[0], atol=1e-5)
    assert torch.allclose(together[1], model(tokens[1:], torch.arange(700, 716))[0], atol=1e-5)


def test_rotary_angles_survive_other_dtypes_and_the_meta_device():
    args = ARGS["grouped"]
    expected = RotaryAngles(args)(torch.tensor([12345]))
    with torch.device("meta"):
        model = Transformer(args)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    assert model.rope(torch.tensor([12345])).equal(expected)
    assert model.rope.frequencies_P.dtype == torch.float32
    assert not model.rope.to("meta").to_empty(device="cpu").frequencies_P.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_gets_the_rotation_in_real_numbers(dtype):
    rotations = RotaryAngles(ARGS["grouped"])(torch.arange(16000, 16000 + SEQ_LEN))
    q_BLNH = torch.randn(2, SEQ_LEN, 4, 16, dtype=dtype, generator=torch.Generator().manual_seed(3))
    seen = set()

    def look(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        seen.update(value.dtype for value in values if isinstance(value, torch.Tensor))
        return graph

    compiled = torch.compile(rotate, backend=look, fullgraph=True)(q_BLNH, rotations)
    assert seen == {torch.float32, dtype}
    assert torch.allclose(compiled, rotate(q_BLNH, rotations), atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_a_tied_output_is_one_parameter_also_after_leaving_the_meta_device():
    with torch.device("meta"):
        model = Transformer(ARGS["tied"])
    model.to_empty(device="cpu")
    model.tie()
    assert model.output.weight is model.tok_embeddings.weight


def test_what_is_none_is_skipped():
    torch.manual_seed(0)
    args = ARGS["grouped"]
    whole, tokens = Transformer(args), torch.randint(256, (2, 16))
    expected = whole(tokens)
    first, last = Transformer(args), Transformer(args)
    first.load_state_dict(whole.state_dict())
    last.load_state_dict(whole.state_dict())
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["1"], first.layers["2"], last.layers["0"]
    assert last(first(tokens)).equal(expected)
    assert "layers.2.attention.wq.weight" in dict(last.named_parameters())
