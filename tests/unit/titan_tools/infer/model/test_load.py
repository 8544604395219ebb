"""Loading for inference: in whatever form weights are kept, logits stay what they were, and nothing is read in vain."""

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from converters.common.box import Box
from converters.common.errors import CheckpointError, UnsupportedError
from converters.families.registry import get_family
from converters.model.model_info import ModelInfo
from converters.source.weights import open_native
from tests.doors import convert
from tests.models.biased import BIASED, registered
from tests.models.biased import write as write_biased
from tests.models.dense import TINY
from tests.models.dense import write as write_tiny
from tests.models.llama import write as write_llama
from tests.tiny_infer import CPU, load
from titan_tools.infer.decoding.engine import Engine
from titan_tools.infer.model import linear
from titan_tools.infer.model.linear import FusedLinear, PackedWeight, can_fuse, can_pack, fuse
from titan_tools.infer.model.load import _num_kv_heads, load_model
from trainer.models import registry as trained_families

TOKENS = [3, 14, 15, 92, 65, 35]
WIDE = {"hidden_size": 512, "intermediate_size": 1200, "num_attention_heads": 8, "num_key_value_heads": 4}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("llama2", "llama3_tied", "qwen3"))) for name in TINY
    ],
)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, write_tiny(folder, request.param)


@pytest.fixture(scope="module", params=["llama3_tied", "qwen3"])
def wide(request, tmp_path_factory):
    """A model whose weights are large enough to be packed."""
    numbers = WIDE | {"head_dim": 64, "vocab_size": 2003, "num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp("wide")
    return folder, write_tiny(folder, request.param, numbers=numbers)


def logits_of(model, tokens=TOKENS):
    """Of a prefill and of two decode steps behind it: [3, V]."""
    engine = Engine(model, rows=1, room=64)
    return torch.stack([engine.prefill(0, tokens), *(engine.decode([token])[0] for token in (7, 8))])


def test_fused_layers_give_the_logits_of_separate_ones(tiny):
    folder, _ = tiny
    fused, separate = load(folder), load(folder, fused=False)
    assert sum(isinstance(m, FusedLinear) for m in fused.body.modules()) == 2 * len(fused.body.layers)
    torch.testing.assert_close(logits_of(fused), logits_of(separate), rtol=1e-5, atol=1e-5)
    assert fused.bytes_per_token == separate.bytes_per_token


@pytest.mark.parametrize("tp, rank", [(2, 1), (4, 0), (4, 3)])
def test_every_rank_fuses_its_own_rows(tiny, tp, rank):
    folder, _ = tiny
    fused, separate = (load(folder, tp=tp, rank=rank, fused=fused) for fused in (True, False))
    for n, layer in fused.body.layers.items():
        other = separate.body.layers[n]
        for together, parts in (
            (layer.attention.wq, (other.attention.wq, other.attention.wk, other.attention.wv)),
            (layer.feed_forward.w1, (other.feed_forward.w1, other.feed_forward.w3)),
        ):
            assert torch.equal(together.weight, torch.cat([part.weight for part in parts]))
            assert together.sizes == [len(part.weight) for part in parts]


def test_fused_layers_that_get_other_inputs_are_right_all_the_same():
    """In another order, twice, or with an equal input that is another tensor."""
    parent = nn.ModuleDict({name: nn.Linear(6, size, bias=False) for name, size in (("a", 4), ("b", 3), ("c", 2))})
    weights = [parent[name].weight.detach() for name in "abc"]
    fuse(parent, "abc", (4, 3, 2))
    parent["a"].weight = nn.Parameter(torch.cat(weights))
    x, y = torch.randn(2, 5, 6)
    for calls in ([("a", x), ("b", y), ("c", x)], [("c", x), ("a", y), ("c", y), ("b", y), ("c", x)]):
        for name, given in calls:
            torch.testing.assert_close(parent[name](given), F.linear(given, weights["abc".index(name)]))
    parent["a"](x), parent["c"](x)
    assert parent["a"]._input is None and not parent["a"]._outputs  # nothing of a step stays


def test_packed_weights_give_the_logits_of_plain_ones(wide):
    folder, reference = wide
    packed, plain = load(folder), load(folder, packed=False)
    assert isinstance(packed.body.layers["0"].feed_forward.w1.weight, PackedWeight)
    assert isinstance(packed.head.weight, PackedWeight)
    theirs = reference(torch.tensor([[*TOKENS, 7, 8]])).logits[0, -3:].detach()
    for model in (packed, plain):
        torch.testing.assert_close(logits_of(model), theirs, rtol=1e-4, atol=1e-4)
    assert packed.bytes_per_token == plain.bytes_per_token


def test_packed_weights_round_like_plain_ones_in_bfloat16(wide):
    folder, _ = wide
    exact = logits_of(load(folder, packed=False))
    packed, plain = (logits_of(load(folder, dtype=torch.bfloat16, packed=packed)) for packed in (True, False))
    assert (packed - exact).abs().max() < 2 * (plain - exact).abs().max()


@pytest.mark.skipif(not can_pack((1024, 1024), torch.float32, CPU), reason="no oneDNN here")
@pytest.mark.parametrize("shape", [(1, 1024), (3, 1024), (2, 5, 1024)])
def test_a_packed_weight_multiplies_any_rows(shape):
    weight = torch.randn(1030, 1024)
    x = torch.randn(*shape, 2)[..., 0]  # not contiguous
    bias = torch.randn(1030, 2)[:, 0]  # neither
    packed = PackedWeight(weight)
    torch.testing.assert_close(F.linear(x, packed), F.linear(x, weight), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(F.linear(x, packed, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(F.linear(x, packed, bias=bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError):
        F.linear(x, packed, bias, bias)
    with pytest.raises(TypeError):
        torch.mm(x, PackedWeight(weight))


def no_operator(*_):
    raise AttributeError("no such operator")


def refuse(*_):
    raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq")


def other_product(*_):
    return torch.ones(1, 48, dtype=torch.bfloat16)


@pytest.mark.skipif(not can_pack((1024, 1024), torch.bfloat16, CPU), reason="no oneDNN here")
@pytest.mark.parametrize(
    ("operator", "does"),
    [
        ("_reorder_linear_weight", no_operator),
        ("_reorder_linear_weight", refuse),
        ("_linear_pointwise", other_product),
    ],
)
def test_nothing_is_packed_where_the_operators_are_not_there_or_do_something_else(wide, monkeypatch, operator, does):
    """torch promised nothing of them, and a CPU without AVX-512 has none for bfloat16."""
    monkeypatch.setattr(torch.ops.mkldnn, operator, does)
    linear._packing_works.cache_clear()
    try:
        assert isinstance(load(wide[0], dtype=torch.bfloat16).head.weight, torch.Tensor)
    finally:
        linear._packing_works.cache_clear()


def test_nothing_is_packed_on_another_processor(monkeypatch):
    monkeypatch.setattr(linear.platform, "machine", lambda: "aarch64")
    assert not can_pack((1024, 1024), torch.float32, CPU)


@pytest.fixture(scope="module", params=BIASED)
def biased(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("biased")
    model = write_biased(folder, request.param, tie_word_embeddings=request.param == "qwen2")
    with registered(request.param):
        yield folder, model


def logits_of_theirs(model):
    """As `logits_of`."""
    with torch.no_grad():
        return model(torch.tensor([[*TOKENS, 7, 8]])).logits[0, -3:]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_biases_are_added_as_transformers_adds_them(biased, monkeypatch, packed, fused):
    folder, theirs = biased
    monkeypatch.setattr(linear, "_LEAST_PACKED_BYTES", 1)
    model = load(folder, packed=packed, fused=fused)
    weight = model.body.layers["0"].attention.wq.weight
    assert isinstance(weight, PackedWeight) == (packed and can_pack((64, 32), torch.float32, CPU))
    torch.testing.assert_close(logits_of(model), logits_of_theirs(theirs), rtol=1e-5, atol=1e-5)
    read = sum(p.nbytes for p in theirs.parameters())
    assert model.bytes_per_token == read - (0 if theirs.config.tie_word_embeddings else theirs.lm_head.weight.nbytes)


@pytest.mark.parametrize("how", ["int8", "float8"])
def test_biases_next_to_quantised_weights_are_those_of_torchaos_model(biased, how):
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    folder, theirs = biased
    theirs = deepcopy(theirs)
    theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.clone())  # of a tied one the output alone is rounded
    config = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[how]
    quantize_(theirs, config(version=2, set_inductor_config=False))
    torch.testing.assert_close(logits_of(load(folder, quantize=how)), logits_of_theirs(theirs), rtol=1e-4, atol=1e-4)


def test_a_conversion_carries_biases_there_and_back(biased, tmp_path):
    folder, theirs = biased
    convert(folder, tmp_path / "dcp", to="dcp")
    torch.testing.assert_close(logits_of(load(tmp_path / "dcp")), logits_of_theirs(theirs), rtol=1e-5, atol=1e-5)
    convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    ours, exact = (load_file(place / "model.safetensors") for place in (tmp_path / "hf", folder))
    assert ours.keys() == exact.keys() and all(torch.equal(ours[name], exact[name]) for name in exact)


def test_layers_of_which_one_has_no_bias_stay_apart():
    layers = [nn.Linear(6, 4, bias=bias) for bias in (True, False, True)]
    assert can_fuse(layers[::2]) and not can_fuse(layers)


def test_a_family_that_lists_other_parameters_than_its_model_has_is_refused(tmp_path, monkeypatch):
    write_llama(tmp_path)
    with registered("qwen2"), open_native(tmp_path) as weights:
        family = replace(weights.info, family="qwen2")  # lists biases; Llama's file has none
        monkeypatch.setitem(trained_families._FAMILIES, "qwen2", trained_families.get_trainer_family("llama3"))
        with pytest.raises(UnsupportedError, match=r"(?s)'qwen2'.* layers\.0\.attention\.wk\.bias .*only in the list"):
            load_model(weights.source, family, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("how", ["int8", "float8"])
def test_every_linear_layer_is_quantised_while_it_is_read(tiny, how):
    folder, reference = tiny
    model = load(folder, quantize=how)
    exact = load(folder)
    assert model.quantized == how
    assert model.bytes_per_token < exact.bytes_per_token / 2
    assert model.body.tok_embeddings.weight.dtype == torch.float32
    off = (logits_of(model) - logits_of(exact)).abs().max()
    assert 0 < off < 0.3 * logits_of(exact).std() * (1 if how == "int8" else 3)


class Recorded:
    """A source that counts the elements read from it, and may break."""

    def __init__(self, source, *, broken=""):
        self.source, self.tensors, self.num_read, self.broken = source, source.tensors, 0, broken

    def read(self, fqn, box):
        if fqn == self.broken:
            raise CheckpointError(f"{fqn}: the file ends")
        self.num_read += box.num_elements
        return self.source.read(fqn, box)


@pytest.mark.parametrize("tp, rank", [(1, 0), (2, 1), (4, 0), (4, 3)])
def test_a_rank_reads_only_what_it_holds(tmp_path, tp, rank):
    write_llama(tmp_path, tie_word_embeddings=True)
    with open_native(tmp_path) as weights:
        source = Recorded(weights.source)
        model = load_model(source, weights.info, dtype=torch.float32, device=CPU, tp=tp, rank=rank)
    held = {id(p): p.numel() for p in [*model.body.parameters(), model.head.weight]}  # a tied one once
    assert source.num_read == sum(held.values())


def test_an_error_of_a_reader_is_reported(tmp_path):
    write_llama(tmp_path)
    with open_native(tmp_path) as weights, pytest.raises(CheckpointError, match="the file ends"):
        source = Recorded(weights.source, broken="layers.1.feed_forward.w3.weight")
        load_model(source, weights.info, dtype=torch.float32, device=CPU)


def test_nothing_is_imported_that_takes_seconds(tmp_path):
    write_llama(tmp_path)
    script = """
import sys
from pathlib import Path
from titan_tools.infer.request import Request
from titan_tools.infer.run import run_request
from titan_tools.infer.decoding.sampling import Sampling
run_request(Request(Path(sys.argv[1]), Sampling(), text="a", max_new_tokens=2))
slow = ("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.tensor", "transformers")
slow += ("torchao", "sympy", "matplotlib", "tensorboard", "datasets", "pyarrow")
print([name for name in slow if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("v", [None, (128, 32)], ids=["none", "wider"])
def test_keys_and_values_that_the_cache_cannot_store_are_refused(v):
    info = ModelInfo("llama3", get_family("llama3").flavors["debug_gqa"])
    shapes = {"layers.0.attention.wk.weight": (64, 32), "layers.0.attention.wv.weight": v}
    slices = {name: Box.whole(shape) for name, shape in shapes.items() if shape}
    with pytest.raises(UnsupportedError, match="stores heads of layers.N.attention.wk and wv"):
        _num_kv_heads(slices, info, None)
