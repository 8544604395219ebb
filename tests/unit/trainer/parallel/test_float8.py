"""Which modules compute in float8, what cannot go with it, and what a machine needs for it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from converters.common.errors import ConfigError
from converters.families.args import DecoderArgs
from converters.families.registry import get_family
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Compile, Config, Float8, Model, Parallelism, Training
from trainer.job.job import layout_problems, resolve_job
from trainer.models.registry import get_trainer_family
from trainer.parallel import float8
from trainer.parallel.compile import compiles
from trainer.parallel.float8 import (
    apply_float8,
    float8_filters,
    float8_machine_problems,
    float8_notes,
    float8_styles,
    without_float8,
)

CONVERTERS = ("quantize.linear.float8",)
LINEARS = {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")} | {f"feed_forward.w{n}" for n in (1, 2, 3)}


def config(*, flavor="debug_gqa", family="llama3", **settings) -> Config:
    return Config(model=Model(name=family, flavor=flavor, converters=CONVERTERS), float8=Float8(**settings))


def converted_model(chosen: Config, *, tp: int = 1):
    family = get_family(chosen.model.name)
    args = family.flavors[chosen.model.flavor]
    with torch.device("meta"):
        model = get_trainer_family(chosen.model.name).build_model(args)
    apply_float8(
        model,
        chosen.float8,
        family.parameters(args),
        filters=float8_filters(chosen.float8, chosen.training),
        tp=tp,
        compiles_model=compiles(chosen.compile, "model"),
    )
    return model


def converted(chosen: Config, *, tp: int = 1) -> set[str]:
    modules = converted_model(chosen, tp=tp).named_modules()
    return {name for name, module in modules if isinstance(module, Float8Linear)}


def of_layers(names: set[str], num_layers: int) -> set[str]:
    return {f"layers.{n}.{name}" for n in range(num_layers) for name in names}


def test_every_linear_is_converted_and_the_output_if_its_weight_is_cast_once():
    assert converted(config()) == of_layers(LINEARS, 4)
    assert converted(config(filter_fqns=())) == of_layers(LINEARS, 4) | {"output"}
    plain = replace(config(), training=Training(loss="plain"))
    assert converted(plain) == of_layers(LINEARS, 4) | {"output"}


def test_routers_and_experts_are_not_converted():
    mixed = converted(config(family="qwen3", flavor="debug_moe_mixed", filter_fqns=()))
    attention = {name for name in LINEARS if name.startswith("attention.")}
    dense = {f"layers.{n}.{name}" for n in (0, 2, 3) for name in LINEARS - attention}
    assert mixed == of_layers(attention, 4) | dense | {"output"}


def test_a_run_says_what_becomes_of_the_output():
    args = get_family("llama3").flavors["debug_gqa"]

    def notes(loss="chunked", args=args, **settings) -> list[str]:
        return float8_notes(Float8(**settings), Training(loss=loss), args)

    (text,) = notes()
    assert "`output` is not converted" in text and "filter_fqns = [] converts it" in text
    (text,) = notes(filter_fqns=("wk",))
    assert "the casts of `output` run uncompiled, for each chunk" in text and 'filter_fqns = ["output"]' in text
    assert not notes(filter_fqns=("output",)) and not notes(loss="plain")
    assert not notes(args=get_family("llama3").flavors["debug_tied"])  # a tied output is never converted


def test_modules_are_left_alone_by_a_part_of_their_name():
    assert converted(config(filter_fqns=("output", "attention.w", "layers.1."))) == {
        name for name in of_layers(LINEARS, 4) if "attention" not in name and "layers.1." not in name
    }


def test_a_tied_output_stays_and_stays_tied():
    model = converted_model(config(flavor="debug_tied", enable_fsdp_float8_all_gather=True))
    assert not isinstance(model.output, Float8Linear)
    assert model.output.weight is model.tok_embeddings.weight


@pytest.mark.parametrize(("tp", "left"), [(1, set()), (2, {"feed_forward.w1"})])
def test_dims_of_each_rank_are_multiples_of_16(tp, left):
    family = get_family("llama3")
    chosen = config()
    args = family.flavors["debug_gqa"]
    shapes = [replace(p, shape=(48, p.shape[1])) if "w1" in p.fqn else p for p in family.parameters(args)]
    with torch.device("meta"):
        model = get_trainer_family("llama3").build_model(args)
    for layer in model.layers.values():
        layer.feed_forward.w1 = torch.nn.Linear(args.dim, 48, bias=False, device="meta")
    apply_float8(model, chosen.float8, shapes, filters=(), tp=tp, compiles_model=False)
    found = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert found == of_layers(LINEARS - left, 4) | {"output"}


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_what_is_too_small_to_gain_is_torchaos_word(recipe):
    family = get_family("llama3")
    args = replace(family.flavors["8B"], num_layers=2)
    with torch.device("meta"):
        model = get_trainer_family("llama3").build_model(args)
    is_large = _auto_filter_for_recipe(recipe or "tensorwise", filter_fqns=["output"])
    expected = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and is_large(module, name)
    }
    filters = ("auto_filter_small_kn", "output")
    chosen = config(flavor="8B", recipe_name=recipe, filter_fqns=filters)
    apply_float8(model, chosen.float8, family.parameters(args), filters=filters, tp=1, compiles_model=False)
    found = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert found == expected and of_layers({"attention.wk", "attention.wv"}, 2).isdisjoint(found) and found


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("emulate", [True, False])
def test_recipes_are_torchaos(recipe, emulate):
    expected = replace(Float8LinearConfig.from_recipe_name(recipe or "tensorwise"), emulate=emulate)
    model = converted_model(config(recipe_name=recipe, emulate=emulate))
    assert model.layers["0"].attention.wq.config == expected


def test_rowwise_compiled_keeps_the_precision_of_scales():
    import torch._inductor.config as inductor

    with inductor.patch(emulate_precision_casts=False):  # not pytest's monkeypatch, which would hide it afterwards
        converted_model(config(recipe_name="rowwise"))
        converted_model(replace(config(), compile=Compile(enable=True)))
        assert not inductor.emulate_precision_casts
        converted_model(replace(config(recipe_name="rowwise"), compile=Compile(enable=True)))
        assert inductor.emulate_precision_casts
    assert not inductor.emulate_precision_casts


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_weight_is_unwrapped_over_the_same_memory(one_rank):
    linear = converted_model(config(enable_fsdp_float8_all_gather=True)).to_empty(device="cpu").layers["0"].attention.wo
    wrapped = linear.weight.detach()
    assert isinstance(wrapped, WeightWithDynamicFloat8CastTensor)
    plain = without_float8(wrapped)
    assert type(plain) is torch.Tensor and plain.data_ptr() == wrapped._tensor.data_ptr()
    sharded = DTensor.from_local(wrapped, one_rank, [Shard(0)])
    plain_tensor = without_float8(sharded)
    assert type(plain_tensor.to_local()) is torch.Tensor and plain_tensor.to_local().data_ptr() == plain.data_ptr()
    assert (plain_tensor.shape, plain_tensor.placements, plain_tensor.stride()) == (
        sharded.shape,
        sharded.placements,
        sharded.stride(),
    )
    assert without_float8(plain) is plain


def styles(device_type: str, **settings) -> dict[str, type]:
    chosen = config(**settings)
    model, family = converted_model(chosen), get_family("llama3")
    plan = get_trainer_family("llama3").tensor_plan(family.parameters(family.flavors["debug_gqa"]))
    found = float8_styles(model, plan, chosen.float8, device_type=device_type)
    return {fqn.removeprefix("layers.0."): type(s) for fqn, s in found.items() if fqn.startswith(("layers.0.", "out"))}


def test_tensor_parallelism_gathers_float8_where_one_scale_goes_with_it():
    columns = dict.fromkeys(LINEARS - {"attention.wo", "feed_forward.w2"}, Float8ColwiseParallel)
    rows = dict.fromkeys(("attention.wo", "feed_forward.w2"), Float8RowwiseParallel)
    gathers = dict.fromkeys(("attention", "feed_forward"), PrepareFloat8ModuleInput)
    assert styles("cuda") == styles("cuda", recipe_name="tensorwise") == columns | rows | gathers
    # wk reads what the block gathers, in high precision
    del columns["attention.wk"], gathers["attention"]
    assert styles("cuda", filter_fqns=("wk",)) == columns | rows | gathers
    assert styles("cuda", recipe_name="rowwise") == styles("cpu") == {}


FSDP2 = MeshShape(dp_shard=2)


def problems(chosen: Config, dims: MeshShape = FSDP2, args: DecoderArgs | None = None) -> list[str]:
    """Problems of the layout that are float8's; the other features' are not of interest here."""
    found = layout_problems(chosen, args or get_family("llama3").flavors[chosen.model.flavor], dims)
    return [problem for problem in found if "float8" in problem]


GATHERS = {"enable_fsdp_float8_all_gather": True}
PRECOMPUTES = {"precompute_float8_dynamic_scale_for_fsdp": True}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GATHERS | {"recipe_name": "rowwise"}, ["rowwise has a scale for each row"]),
        (
            GATHERS | PRECOMPUTES | {"recipe_name": "rowwise_with_gw_hp"},
            ["rowwise_with_gw_hp has a scale for"],
        ),
        (PRECOMPUTES, ["nearest: enable_fsdp_float8_all_gather = true"]),
        (PRECOMPUTES | {"recipe_name": "rowwise"}, ["a scale for each row", "nearest: enable_fsdp_float8_all_gather"]),
        ({"filter_fqns": ("auto_filter_small_kn",), "recipe_name": "rowwise_with_gw_hp"}, ["no auto_filter_small_kn"]),
        (GATHERS | PRECOMPUTES, []),
        (GATHERS | {"recipe_name": "tensorwise"}, []),
        ({"filter_fqns": ("auto_filter_small_kn",), "recipe_name": "rowwise"}, []),
    ],
)
def test_settings_that_do_not_go_together(settings, expected):
    found = problems(config(**settings))
    assert len(found) == len(expected) and all(part in problem for part, problem in zip(expected, found, strict=True))
    assert all("nearest: " in problem for problem in found)


def test_what_else_in_the_config_it_does_not_go_with():
    gathers = config(**GATHERS)
    (problem,) = problems(gathers, MeshShape(dp_replicate=4))
    assert "whole copies (DDP)" in problem and "data_parallel_shard_degree = 4" in problem
    in_fp32 = replace(gathers, training=Training(mixed_precision_param="float32"))
    (problem,) = problems(in_fp32, MeshShape(tp=2))
    assert "each rank holds whole weights" in problem and "mixed_precision_param = bfloat16" in problem
    assert not problems(gathers, MeshShape(tp=2)) and not problems(in_fp32, MeshShape(tp=2, dp_shard=2))
    (problem,) = problems(replace(gathers, training=Training(enable_cpu_offload=True)))
    assert "on the CPU" in problem
    compiled = replace(config(emulate=True), compile=Compile(enable=True))
    (problem,) = problems(compiled)
    assert "emulate does not work with compiled blocks" in problem
    assert not problems(replace(compiled, compile=Compile(enable=True, components=("loss",))))
    assert not problems(replace(compiled, model=Model(flavor="debug_gqa")))  # not asked for


def test_tokens_come_by_16():
    def problems_of(**training) -> list[str]:
        return problems(replace(config(filter_fqns=()), training=Training(**training)))

    assert not problems_of(local_batch_size=2, seq_len=64)
    (problem,) = problems_of(local_batch_size=1, seq_len=40)
    assert "has 40 (1 samples of 40)" in problem and "a multiple of 16" in problem
    in_eights = Training(local_batch_size=1, seq_len=64, loss_chunks=8)
    (problem,) = problems_of(local_batch_size=1, seq_len=64, loss_chunks=8)
    assert not problems_of(local_batch_size=1, seq_len=64)  # one chunk
    assert not problems(replace(config(), training=in_eights))
    assert "loss_chunks = 8 splits 64 differently" in problem and "training.loss_chunks = 4" in problem
    assert not problems_of(local_batch_size=1, seq_len=64, loss="plain")
    odd = replace(get_family("llama3").flavors["debug_gqa"], vocab_size=2056)  # its output stays as it is
    assert not problems(replace(config(filter_fqns=()), training=in_eights), args=odd)
    assert not problems(replace(config(emulate=True), training=Training(local_batch_size=1, seq_len=40)))
    pipelined = replace(
        config(), training=Training(local_batch_size=16, seq_len=8), parallelism=Parallelism(pipeline_parallel_degree=2)
    )
    (problem,) = problems(pipelined, MeshShape(pp=2))
    assert "has 8 (1 samples of 8)" in problem


def test_all_problems_are_reported_before_a_build():
    chosen = config(recipe_name="rowwise", **GATHERS, **PRECOMPUTES)
    with pytest.raises(ConfigError, match="a scale for each row"):
        resolve_job(chosen, 2)


@pytest.mark.parametrize(
    ("recipe", "capability", "expected"),
    [
        (None, (8, 0), "float8 (tensorwise) needs a GPU of compute capability 8.9 or higher, this one has 8.0"),
        (None, (8, 9), None),
        ("tensorwise", (9, 0), None),
        ("rowwise", (8, 9), "float8 (rowwise) needs a GPU of compute capability 9.0 or higher, this one has 8.9"),
        ("rowwise_with_gw_hp", (8, 9), "needs a GPU of compute capability 9.0"),
        ("rowwise", (9, 0), None),
        ("rowwise", (10, 0), None),
    ],
)
def test_a_gpu_without_float8_is_reported(monkeypatch, recipe, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    gpu = torch.device("cuda", 0)
    found = float8_machine_problems(Float8(recipe_name=recipe), gpu)
    assert (expected in found[0] and len(found) == 1) if expected else not found
    assert not float8_machine_problems(Float8(recipe_name=recipe, emulate=True), gpu)


def test_a_cpu_emulates_or_is_reported():
    (problem,) = float8_machine_problems(Float8(), torch.device("cpu"))
    assert "needs a GPU" in problem and "quantize.linear.float8.emulate = true" in problem
    assert not float8_machine_problems(Float8(emulate=True), torch.device("cpu"))


def test_a_missing_torchao_is_reported(monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    (problem,) = float8_machine_problems(Float8(emulate=True), torch.device("cpu"))
    assert "pip install 'torchao>=0.15'" in problem


def test_problems_are_found_without_torch():
    code = (
        "import sys, json; import trainer.job.job;"
        "print(json.dumps([name for name in ('torch', 'torchao') if name in sys.modules]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == []
