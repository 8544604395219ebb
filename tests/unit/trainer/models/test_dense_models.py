"""Our Llama and Qwen 3 against transformers' on tiny random models that transformers made, near and far from 0."""

import pytest
import torch
from torch import nn

from converters.families.args import DecoderArgs
from converters.families.blocks import rope_of
from converters.families.qwen3 import Qwen3Args
from converters.families.rope import RopeScaling
from tests.models.names import interleaved, native_name
from tests.models.of_args import model_of
from trainer.models.decoder import Transformer
from trainer.models.registry import get_trainer_family
from trainer.models.rope import RotaryAngles, rotate

SEQ_LEN = 48
STARTS = (0, 5000, 16000)
LLAMA_31 = RopeScaling(factor=8.0, original_max_position_embeddings=512)
LLAMA_32 = RopeScaling(factor=32.0, original_max_position_embeddings=512)
QWEN = {"norm_eps": 1e-6, "rope_theta": 1e6}
GROUPED = DecoderArgs(64, 3, 4, 2, 16, 160, 256, rope_scaling=LLAMA_31)
TIED = DecoderArgs(64, 3, 4, 1, 16, 160, 256, rope_scaling=LLAMA_32, tied=True)
MODELS = {
    "llama3, grouped": ("llama3", GROUPED),
    "llama3, tied": ("llama3", TIED),
    "llama3, unscaled": ("llama3", DecoderArgs(64, 3, 4, 4, 16, 160, 256, rope_theta=10000.0)),
    "llama3, head_dim apart": ("llama3", DecoderArgs(48, 2, 4, 2, 32, 96, 256, rope_scaling=LLAMA_31)),
    "qwen3, grouped": ("qwen3", Qwen3Args(64, 3, 4, 2, 16, 160, 256, **QWEN)),
    "qwen3, tied": ("qwen3", Qwen3Args(64, 3, 4, 1, 16, 160, 256, tied=True, **QWEN)),
    "qwen3, head_dim apart": ("qwen3", Qwen3Args(48, 2, 4, 2, 32, 96, 256, **QWEN)),
}


def pair(name: str, *, permuted_as: str = "") -> tuple[nn.Module, nn.Module]:
    """Ours and theirs with the same weights; rows of q and k are in pairs for Llama, not for Qwen."""
    family, args = MODELS[name]
    theirs = model_of(family, args, std=0.2)
    weights = {native_name(name): weight for name, weight in theirs.state_dict().items()}
    if (permuted_as or family) == "llama3":
        for n in range(args.num_layers):
            for ours, heads in (("wq", args.num_heads), ("wk", args.num_kv_heads)):
                fqn = f"layers.{n}.attention.{ours}.weight"
                weights[fqn] = interleaved(weights[fqn], heads)
    ours = get_trainer_family(family).build_model(args)
    ours.load_state_dict(weights)
    return ours, theirs


@torch.no_grad()
def errors(ours: nn.Module, theirs: nn.Module, start: int, length: int = SEQ_LEN) -> tuple[float, float]:
    """max |Δlogit| between the two models in fp32, and transformers' own in fp32 against fp64."""
    tokens = torch.randint(256, (1 if length > SEQ_LEN else 2, length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(start, start + length)
    places = {"position_ids": positions[None].expand(len(tokens), -1)}
    output = theirs(tokens, **places).logits
    exact = theirs.double()(tokens, **places).logits
    return (ours(tokens, positions) - output).abs().max().item(), (output.double() - exact).abs().max().item()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, start):
    difference, own_error = errors(*pair(name), start)
    assert difference <= 3 * own_error


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_permutation_shows(name):
    other = "qwen3" if MODELS[name][0] == "llama3" else "llama3"
    difference, own_error = errors(*pair(name, permuted_as=other), STARTS[-1])
    assert difference > 100 * own_error


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_a_norm_without_its_weight_shows(norm):
    ours, theirs = pair("qwen3, grouped")
    for layer in ours.layers.values():
        getattr(layer.attention, norm).weight.data.fill_(1.0)
    difference, own_error = errors(ours, theirs, 0)
    assert difference > 100 * own_error


@pytest.mark.parametrize("length", [1024, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama3, grouped", "qwen3, grouped"])
def test_a_whole_long_sequence_is_like_transformers(name, length):
    difference, own_error = errors(*pair(name), 0, length)
    assert difference <= 3 * own_error


def test_positions_of_each_sample_count():
    torch.manual_seed(0)
    model = Transformer(GROUPED)
    tokens = torch.randint(256, (2, 16))
    positions = torch.stack((torch.arange(16), torch.arange(700, 716)))
    together = model(tokens, positions)
    assert torch.allclose(together[0], model(tokens[:1])[0], atol=1e-5)
    assert torch.allclose(together[1], model(tokens[1:], torch.arange(700, 716))[0], atol=1e-5)


def test_rotary_angles_survive_other_dtypes_and_the_meta_device():
    rope = rope_of(GROUPED, pairs=True)
    expected = RotaryAngles(rope)(torch.tensor([12345]))
    with torch.device("meta"):
        model = Transformer(GROUPED)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    (rotations,), (angles,) = model.rope(torch.tensor([12345])), model.rope.features
    assert rotations.equal(expected)
    assert angles.frequencies_P.dtype == torch.float32
    assert not angles.to("meta").to_empty(device="cpu").frequencies_P.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_gets_the_rotation_in_real_numbers(dtype):
    rotations = RotaryAngles(rope_of(GROUPED, pairs=True))(torch.arange(16000, 16000 + SEQ_LEN))
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
        model = Transformer(TIED)
    model.to_empty(device="cpu")
    model.tie()
    assert model.output.weight is model.tok_embeddings.weight


def test_what_is_none_is_skipped():
    torch.manual_seed(0)
    args = GROUPED
    whole, tokens = Transformer(args), torch.randint(256, (2, 16))
    expected = whole(tokens)
    first, last = Transformer(args), Transformer(args)
    first.load_state_dict(whole.state_dict())
    last.load_state_dict(whole.state_dict())
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["1"], first.layers["2"], last.layers["0"]
    assert last(first(tokens)).equal(expected)
    assert "layers.2.attention.wq.weight" in dict(last.named_parameters())
