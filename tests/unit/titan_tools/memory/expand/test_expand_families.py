"""Few layers and microbatches of every family against the traces of all of them, event for event and byte for byte."""

from dataclasses import replace

import pytest

from converters.families.registry import all_families, get_family
from tests.unit.titan_tools.memory.expand.test_expand import assert_same
from titan_tools.memory.expand import ranks
from titan_tools.memory.expand.ranks import global_rank, trace_ranks
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.parallel.experts import has_experts

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

KERNELS = Kernels("cuda", "cudnn", "fused", 1.0)


def every(step: int, layers: int) -> tuple[int, ...]:
    return tuple(range(step - 1, layers, step))


# model → family, flavor, its numbers by the number of layers, how many layers of it repeat
MODELS = {
    "llama2": ("llama2", "debug_gqa", lambda layers: {}, 5),
    "llama3, tied": ("llama3", "debug_tied", lambda layers: {}, 5),
    "qwen3": ("qwen3", "debug_gqa", lambda layers: {}, 5),
    "qwen3, experts in every 2nd layer": ("qwen3", "debug_moe", lambda layers: {"sparse_step": 2}, 8),
    "deepseek_v3, two dense layers": ("deepseek_v3", "debug_v3", lambda layers: {"num_dense_layers": 2}, 7),
    "gpt_oss, windows in turn": ("gpt_oss", "debug_window", lambda layers: {"window_layers": every(2, layers)}, 9),
    "llama4, chunks, experts in every 2nd layer": (
        "llama4",
        "debug_maverick",
        lambda layers: {"layers_without_positions": every(4, layers), "sparse_layers": every(2, layers)},
        17,
    ),
}
OP = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"
FULL, DEGREE = "--activation_checkpoint.mode=full", "--parallelism.{}_parallel_degree"
EP = f"{DEGREE.format('expert')}=2"
ONE_BY_ONE = "--parallelism.pipeline_parallel_schedule=1F1B --parallelism.pipeline_parallel_microbatch_size=1"
# layout → ranks, settings, settings of a mixture of experts besides
LAYOUTS = {
    "FSDP 2, op": (2, OP, ""),
    "FSDP 2 x TP 2, full, accumulated": (4, f"{DEGREE.format('tensor')}=2 {FULL} --training.global_batch_size=8", EP),
    "FSDP 2 x PP 2": (4, f"{DEGREE.format('pipeline')}=2 {ONE_BY_ONE} --training.local_batch_size=5 {FULL}", EP),
}


def test_every_family_is_here():
    assert {family for family, *_ in MODELS.values()} == set(all_families())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_few_layers_give_the_trace_of_all(model, layout, monkeypatch):
    (family, flavor, numbers, num_layers), (num_ranks, words, of_experts) = MODELS[model], LAYOUTS[layout]
    num_layers *= 2 if "PP" in layout else 1
    args = replace(get_family(family).flavors[flavor], num_layers=num_layers, **numbers(num_layers))
    of_experts = of_experts if has_experts(get_family(family), args) else ""
    words = f"--model.name={family} --model.flavor={flavor} {words} {of_experts}"
    fixed = """--validation.no_enable --training.seq_len=32 --training.local_batch_size=2
        --parallelism.data_parallel_shard_degree=-1 --parallelism.context_parallel_degree=1
        --training.mixed_precision_param=bfloat16"""
    job = resolve_job(load_config("qwen3_debug", f"{fixed} {words}".split()), num_ranks, args=args)
    num_captured = []

    def counted(job, **more):
        num_captured.append(sum(map(len, job.split.modules)))
        return capture(job, **more)

    monkeypatch.setattr(ranks, "capture", counted)
    traces = trace_ranks(job, kernels=KERNELS)
    assert max(num_captured) < sum(map(len, job.split.modules)), "all layers were captured"
    for pp_rank, trace in traces.items():
        assert_same(trace, capture(job, rank=global_rank(job, pp_rank), kernels=KERNELS))
