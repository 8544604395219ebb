"""Latent attention of inference against transformers: prompts, decode steps over latents, batches, fixed shapes."""

from copy import deepcopy

import pytest
import torch

from tests.models.deepseek import NUMBERS
from tests.models.deepseek import write as write_deepseek
from tests.tiny_infer import CPU, load
from titan_tools.infer.decoding import engine as engine_file
from titan_tools.infer.decoding import products
from titan_tools.infer.decoding import steps as steps_file
from titan_tools.infer.decoding.engine import Engine, RowTokens
from titan_tools.infer.model import linear
from titan_tools.infer.model.latent_attention import LatentAttention
from titan_tools.infer.model.linear import PackedWeight, can_pack
from titan_tools.infer.model.quantize import QuantizedWeight
from titan_tools.infer.model.tensor_parallel import SummedLinear

PROMPT = [(37 * n + 11) % 97 for n in range(40)]  # past YaRN's original length
NEXT = [5, 96, 0, 41]
pytestmark = pytest.mark.usefixtures("one_thread")


class Case:
    """A folder, and transformers' logits after PROMPT and after each of NEXT, with their error."""

    def __init__(self, folder, name, **numbers):
        self.folder = folder
        model = write_deepseek(folder, name, **numbers)
        model.set_experts_implementation("eager")  # torch's product knows no float64
        self.logits = self.logits_of(model)
        self.error = (self.logits - self.logits_of(deepcopy(model).double())).abs().max()

    @torch.inference_mode()
    def logits_of(self, model):
        return model(torch.tensor([[*PROMPT, *NEXT]])).logits[0, -1 - len(NEXT) :]

    def assert_near(self, found):
        assert (found - self.logits).abs().max() <= max(1e-5 * self.logits.abs().max(), 4 * self.error)


@pytest.fixture(scope="module", params=NUMBERS)
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp("hf"), request.param)


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("hf"), "v3")


def said_by(model, *, rows=1, row=0, pieces=(40,), **engine):
    """Logits after PROMPT, prefilled in `pieces`, and after each of NEXT; the other rows hold other sequences."""
    engine = Engine(model, rows=rows, room=64, **engine)
    others = [RowTokens(n, PROMPT[n + 1 :: 2]) for n in range(rows) if n != row]
    if others:
        engine.prefill_rows(others)
    done = 0
    for num in pieces:
        logits = [engine.prefill(row, PROMPT[: done + num], keep=done)]
        done += num
    for number, token in enumerate(NEXT):
        logits.append(engine.decode([token if n == row else (7 * n + number) % 97 for n in range(rows)])[row])
    return torch.stack(logits)


def test_latents_say_what_transformers_says(case):
    model = load(case.folder)
    case.assert_near(said_by(model))
    case.assert_near(said_by(model, rows=3, row=1))
    case.assert_near(said_by(model, pieces=(7, 1, 32)))


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_step_of_fixed_shapes_says_the_same(v3, rows):
    found = said_by(load(v3.folder, packed=False), rows=rows, compile=True, backend="eager")
    torch._dynamo.reset()
    v3.assert_near(found)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_recorded_step_by_products_says_the_same(v3, monkeypatch, rows):
    """As on a GPU; on a CPU in fp32."""
    lengths, attend = [], steps_file.attend_by_products

    def noted(q_BNH, *args):
        lengths.append(len(q_BNH))
        return attend(q_BNH, *args)

    monkeypatch.setattr(steps_file, "attend_by_products", noted)
    monkeypatch.setattr(engine_file, "can_attend_by_products", lambda *_: True)
    v3.assert_near(said_by(load(v3.folder), rows=rows, static=True))
    assert set(lengths) == {rows}
    lengths.clear()
    monkeypatch.setattr(products, "_MOST_SCORES", 0)  # more scores than that are left to SDPA
    v3.assert_near(said_by(load(v3.folder), rows=rows, static=True))
    assert not lengths


@pytest.mark.parametrize("fault", [None, "no scale", "not there"])
def test_products_are_tried_before_they_are_used(monkeypatch, fault):
    product = products._in_fp32

    def faulty(left, right):
        if fault == "not there":
            raise RuntimeError("no such product")
        return product(left, right) * (24 if fault else 1)

    monkeypatch.setattr(products, "_in_fp32", faulty)
    assert products._is_right(CPU, torch.float32) == (fault is None)
    assert not products.can_attend_by_products(CPU, torch.float32)


def test_packed_weights_say_the_same(v3, monkeypatch):
    plain = said_by(load(v3.folder, dtype=torch.bfloat16))
    monkeypatch.setattr(linear, "_LEAST_PACKED_BYTES", 1)
    model = load(v3.folder, dtype=torch.bfloat16)
    weight = model.body.layers["1"].attention.wq_b.weight
    assert isinstance(weight, PackedWeight) == can_pack(weight.shape, torch.bfloat16, CPU)
    assert (said_by(model) - plain).abs().max() < 0.05 * plain.abs().max()


def test_8_bits_are_near(v3):
    model = load(v3.folder, quantize="int8")
    attention = model.body.layers["1"].attention
    assert isinstance(attention.wq_b.weight, QuantizedWeight)
    assert not isinstance(attention.wkv_b.weight, QuantizedWeight)  # its rows are multiplied head by head
    assert (said_by(model) - v3.logits).abs().max() < 0.2 * v3.logits.abs().max()


@pytest.mark.parametrize("rows", [1, 2])
def test_the_cache_holds_one_latent_and_one_rotated_key_per_token(v3, rows):
    numbers = NUMBERS["v3"]
    model = load(v3.folder)
    engine = Engine(model, rows=rows, room=64)
    (one,) = {layer.keys_RKTH.shape for layer in engine._cache.layers}
    assert one == (rows, 1, 64, numbers["kv_lora_rank"] + numbers["qk_rope_head_dim"])
    assert model.cache_bytes(64) == 64 * 4 * numbers["num_hidden_layers"] * one[-1]
    num_bytes = sum(t.nbytes for layer in engine._cache.layers for t in layer.tensors)
    assert num_bytes == rows * model.cache_bytes(64)


def test_decode_steps_make_no_keys_of_earlier_tokens(v3, monkeypatch):
    expanded = []
    expand = LatentAttention.expand
    monkeypatch.setattr(LatentAttention, "expand", lambda self, c: (expanded.append(c.shape[2]), expand(self, c))[1])
    engine = Engine(load(v3.folder), rows=1, room=64)
    engine.prefill(0, PROMPT)
    assert expanded == [len(PROMPT)] * NUMBERS["v3"]["num_hidden_layers"]
    expanded.clear()
    engine.decode([5])
    assert not expanded


def test_ranks_sum_shared_experts_together_with_the_routed_ones(v3):
    """One all-reduce; that the sum is right, tests/dist/test_infer_parity.py shows."""
    model = load(v3.folder, tp=2, rank=1)
    layer = model.body.layers["1"]
    assert isinstance(layer.attention.wo, SummedLinear)
    assert not isinstance(layer.moe.shared_experts.w2, SummedLinear)
