"""Mixed precision: bf16 inside and fp32 outside, in every layout alike, one rank and pure TP or PP included."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from converters.source.open import open_checkpoint
from tests.dist import runs
from tests.dist.training import Layout, build_model, global_batch, own_batch, train
from trainer.ranks.mesh import local_part

BF16 = {"mixed_precision_param": "bfloat16"}
LAYOUTS = [
    Layout("one rank", 1, {}, BF16),
    Layout("fsdp 2", 2, {}, BF16),
    Layout("tp 2", 2, {"tensor_parallel_degree": 2}, BF16),
    Layout("pp 2", 2, {"pipeline_parallel_degree": 2}, BF16),
    Layout("cp 2", 2, {"context_parallel_degree": 2}, BF16),
    Layout("ddp 2", 2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, BF16),
    Layout("hsdp 2 × 2", 4, {"data_parallel_replicate_degree": 2}, BF16),
    Layout("offloaded", 2, {}, BF16 | {"enable_cpu_offload": True}),
]


def dtypes(layout: Layout) -> dict[str, set[torch.dtype]]:
    """What a step computes with and leaves behind."""
    model = build_model(layout, "debug_gqa")
    seen = {"hidden": set(), "angles": set()}

    def look(module, args):
        hidden, (rotations,) = args
        seen["hidden"].add(hidden.dtype)
        seen["angles"].add(rotations.dtype)

    for part in model.parts:
        for layer in part.layers.values():
            layer.register_forward_pre_hook(look)
    model.forward_backward(own_batch(model, 0), global_batch(0).num_units)
    seen["weights"] = {p.dtype for p in model.named_parameters().values()}
    seen["gradients"] = {p.grad.dtype for p in model.named_parameters().values()}
    return seen


DTYPES_IN_SLOW_SET = {"cp 2", "pp 2", "hsdp 2 × 2", "offloaded"}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.name in DTYPES_IN_SLOW_SET)) for each in LAYOUTS],
    ids=lambda layout: layout.name,
)
def test_what_is_bf16_and_what_is_not(pools, layout):
    for seen in pools[layout.world_size].run(dtypes, layout):
        assert seen["hidden"] == {torch.bfloat16}
        assert seen["angles"] == {torch.float32}
        assert seen["weights"] == seen["gradients"] == {torch.float32}


@pytest.fixture(scope="module")
def references(pools):
    """Losses of one rank in fp32, and in bf16."""
    return [pools[1].run(train, layout, "debug_gqa", 3)[0]["losses"] for layout in (Layout("fp32"), LAYOUTS[0])]


# Which dtypes are used where is tested in every layout above
IN_SLOW_SET = {"tp 2", "pp 2", "cp 2", "ddp 2", "hsdp 2 × 2", "offloaded"}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=[pytest.mark.slow] * (one.name in IN_SLOW_SET)) for one in LAYOUTS[1:]],
    ids=lambda layout: layout.name,
)
def test_losses_equal_one_rank_up_to_bf16(pools, references, layout):
    exact, one = references
    output = pools[layout.world_size].run(train, layout, "debug_gqa", 3)[0]["losses"]
    rounding = max(abs(a - b) for a, b in zip(one, exact, strict=True))
    assert rounding > 0
    assert output == pytest.approx(one, abs=3 * rounding, rel=0)


def test_weights_kept_in_bf16(pools):
    layout = Layout("fsdp 2", 2, {}, BF16 | {"dtype": "bfloat16"})
    seen = pools[2].run(dtypes, layout)[0]
    assert seen["weights"] == seen["gradients"] == seen["hidden"] == {torch.bfloat16}
    assert seen["angles"] == {torch.float32}


class _OnTheWay(TorchDispatchMode):
    """What FSDP's collectives carry."""

    def __init__(self):
        super().__init__()
        self.dtypes = {"_allgather_base_": set(), "_reduce_scatter_base_": set()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in self.dtypes:
            self.dtypes[name].add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def dtypes_on_the_way(layout: Layout) -> list[set[torch.dtype]]:
    """Case: dtypes that FSDP gathers parameters in, and that it reduces gradients in."""
    model = build_model(layout, "debug_gqa")
    with _OnTheWay() as seen:
        model.forward_backward(own_batch(model, 0), global_batch(0).num_units)
    return list(seen.dtypes.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_gathered_in_the_compute_dtype_and_gradients_reduced_in_fp32(pools, dtype):
    output = pools[2].run(dtypes_on_the_way, Layout("fsdp 2", 2, {}, BF16 | {"dtype": dtype}))
    assert output == [[{torch.bfloat16}, {torch.float32}]] * 2


REDUCED = BF16 | {"mixed_precision_reduce": "bfloat16"}
DDP, REPLICAS = LAYOUTS[5].parallelism, LAYOUTS[6].parallelism


def test_gradients_are_reduced_in_bf16_where_that_is_set(pools):
    assert pools[2].run(dtypes_on_the_way, Layout("fsdp 2", 2, {}, REDUCED)) == [[{torch.bfloat16}] * 2] * 2


def errors_of_reduction(layout: Layout) -> dict[str, float]:
    """Case: by parameter, how far a reduction in bf16 is from the one in fp32, rounded to bf16; in its last places."""
    found = {}
    for reduce in ("float32", "bfloat16"):
        each = replace(layout, training=layout.training | {"mixed_precision_reduce": reduce})
        model = build_model(each, "debug_gqa")
        model.forward_backward(own_batch(model, 0), global_batch(0).num_units)
        found[reduce] = {fqn: local_part(p.grad) for fqn, p in model.named_parameters().items()}
    errors = {}
    for fqn, exact in found["float32"].items():
        reduced = found["bfloat16"][fqn]
        assert reduced.dtype == torch.float32 and torch.equal(reduced, reduced.bfloat16().float())
        largest = exact.abs().max().clamp_min(1e-30)
        errors[fqn] = float(
            (reduced - exact.bfloat16().float()).abs().max() / (largest * torch.finfo(torch.bfloat16).eps)
        )
    return errors


@pytest.mark.parametrize(
    ("layout", "bound"),
    [
        (Layout("fsdp 2", 2, {}, BF16), 0),  # gradients of two ranks are in bf16: their sum is rounded once, as here
        # without the sum over chunks of the loss, which a rank has in fp32
        (Layout("ddp 2", 2, DDP, BF16 | {"loss": "plain"}), 0),
        # The sum of four is rounded twice more, each time by at most half of the last place of the partial sum
        pytest.param(Layout("hsdp 2 × 2", 4, REPLICAS, BF16), 2, marks=pytest.mark.slow),
        pytest.param(Layout("tp 2 fsdp 2", 4, {"tensor_parallel_degree": 2}, BF16), 0, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_reduction_in_bf16_is_the_exact_one_rounded(pools, layout, bound):
    for errors in pools[layout.world_size].run(errors_of_reduction, layout):
        assert errors and max(errors.values()) <= bound


@pytest.mark.parametrize(
    "layout",
    [
        Layout("ddp 2", 2, DDP, REDUCED),
        pytest.param(Layout("fsdp 2", 2, {}, REDUCED), marks=pytest.mark.slow),
        pytest.param(Layout("pp 2 fsdp 2", 4, {"pipeline_parallel_degree": 2}, REDUCED), marks=pytest.mark.slow),
        pytest.param(Layout("hsdp 2 × 2", 4, REPLICAS, REDUCED), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_training_with_bf16_reductions_is_as_near_to_one_rank_as_bf16_and_reruns_are_equal(pools, references, layout):
    exact, one = references
    first, again = (pools[layout.world_size].run(train, layout, "debug_gqa", 3) for _ in range(2))
    assert first == again
    rounding = max(abs(a - b) for a, b in zip(one, exact, strict=True))
    assert first[0]["losses"] == pytest.approx(one, abs=3 * rounding, rel=0)


def test_bf16_moments_go_on_bit_equal_and_are_not_cast_in_silence(pools, tmp_path):
    data, last = runs.make_data(tmp_path), "checkpoint/step-4"
    keys = {"training": {"local_batch_size": 2}, "optimizer": {"state_dtype": "bfloat16"}}
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path / "whole", **keys)) == ["", ""]
    tensors = open_checkpoint(tmp_path / "whole" / last).tensors
    dtypes = {(fqn.rpartition(".")[2], tensor.dtype) for fqn, tensor in tensors.items() if ".state." in fqn}
    assert dtypes == {("step", "float32"), ("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16")}

    runs.begin_from(tmp_path / "again", tmp_path / "whole", 2)
    assert pools[2].run(runs.run, runs.make_config(data, tmp_path / "again", **keys)) == ["", ""]
    assert not runs.differences(tmp_path / "whole" / last, tmp_path / "again" / last)

    runs.begin_from(tmp_path / "other", tmp_path / "whole", 2)
    (output, same) = pools[2].run(runs.run, runs.make_config(data, tmp_path / "other", training=keys["training"]))
    assert output == same and "dtype bfloat16 in the checkpoint, float32 in the model" in output
    assert "moments are not cast: set optimizer.state_dtype" in output


@pytest.mark.parametrize(
    "degrees",
    [pytest.param({}, id="fsdp 2"), pytest.param({"tensor_parallel_degree": 2}, id="tp 2", marks=pytest.mark.slow)],
)
def test_a_cpu_without_bf16_products_trains_in_bf16_with_fp32_products(pools, data, tmp_path, degrees):
    """Within the rounding of bf16: of the difference that bf16 makes at all."""
    found = {}
    for name, case, training in (
        ("fp32", runs.run_and_hear, {}),
        ("bf16", runs.run_and_hear, BF16),
        ("products in fp32", runs.run_without_bf16_products, BF16),
    ):
        keys = {"parallelism": degrees, "training": {"local_batch_size": 2} | training, "checkpoint": {"enable": False}}
        (error, output), (other_error, _) = pools[2].run(case, runs.make_config(data, tmp_path / name, **keys))
        assert (error, other_error) == ("", "")
        if case is runs.run_without_bf16_products:
            assert "has no bfloat16 products: they are computed in fp32" in output
        found[name] = list(runs.read_losses(tmp_path / name).values())
    rounding = max(abs(a - b) for a, b in zip(found["bf16"], found["fp32"], strict=True))
    assert found["products in fp32"] == pytest.approx(found["bf16"], abs=3 * rounding, rel=0)
    assert found["products in fp32"] != found["fp32"]
