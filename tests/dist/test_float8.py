"""Float8 training, emulated: near the same run in bf16 in every layout, and checkpoints that do not know of it."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from converters.families.registry import get_family
from converters.source.open import open_checkpoint
from tests.dist import runs
from tests.dist.training import (
    LATENTS,
    Layout,
    args_of,
    build_model,
    first_gradients,
    global_batch,
    make_step,
    own_batch,
    train,
)
from trainer.config.sections import Config
from trainer.optim.optimizer import build_optimizer

BF16 = {"mixed_precision_param": "bfloat16"}
STEPS = 2


def float8(**settings) -> dict[str, dict]:
    settings = {"emulate": True, "filter_fqns": ()} | settings  # the output, too
    return {"model": {"converters": ("quantize.linear.float8",)}, "float8": settings}


GATHERED = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
FULL_AC = {"activation_checkpoint": {"mode": "full"}}
LAYOUTS = {
    "one rank": Layout("", 1, {}, BF16, float8()),
    "one rank, float8 all-gather": Layout("", 1, {}, BF16, float8(**GATHERED)),
    "fsdp 2": Layout("", 2, {}, BF16, float8()),
    "fsdp 2, float8 all-gather": Layout("", 2, {}, BF16, float8(**GATHERED) | FULL_AC),
    "fsdp 2, rowwise": Layout("", 2, {}, BF16, float8(recipe_name="rowwise")),
    "fsdp 2, rowwise_with_gw_hp": Layout("", 2, {}, BF16, float8(recipe_name="rowwise_with_gw_hp")),
    "fsdp 2 tp 2, float8 all-gather": Layout("", 4, {"tensor_parallel_degree": 2}, BF16, float8(**GATHERED)),
    "tp 2, rowwise": Layout("", 2, {"tensor_parallel_degree": 2}, BF16, float8(recipe_name="rowwise")),
    "pp 2": Layout("", 2, {"pipeline_parallel_degree": 2}, BF16, float8()),
    "cp 2": Layout("", 2, {"context_parallel_degree": 2}, BF16, float8(**GATHERED)),
    "ddp 2": Layout("", 2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, BF16, float8()),
}


@pytest.fixture(scope="module")
def references(pools):
    """Losses and norms of one rank without float8: in fp32, and in bf16."""
    layouts = Layout("fp32"), Layout("bf16", 1, {}, BF16)
    return [pools[1].run(train, layout, "debug_gqa", STEPS)[0] for layout in layouts]


# Other layouts of the normal set have what these have
SLOW = {
    *("one rank", "one rank, float8 all-gather", "fsdp 2", "fsdp 2, rowwise", "tp 2, rowwise", "cp 2", "ddp 2"),
    *("fsdp 2 tp 2, float8 all-gather", "pp 2"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LAYOUTS])
def test_losses_are_near_those_in_high_precision(pools, references, name):
    exact, bf16 = references
    output = pools[LAYOUTS[name].world_size].run(train, LAYOUTS[name], "debug_gqa", STEPS)
    assert all(rank == output[0] for rank in output)
    assert output[0]["losses"] == pytest.approx(exact["losses"], abs=0.02, rel=0)
    assert output[0]["norms"] == pytest.approx(exact["norms"], rel=0.05)
    assert output[0] != bf16


def bytes_of_a_pass(layout: Layout) -> tuple[dict[str, int], int]:
    """Case: sizes of this model's parameters, and the bytes that FSDP has gathered when forward and backward are done.

    Its root is not counted twice: parameters are kept between the two.
    """
    model, gathered = build_model(layout, "debug_gqa"), []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    whole = getattr(dist, name)

    def counted(output_tensor, input_tensor, *args, **settings):
        gathered.append(output_tensor.nbytes)
        return whole(output_tensor, input_tensor, *args, **settings)

    setattr(dist, name, counted)
    try:
        model.forward_backward(own_batch(model, 0), global_batch(0).num_units)
    finally:
        setattr(dist, name, whole)
    return {fqn: parameter.numel() for fqn, parameter in model.named_parameters().items()}, sum(gathered)


def test_float8_all_gather_halves_the_bytes_of_what_is_converted(pools):
    keep = {"fsdp_reshard_after_forward": "never"}
    sizes, in_bf16 = pools[2].run(bytes_of_a_pass, Layout("", 2, keep, BF16))[0]
    _, in_float8 = pools[2].run(bytes_of_a_pass, Layout("", 2, keep, BF16, float8(**GATHERED)))[0]
    converted = sum(size for fqn, size in sizes.items() if "norm" not in fqn and fqn != "tok_embeddings.weight")
    assert in_bf16 == 2 * sum(sizes.values())
    assert in_float8 == in_bf16 - converted


@pytest.mark.slow
def test_precomputed_scales_are_those_computed_when_gathering(pools):
    def losses(**settings) -> list[dict]:
        return pools[2].run(train_and_follow, Layout("", 2, {}, BF16, float8(**GATHERED | settings)))

    with_scales, without = losses(), losses(precompute_float8_dynamic_scale_for_fsdp=False)
    assert with_scales[0]["scaled"] and not without[0]["scaled"]
    assert with_scales[0]["losses"] == without[0]["losses"]


def train_and_follow(layout: Layout) -> dict:
    """Case: losses of steps as `train.py` takes them; whether weights have scales that were computed beforehand."""
    model, config = build_model(layout, "debug_gqa"), layout.config("debug_gqa")
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    model.follow(optimizer)
    step, losses = make_step(model, config, max_norm=1.0), []
    for number in range(3):
        losses.append(step.run(own_batch(model, number), optimizer).loss)
        optimizer.zero_grad()
    wrapped = [p._local_tensor for p in model.named_parameters().values()]
    scales = [tensor._precomputed_scale for tensor in wrapped if hasattr(tensor, "_precomputed_scale")]
    assert len(scales) == 7 * 4 + 1  # of four layers, and of the output
    return {"losses": losses, "scaled": all(scale is not None for scale in scales)}


@pytest.fixture(scope="module")
def whole(pools, tmp_path_factory):
    """Data, and the folder of a run in float8 that was never stopped."""
    folder = tmp_path_factory.mktemp("float8")
    data = runs.make_data(folder)
    config = run_config(data, folder / "whole", **float8(**GATHERED))
    config = replace(config, model=replace(config.model, print_after_conversion=True))
    (error, talk), (_, silence) = pools[2].run(runs.run_and_hear, config)
    assert not error
    assert "Float8Linear(" in talk and "Float8Linear(" not in silence
    assert "the casts of `output` run uncompiled" in talk and "float8" not in silence
    return data, folder / "whole"


def run_config(data, dump, **sections) -> Config:
    training = {"local_batch_size": 2, "mixed_precision_param": "bfloat16"}
    return runs.make_config(data, dump, training=training, **sections)


@pytest.mark.slow
def test_a_checkpoint_has_plain_weights_and_resumes_with_or_without_float8(pools, whole, tmp_path):
    data, dump = whole
    last = "checkpoint/step-4"
    plain = run_config(data, dump)
    catalog = open_checkpoint(dump / last)
    parameters = get_family("llama3").parameters(args_of("debug_gqa"))
    assert {fqn: catalog.tensors[fqn].dtype for fqn in (p.fqn for p in parameters)} == {
        p.fqn: "float32" for p in parameters
    }
    assert not any(b"torchao" in file.read_bytes() for file in (dump / last).rglob("*") if file.is_file())

    pools[2].run(runs.copy_step, plain, dump / last, tmp_path / "copied")
    assert not runs.differences(dump / last, tmp_path / "copied")
    pools[2].run(runs.copy_step, run_config(data, dump, **float8(**GATHERED)), tmp_path / "copied", tmp_path / "back")
    assert not runs.differences(dump / last, tmp_path / "back")

    runs.begin_from(tmp_path / "again", dump, 2)
    assert pools[2].run(runs.run, run_config(data, tmp_path / "again", **float8(**GATHERED))) == ["", ""]
    assert not runs.differences(dump / last, tmp_path / "again" / last)
    runs.begin_from(tmp_path / "without", dump, 2)
    assert pools[2].run(runs.run, run_config(data, tmp_path / "without")) == ["", ""]
    expected, output = runs.read_losses(dump), runs.read_losses(tmp_path / "without")
    assert [output[step] for step in (3, 4)] == pytest.approx([expected[step] for step in (3, 4)], abs=0.02, rel=0)


@pytest.mark.slow
def test_latents_are_converted_and_their_weights_gradients_summed(pools):
    """Of token shards under tensor parallelism; rounding to float8 alone changes gradients by a tenth."""
    flavor, tp = f"{LATENTS}/float8", Layout("", 2, {"tensor_parallel_degree": 2}, BF16, float8())
    ((wanted, _),) = pools[1].run(gradients_and_converted, Layout("", 1, {}, BF16, float8()), flavor)
    for found, converted in pools[2].run(gradients_and_converted, tp, flavor):
        attention = ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")
        assert {f"layers.1.attention.{name}" for name in attention} <= converted
        assert {f"layers.1.moe.shared_experts.{name}" for name in ("w1", "w2", "w3")} <= converted
        assert {n for n, g in found.items() if not (g - wanted[n]).norm() <= 0.15 * wanted[n].norm()} == set()


def gradients_and_converted(layout: Layout, flavor: str) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Case: the first step's gradients, and the layers that compute in float8."""
    parts = build_model(layout, flavor).parts
    names = {name for part in parts for name, m in part.named_modules() if type(m).__name__ == "Float8Linear"}
    return first_gradients(layout, flavor), names


def test_weights_of_any_wrapping_are_saved_as_safetensors(pools):
    assert pools[2].run(saved_as_safetensors, LAYOUTS["fsdp 2, float8 all-gather"]) == [[], []]


def saved_as_safetensors(layout: Layout) -> list[str]:
    """Case: parameters that safetensors reads back otherwise."""
    state = build_model(layout, "debug_gqa").state_dict()
    shards = {fqn: tensor.to_local().contiguous() for fqn, tensor in state.items()}
    again = safetensors.torch.load(safetensors.torch.save(shards))
    return [fqn for fqn in shards if type(shards[fqn]) is not torch.Tensor or not again[fqn].equal(shards[fqn])]
