"""CPU offload: FSDP's own, with the same numbers; on this machine all is on the CPU anyway, so copies are the test."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from converters.common.errors import ConfigError
from tests.dist import runs
from tests.dist.training import Layout, args_of, build_model, train
from trainer.job.job import resolve_job
from trainer.models.registry import get_trainer_family
from trainer.parallel.fsdp import keep_on_cpu

OFFLOAD = {"enable_cpu_offload": True}
BF16 = {"mixed_precision_param": "bfloat16"}
DEGREES = {
    "fsdp 2": (2, {}),
    "fsdp 2 in bf16": (2, {}, BF16),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
    "one rank": (1, {}),
}


SLOW = {"fsdp 2", "pp 2", "one rank", "tp 2"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DEGREES])
def test_numbers_are_those_without_it(pools, name):
    world_size, degrees, *training = DEGREES[name]
    keys = training[0] if training else {}
    without = pools[world_size].run(train, Layout(name, world_size, degrees, keys), "debug_tied", 2)
    offloaded = pools[world_size].run(train, Layout(name, world_size, degrees, keys | OFFLOAD), "debug_tied", 2)
    assert offloaded == without


def offloaded_units(layout: Layout) -> list[tuple[bool, bool]]:
    """Case: of every unit that FSDP gathers, whether its parameters are offloaded, and into pinned memory."""
    model = build_model(layout, "debug_gqa")
    return [
        (parameter.offload_to_cpu, parameter.pin_memory)
        for part in model.parts
        for module in part.modules()
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group)
        for parameter in group.fsdp_params
    ]


def test_every_parameter_is_offloaded_and_none_pinned_where_there_is_no_gpu(pools):
    output = pools[2].run(offloaded_units, Layout("fsdp 2", 2, {}, OFFLOAD))
    assert all(units and set(units) == {(True, False)} for units in output)
    assert {offloaded for offloaded, _ in pools[2].run(offloaded_units, Layout("fsdp 2", 2))[0]} == {False}


def test_going_on_is_bit_equal_with_and_without_it(pools, tmp_path):
    data = runs.make_data(tmp_path)

    def config(dump: str, *, offload: bool):
        training = {"local_batch_size": 1, "enable_cpu_offload": offload}
        return runs.make_config(data, tmp_path / dump, training=training)

    assert pools[2].run(runs.run, config("whole", offload=False)) == ["", ""]
    runs.begin_from(tmp_path / "again", tmp_path / "whole", 2)
    assert pools[2].run(runs.run, config("again", offload=True)) == ["", ""]
    last = "checkpoint/step-4"
    assert not runs.differences(tmp_path / "whole" / last, tmp_path / "again" / last)


def test_all_but_parameters_is_on_the_device():
    with torch.device("meta"):
        model = get_trainer_family("llama3").build_model(args_of("debug_gqa"))
        model.register_buffer("table", torch.zeros(3))
    keep_on_cpu(model, torch.device("meta"))  # a device that is not the CPU
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model.rope.features[0].frequencies_P.device.type == model.table.device.type == "meta"


def test_whole_copies_have_no_fsdp_to_offload_them():
    layout = Layout("ddp", 2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}, OFFLOAD)
    with pytest.raises(ConfigError, match="enable_cpu_offload needs FSDP.*data_parallel_shard_degree = 2"):
        resolve_job(layout.config("debug_gqa"), 2)
