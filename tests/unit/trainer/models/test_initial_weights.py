"""First weights: the same numbers however they are sliced, of the distribution they should have."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep

import numpy as np
import pytest

from converters.common.box import Box
from converters.engine import units
from converters.families.args import ModelArgs
from converters.families.llama3 import FLAVORS, parameters
from converters.families.parameters import Parameter, Role
from converters.families.qwen3 import QWEN3
from converters.families.registry import get_family
from converters.layout.layout import local_box
from converters.layout.mesh_shape import MeshShape
from converters.model.model_info import ModelInfo
from trainer.config.sections import Config, Model, Training
from trainer.job.job import resolve_job
from trainer.models import initial_weights
from trainer.models.initial_weights import InitialWeights, initial_blocks, initial_values
from trainer.models.initialization import Constant, Normal, initial_distribution
from trainer.models.registry import get_trainer_family
from trainer.seed import seed


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(initial_weights, "BLOCK_ELEMENTS", 64)


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_shards_are_slices_of_the_whole(small_blocks, tp_dim):
    parameter = Parameter("layers.3.attention.wo.weight", (30, 12), Role.ROW, tp_dim)
    whole = initial_values(parameter, Normal(0.02), seed=1, box=Box.whole(parameter.shape))
    mesh = MeshShape(dp_shard=4, cp=2, tp=3)
    seen = np.zeros(parameter.shape, int)
    for rank in range(mesh.world_size):
        box = local_box(parameter, mesh, rank)
        if box is not None:
            slices = box.slices_within(Box.whole(parameter.shape))
            assert np.array_equal(initial_values(parameter, Normal(0.02), seed=1, box=box), whole[slices])
            seen[slices] += 1
    assert (seen == 1).all()


def test_memory_is_one_block(small_blocks):
    parameter = Parameter("output.weight", (100, 8), Role.OUTPUT, 0)
    blocks = list(initial_blocks(parameter, Normal(1.0), seed=0, box=Box((3, 0), (50, 8))))
    assert sum(box.num_elements for box, _ in blocks) == 400
    assert max(draw().size for _, draw in blocks) <= 64


def test_a_copy_draws_each_block_about_once(tmp_path, monkeypatch):
    """The engine reads boxes smaller than blocks, in two threads; 17 rows a box and 100 a block never end together."""
    drawn = []
    draw = initial_weights._draw

    def counted(spread, shape, key):
        drawn.append(key)
        return draw(spread, shape, key)

    monkeypatch.setattr(initial_weights, "_draw", counted)
    monkeypatch.setattr(initial_weights, "BLOCK_ELEMENTS", 100 * 128)
    monkeypatch.setattr(units, "BLOCK_BYTES", 17 * 128 * 4)
    monkeypatch.setattr(units, "UNIT_BYTES", 8 * 17 * 128 * 4)
    seed(resolve_job(Config(model=Model(flavor="debug_gqa"), training=Training(seq_len=64))), tmp_path / "seed")
    assert len(drawn) < 1.2 * len(set(drawn))


def test_threads_that_meet_in_a_block_draw_it_once(monkeypatch):
    drawn, draw = [], initial_weights._draw

    def slow(spread, shape, key):
        drawn.append(key)
        sleep(0.05)
        return draw(spread, shape, key)

    weights = InitialWeights(ModelInfo("llama3", FLAVORS["debug_gqa"]), seed=0)
    box = Box((4, 0), (2, 128))
    expected = weights.read("output.weight", box)
    monkeypatch.setattr(initial_weights, "_draw", slow)
    weights = InitialWeights(ModelInfo("llama3", FLAVORS["debug_gqa"]), seed=0)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: weights.read("output.weight", box), range(4)))
    assert len(drawn) == 1
    assert all(np.array_equal(values, expected) for values in found)


def test_seed_name_and_block_each_change_the_values(small_blocks):
    def draw(fqn: str, seed: int) -> np.ndarray:
        return initial_values(Parameter(fqn, (16, 8), Role.COLUMN, 0), Normal(1.0), seed=seed, box=Box.whole((16, 8)))

    first = draw("layers.1.attention.wq.weight", 0)
    assert not np.array_equal(first, draw("layers.1.attention.wq.weight", 1))
    assert not np.array_equal(first, draw("layers.11.attention.wq.weight", 0))
    assert not np.array_equal(first[:8], first[8:])
    assert np.array_equal(first, draw("layers.1.attention.wq.weight", 0))


def test_values_have_the_distribution_asked_for():
    parameter = Parameter("output.weight", (2000, 500), Role.OUTPUT, 0)
    values = initial_values(parameter, Normal(0.5, cut=3.0), seed=3, box=Box.whole(parameter.shape))
    assert np.abs(values).max() <= 1.5
    assert values.std() == pytest.approx(0.5 * 0.9866, rel=2e-3)  # the std of a normal cut at ±3σ
    assert abs(values.mean()) < 2e-3
    assert (initial_values(parameter, Constant(1.0), seed=3, box=Box((5, 0), (2, 500))) == 1).all()


def test_the_distribution_of_each_role():
    def found(args) -> dict:
        return {p.fqn.removesuffix(".weight"): initial_distribution(p, args) for p in parameters(args)}

    args = replace(FLAVORS["debug_gqa"], num_layers=12)
    drawn = found(args)
    assert drawn["tok_embeddings"] == Normal(1.0)
    assert drawn["output"] == Normal(128**-0.5, cut=3.0)
    assert found(FLAVORS["debug_tied"])["tok_embeddings"] == Normal(128**-0.5, cut=3.0)
    for module in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
        assert drawn[f"layers.3.{module}"] == Normal(0.02)
    for module in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
        assert drawn[f"layers.3.{module}"] == Normal(0.02 / 8**0.5)
    for norm in ("norm", "layers.0.attention_norm", "layers.11.ffn_norm"):
        assert drawn[norm] == Constant(1.0)


@pytest.mark.parametrize("blocks", ["layers", "image_blocks"])
def test_the_distribution_follows_from_the_number_of_a_block_and_not_its_name(blocks):
    args = ModelArgs()
    for name, expected in ((f"{blocks}.3.out", 0.02 / 8**0.5), ("mtp_layers.3.out", 0.02), ("out", 0.02)):
        assert initial_distribution(Parameter(f"{name}.weight", (4, 4), Role.ROW), args) == Normal(expected)


def test_the_distribution_of_experts_is_torchtitans():
    args = QWEN3.flavors["debug_moe"]
    drawn = {p.fqn.removeprefix("layers.3.moe."): initial_distribution(p, args) for p in QWEN3.parameters(args)}
    assert drawn["experts.w1"] == Normal(0.02)
    for name in ("experts.w2", "experts.w3", "router.gate.weight"):
        assert drawn[name] == Normal(0.02 / 8**0.5)
    assert drawn["expert_bias"] == Constant(0.0)


def test_the_distribution_of_gpt_oss_is_torchtitans_but_for_biases():
    """torchtitan: `0.02 / sqrt(2 * (layer + 1))` for everything in a layer; here biases are 0, as transformers' are."""
    family = get_family("gpt_oss")
    args, distribution = family.flavors["debug_window"], get_trainer_family("gpt_oss").initial_distribution
    drawn = {p.fqn.removeprefix("layers.2."): distribution(p, args) for p in family.parameters(args)}
    scaled = {name for name, found in drawn.items() if found == Normal(0.02 / 6**0.5)}
    matrices = {f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
    assert scaled == matrices | {
        "attention.sinks", "moe.router.gate.weight", "moe.experts.mlp1_weight", "moe.experts.mlp2_weight"
    }  # fmt: skip
    for name in ("attention.wq.bias", "moe.router.gate.bias", "moe.experts.mlp1_bias", "moe.experts.mlp2_bias"):
        assert drawn[name] == Constant(0.0)
    assert (drawn["tok_embeddings.weight"], drawn["output.weight"]) == (Normal(1.0), Normal(128**-0.5, cut=3.0))


def test_the_distribution_of_llama4_is_torchtitans():
    family = get_family("llama4")
    args, distribution = family.flavors["debug_maverick"], get_trainer_family("llama4").initial_distribution
    drawn = {p.fqn: distribution(p, args) for p in family.parameters(args)}
    for name in ("attention.wq", "attention.wv", "feed_forward.w1"):
        assert drawn[f"layers.2.{name}.weight"] == Normal(0.02)
    for name in ("experts.w1", "shared_experts.w1.weight"):
        assert drawn[f"layers.3.moe.{name}"] == Normal(0.02)
    for name in ("experts.w2", "experts.w3", "shared_experts.w2.weight", "shared_experts.w3.weight"):
        assert drawn[f"layers.3.moe.{name}"] == Normal(0.02 / 8**0.5)
    assert drawn["layers.3.moe.router.gate.weight"] == drawn["layers.3.attention.wo.weight"] == Normal(0.02 / 8**0.5)


def test_values_do_not_move_between_versions():
    """A seed names the same weights for ever; this moves only if the definition does."""
    weights = InitialWeights(ModelInfo("llama3", FLAVORS["debug_gqa"]), seed=42)
    values = weights.read("layers.2.attention.wk.weight", Box((60, 100), (4, 28)))
    assert values.dtype == np.float32
    assert values[0, :3].tolist() == [0.02241605706512928, 0.0179959274828434, -0.02614472806453705]


def test_a_source_of_every_parameter_without_torch():
    code = (
        "import sys; from trainer.models.initial_weights import InitialWeights;"
        "from converters.model.model_info import ModelInfo;"
        "from converters.views.catalog import Box; from converters.families.llama3 import FLAVORS;"
        "w = InitialWeights(ModelInfo('llama3', FLAVORS['debug_tied']), seed=0);"
        "[w.read(f, Box.whole(t.shape)) for f, t in w.tensors.items()];"
        "assert 'output.weight' not in w.tensors and len(w.tensors) == 38;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
