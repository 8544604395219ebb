"""Weights of 8 bits: how far they are from what they stand for, and that products are those of the rounded weight."""

import ast
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.llama import BOS, EOS
from tests.models.llama import write as write_llama
from tests.tiny_infer import CPU, complete, load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import quantize as quantizing
from titan_tools.infer.model.quantize import QuantizedWeight, quantize_weight, why_slow
from trainer.parallel.compile import why_inductor_cannot

HOW = ["int8", "float8"]
DTYPES = [torch.bfloat16, torch.float32]
ROUNDING = {torch.bfloat16: 6e-3, torch.float32: 1e-5}  # of a product: it and the scaled one are rounded
pytestmark = pytest.mark.usefixtures("one_thread")


def random_weight(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = torch.logspace(-4, 1, shape[0])[:, None]  # rows of very different sizes
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


class Quantized(nn.Module):
    """A linear layer with a weight of 8 bits."""

    def __init__(self, weight, how, bias=None):
        super().__init__()
        self.weight, self.bias = quantize_weight(weight, how), bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_each_weight_is_off_by_half_a_step_of_its_row(how, dtype):
    weight = random_weight(301, 48, dtype=dtype)
    found, exact = quantize_weight(weight, how).dequantize(), weight.float()
    largest = exact.abs().amax(1, keepdim=True)
    if how == "int8":  # steps are as wide everywhere; a bfloat16 scale may be a 256th too small for the largest
        allowed = largest / 127.5 * (0.5 + 127.5 / 256 * (dtype == torch.bfloat16)) * 1.001
    else:  # 3 bits behind the first; below the smallest exponent steps are as wide as there
        allowed = torch.maximum(exact.abs() * 2**-4, largest / 448 * 2**-10) * 1.001
    assert ((found - exact).abs() <= allowed).all()
    error = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < {"int8": 0.012, "float8": 0.035}[how]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("how", HOW)
def test_products_are_those_of_torchaos_own_linear(how, bias):
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[how]
    theirs = nn.Linear(48, 301, bias=bias).requires_grad_(False)
    theirs.weight.copy_(random_weight(301, 48))
    ours = quantize_weight(theirs.weight, how)
    quantize_(theirs, config(version=2, set_inductor_config=False))
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(F.linear(x, ours, theirs.bias), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(F.linear(x, ours, bias=theirs.bias), theirs(x), rtol=1e-4, atol=1e-5)


def test_torchao_is_asked_by_its_public_names_alone():
    """Others move between its releases."""
    import torchao.quantization

    imported = [
        node for node in ast.walk(ast.parse(Path(quantizing.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    asked = [node for node in imported if node.module.startswith("torchao")]
    assert {node.module for node in asked} == {"torchao.quantization"}
    assert {name.name for node in asked for name in node.names} <= set(torchao.quantization.__all__)


@pytest.mark.parametrize("shape", [(301, 32), (64, 45), (700, 2048)], ids=["odd rows", "odd features", "blocks"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_a_product_is_that_of_the_rounded_weight(how, dtype, shape):
    weight = quantize_weight(random_weight(*shape, dtype=dtype), how)
    for rows in ((1,), (2, 1), (2, 20), (0,)):  # one token, two of a batch, more than the kernel takes, none
        x = torch.randn(*rows, shape[1]).to(dtype)
        found, expected = F.linear(x, weight), F.linear(x.float(), weight.dequantize())
        assert found.shape == expected.shape and found.dtype == dtype
        assert (found.float() - expected).norm() <= ROUNDING[dtype] * expected.norm()


@pytest.mark.parametrize("how", HOW)
def test_rows_of_zeros_and_slices_of_nothing_stay_so(how):
    """Padded vocabularies have rows of zeros; a rank may hold no rows of a weight, or none of its features."""
    for dtype in DTYPES:
        padded = random_weight(8, 16, dtype=dtype)
        padded[5] = 0
        logits = F.linear(torch.ones(1, 16, dtype=dtype), quantize_weight(padded, how))
        assert logits.isfinite().all() and logits[0, 5] == 0
        for num_rows, num_features in ((0, 16), (4, 0)):
            out = F.linear(
                torch.ones(1, 3, num_features, dtype=dtype), quantize_weight(padded[:num_rows, :num_features], how)
            )
            assert out.shape == (1, 3, num_rows) and out.dtype == dtype and not out.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_a_compiled_product_is_the_same(how, dtype):
    """Traced in one piece, also in inference mode, which is how a decode step is compiled."""
    linear = Quantized(random_weight(301, 48, dtype=dtype), how)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for num_rows in (1, 3):
            x = torch.randn(num_rows, 1, 48).to(dtype)
            torch.testing.assert_close(compiled(x), linear(x), rtol=1e-2, atol=1e-4)


def test_few_rows_in_bfloat16_go_through_the_kernel_of_int8(monkeypatch):
    weight = quantize_weight(random_weight(64, 32, dtype=torch.bfloat16), "int8")
    monkeypatch.setattr(quantizing, "_cast_product", None)
    F.linear(torch.ones(1, 1, 32, dtype=torch.bfloat16), weight)
    with pytest.raises(TypeError):
        F.linear(torch.ones(1, 1, 32), weight)  # fp32: the kernel's loop over it is slower than a cast


def test_what_is_slow_is_reported(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert why_slow("int8", dtype=torch.bfloat16, device=cpu, rows=8) is None
    assert "--dtype bfloat16" in why_slow("int8", dtype=torch.float32, device=cpu, rows=1)
    assert "float8" in why_slow("float8", dtype=torch.bfloat16, device=cpu, rows=1)
    monkeypatch.setattr(quantizing, "why_inductor_cannot", lambda device: None)
    for how in HOW:  # one row goes through a kernel that casts in registers, more through a weight written out
        assert why_slow(how, dtype=torch.bfloat16, device=gpu, rows=1) is None
        assert "32 sequences" in why_slow(how, dtype=torch.bfloat16, device=gpu, rows=32)
    monkeypatch.setattr(quantizing, "why_inductor_cannot", lambda device: "no triton")
    assert "no triton" in why_slow("int8", dtype=torch.bfloat16, device=gpu, rows=1)


def test_a_quantised_weight_multiplies_and_nothing_else():
    weight = quantize_weight(random_weight(4, 16), "int8")
    with pytest.raises(TypeError):
        F.embedding(torch.tensor([1]), weight)
    with pytest.raises(TypeError):
        F.linear(torch.ones(1, 16), weight, torch.zeros(4), torch.zeros(4))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    """A tiny Llama, whose weights are large: each layer's rounding shows."""
    folder = tmp_path_factory.mktemp("hf")
    write_llama(folder, tie_word_embeddings=request.param)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("how", "cosine", "divergence"), [("int8", 0.999, 0.003), ("float8", 0.99, 0.05)])
def test_logits_stay_close(folder, how, cosine, divergence, dtype):
    tokens = [BOS, *range(30, 80)]
    exact, rounded = load(folder, dtype=dtype), load(folder, dtype=dtype, quantize=how)
    logits, expected = (Engine(m, rows=1, room=64).prefill(0, tokens) for m in (rounded, exact))
    assert F.cosine_similarity(logits, expected, dim=0) > cosine
    assert F.kl_div(logits.log_softmax(0), expected.log_softmax(0), log_target=True, reduction="sum") < divergence
    assert not torch.equal(logits, expected)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, id="eager"),
        pytest.param({"compile": True, "backend": "aot_eager"}, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_cached_decoding_is_the_rounded_models_whole_pass(folder, how, engine):
    model = load(folder, quantize=how)
    said, engine = [BOS, 72, 101, 108], Engine(model, rows=2, room=32, **engine)
    logits_V = engine.prefill(0, said)
    for _ in range(12):
        said.append(int(logits_V.argmax()))
        logits_V = engine.decode(said[-1:])[0]
        torch.testing.assert_close(logits_V, engine.prefill(1, said), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(why_inductor_cannot(CPU) is not None, reason="nothing to compile C++ with")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_steps_that_inductor_compiled_say_what_eager_ones_say(folder, how, dtype):
    model, logits = load(folder, quantize=how, dtype=dtype, packed=False), []
    for compile in (False, True):
        engine = Engine(model, rows=2, room=64, compile=compile)
        for row, prompt in enumerate(([BOS, 72, 101, 108], [BOS, 72])):
            engine.prefill(row, prompt)
        logits.append(torch.stack([engine.decode([token, 2 * token]) for token in range(6)]))
    most = 0.1 if dtype == torch.bfloat16 else 1e-4  # compiled operations keep sums in fp32 that eager ones round
    assert (logits[1] - logits[0]).abs().max() < most * logits[0].std()


@pytest.mark.parametrize("how", HOW)
def test_linear_layers_alone_are_rounded_and_hold_half_the_bytes(folder, how):
    exact, rounded = (load(folder, dtype=torch.bfloat16, quantize=q, packed=False) for q in (None, how))
    weights = {n: m.weight for n, m in exact.body.named_modules() if getattr(m, "weight", None) is not None}
    for name, weight in (*weights.items(), ("head", exact.head.weight)):
        ours = rounded.head.weight if name == "head" else rounded.body.get_submodule(name).weight
        if name == "tok_embeddings" or weight.ndim == 1:
            assert torch.equal(ours, weight)
        else:
            scale_bytes = {"int8": 2, "float8": 4}[how] * weight.shape[0]
            assert isinstance(ours, QuantizedWeight) and ours.shape == weight.shape
            assert ours.num_bytes == weight.nbytes / 2 + scale_bytes
    assert rounded.bytes_per_token < 0.6 * exact.bytes_per_token


@pytest.mark.parametrize("how", HOW)
def test_the_command_says_it_in_eight_bits(titan, folder, how):
    """In bfloat16 where no other dtype is asked for, though the checkpoint is fp32."""
    ask = ("infer", folder, "--prompt", "def main(", "--max-new-tokens", 12, "--json", "--quantize", how)
    exit_code, out, err = titan(*ask)
    assert exit_code == 0 and ("saves memory" in err) == (how == "float8"), err
    output = json.loads(out)
    assert output["stats"]["dtype"] == how
    model = load(folder, dtype=torch.bfloat16, quantize=how)
    tokens = complete(model, [output["results"][0]["prompt_tokens"]], max_new_tokens=12, stop_ids=frozenset({EOS}))
    assert output["results"][0]["tokens"] == tokens[0].tokens


@pytest.mark.parametrize("num_rows", [1, 32])
@pytest.mark.parametrize("how", HOW)
def test_a_weight_may_be_one_column_wide(how, num_rows):
    weight = random_weight(num_rows, 1)
    rounded = quantize_weight(weight, how)
    assert rounded.shape == weight.shape
    torch.testing.assert_close(rounded.dequantize(), weight, rtol=0.01, atol=0)
