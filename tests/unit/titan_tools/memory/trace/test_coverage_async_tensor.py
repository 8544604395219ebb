"""Asynchronous tensor parallelism in a trace: torch's fused products, their workspace, what a step keeps of them."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.distributed_c10d import _get_default_group
from torch.profiler import ProfilerActivity, profile, record_function

from converters.common.errors import UnsupportedError
from converters.common.sizes import MIB
from converters.families.registry import get_family
from tests.dist.training import Layout, args_of
from tests.real_memory import _calls
from titan_tools.memory.command import estimate_from_command_line
from titan_tools.memory.estimate import sharing_compiled_code
from titan_tools.memory.expand.ranks import kinds_of_ranks, trace_rank, traced_kinds
from titan_tools.memory.report import gib
from titan_tools.memory.trace import async_tensor
from titan_tools.memory.trace.async_tensor import BACKEND_STREAM, SYMMETRIC_GRANULE, fused_products, trace_async_tp
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels, gpu_kernels, sum_bytes
from titan_tools.memory.trace.recorder import Recorder
from titan_tools.memory.trace.tensors import RecordedTensors
from trainer.config.load import load_config
from trainer.config.sections import Config
from trainer.job.job import resolve
from trainer.job.record import Job
from trainer.ranks.gpus import GPUS
from trainer.ranks.process_group import fake_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

ARGS = replace(args_of("debug_gqa"), num_layers=2)
SAMPLES, LENGTH, TP = 2, 64, 2


def job(*, is_async: bool = True) -> Config:
    parallelism = {"tensor_parallel_degree": TP, "enable_async_tensor_parallel": is_async}
    training = {"seq_len": LENGTH, "local_batch_size": SAMPLES, "mixed_precision_param": "bfloat16", "loss_chunks": 2}
    sections = {
        "compile": {"enable": True, "components": ("model",)},
        "activation_checkpoint": {"mode": "full"},
    }
    return Layout("async", 4, parallelism, training, sections).config("debug_gqa")


# --- the operations


def products(recorder: Recorder) -> None:
    """What a layer does in forward, and in backward, of 2 ranks: A is 2 x 6 x 32 here."""
    config = job()
    group = _get_default_group().group_name
    with trace_async_tp(config, Kernels(multicast=True), recorder):
        operations = fused_products()
        shard = torch.ones(6, 2, 32).transpose(0, 1)
        weights = [torch.ones(32, 8), torch.ones(32, 40)]
        kept, outputs = operations.fused_all_gather_matmul.default(shard, weights, 1, group, return_A=False)
        assert kept is None and [output.shape for output in outputs] == [(2, 12, 8), (2, 12, 40)]
        gathered, _ = operations.fused_all_gather_matmul.default(shard, weights[:1], 1, group, return_A=True)
        assert gathered.shape == (2, 12, 32)
        tokens = torch.ones(10, 32)  # an expert layer's
        kept, (output,) = operations.fused_all_gather_matmul.default(tokens, weights[:1], 0, group, return_A=False)
        assert kept is None and output.shape == (20, 8)
        gathered, (output,) = operations.fused_all_gather_matmul.default(tokens, weights[:1], 0, group, return_A=True)
        assert gathered.shape == (20, 32) and output.shape == (20, 8)
        whole = torch.ones(12, 2, 40).transpose(0, 1)
        scattered = operations.fused_matmul_reduce_scatter.default(whole, torch.ones(40, 72), "sum", 1, group)
        assert scattered.shape == (2, 6, 72) and scattered.is_contiguous()


def test_fused_products_ask_for_the_same_in_a_trace_as_in_real_memory(monkeypatch):
    recorder = Recorder()
    with fake_ranks(TP, rank=0), RecordedTensors(recorder, {}):
        products(recorder)
    blocks = recorder.trace.blocks
    traced = [blocks[n].num_bytes if n >= 0 else -blocks[~n].num_bytes for _, n in recorder.trace.events()]

    own = async_tensor._workspace

    def workspace(*args, **kwargs):
        handle = own(*args, **kwargs)
        get = handle.get_buffer
        handle.get_buffer = record_function("symmetric memory")(get)
        return handle

    monkeypatch.setattr(async_tensor, "_workspace", workspace)
    with fake_ranks(TP, rank=0), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        products(Recorder())
    real, symmetric = [], set()
    for call in _calls(seen.profiler.kineto_results.experimental_event_tree()):
        if call.is_within("symmetric memory"):
            symmetric.add(call.address)
        elif call.num_bytes < 0 and call.address in symmetric:
            symmetric.remove(call.address)
        else:
            real.append(call.num_bytes)
    assert traced == real
    assert {3072, 768, 3840, 6912} <= set(traced)  # gathered, two outputs, and stacked partial sums: 4 bytes each
    assert traced.count(20 * 32 * 4) == 1  # the other one is gathered in symmetric memory
    assert recorder.trace.symmetric_bytes == SYMMETRIC_GRANULE


@pytest.mark.parametrize(
    ("gpu", "shape", "gather_dim", "is_multicast"),
    [
        ("h100-80", (1024, 8), 0, True),
        ("b200", (1024, 8), 0, True),
        ("h100-80", (1025, 8), 0, False),
        ("h100-80", (1, 1024, 8), 1, False),
        ("a100-80", (1024, 8), 0, False),
        ("rtx5090", (1024, 8), 0, False),
        ("mi300x", (1024, 8), 0, False),
    ],
)
def test_short_gathers_over_the_first_dim_are_multicast_where_the_gpu_can(gpu, shape, gather_dim, is_multicast):
    recorder = Recorder()
    with fake_ranks(TP, rank=0), trace_async_tp(job(), gpu_kernels(GPUS[gpu]), recorder):
        group = _get_default_group().group_name
        shard, weight = torch.ones(shape), torch.ones(8, 8)
        fused_products().fused_all_gather_matmul.default(shard, [weight], gather_dim, group, return_A=False)
        uses = symmetric._should_use_multimem_all_gather_matmul(shard, gather_dim, group, False)
    assert uses == is_multicast


def test_only_the_tensor_parallel_group_is_announced_and_an_experimental_kernel_is_refused(monkeypatch):
    with fake_ranks(4, rank=2), trace_async_tp(job(), Kernels(), Recorder()):
        announced = [
            symmetric.is_symm_mem_enabled_for_group(dist.new_group(ranks).group_name)
            for ranks in ([2, 3], [0, 2], [0, 1, 2, 3], [1, 2])
        ]
        assert announced == [True, False, False, False]
        monkeypatch.setenv("TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP", "1")
        with pytest.raises(UnsupportedError, match="TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"):
            first_dim = (torch.ones(4, 8), [torch.ones(8, 8)], 0, _get_default_group().group_name)
            fused_products().fused_all_gather_matmul.default(*first_dim)
    with fake_ranks(4, rank=2):  # and what was patched is torch's again
        assert not symmetric.is_symm_mem_enabled_for_group(_get_default_group().group_name)


def test_the_workspace_holds_the_largest_request_and_a_signal_pad():
    recorder = Recorder()
    with fake_ranks(TP, rank=0), RecordedTensors(recorder, {}), trace_async_tp(job(), Kernels(), recorder):
        group = _get_default_group().group_name
        for num_bytes, wanted in ((100, 2), (2 * MIB - 9216, 2), (2 * MIB - 9215, 4), (MIB, 4)):
            symmetric.get_symm_mem_workspace(group, num_bytes)
            assert recorder.trace.symmetric_bytes == wanted * MIB


def test_sums_of_more_than_two_gib_in_16_bits_are_added_up_in_fp32():
    def taken(*shape, dtype=torch.bfloat16):
        return sum_bytes((torch.empty(shape, dtype=dtype, device="meta"), [1]))

    assert taken(16, 8, 1024, 8192) == 0  # 2 GiB
    assert taken(16, 8, 1025, 8192) == 16 * 1025 * 8192 * 4
    assert taken(16, 8, 1025, 8192, dtype=torch.float32) == 0


def test_both_handles_of_cublas_have_a_workspace_for_the_other_stream():
    recorder = Recorder()
    with fake_ranks(TP, rank=0), trace_async_tp(job(), gpu_kernels(GPUS["h100-80"]), recorder):
        blocks = [(block.num_bytes, block.stream, block.part) for block in recorder.trace.blocks]
    assert blocks == [(32 * MIB, BACKEND_STREAM, "workspaces")] * 2


# --- steps


@pytest.mark.slow
def test_a_step_fuses_what_tensor_parallelism_moves_and_deep_models_come_out_of_few_layers():
    args = replace(ARGS, num_layers=7)
    config = job()
    dims, kernels = resolve(config.parallelism, 4), gpu_kernels(GPUS["h100-80"])
    trace = capture(Job.of(config, args, dims), rank=0, kernels=kernels)
    symmetric = [block for block in trace.blocks if block.stream == BACKEND_STREAM]
    assert [(block.num_bytes, block.part) for block in symmetric] == [(32 * MIB, "workspaces")] * 2
    assert trace.symmetric_bytes == SYMMETRIC_GRANULE
    assert trace_rank(Job.of(config, args, dims), rank=0, kernels=kernels) == trace
    plain = capture(Job.of(job(is_async=False), args, dims), rank=0, kernels=kernels)
    assert plain.symmetric_bytes == 0 and not [block for block in plain.blocks if block.stream == BACKEND_STREAM]
    # Whole hidden states, gathered for the gradients of weights: the fused products keep as many as the plain ones
    whole = SAMPLES * LENGTH * args.dim * 2
    assert [sum(block.num_bytes == whole for block in each.blocks) > 0 for each in (trace, plain)] == [True, True]


@pytest.mark.slow
def test_symmetric_memory_is_reported_in_addition_to_reserved_memory(capsys):
    words = ["parallelism.tensor_parallel_degree=2", "parallelism.enable_async_tensor_parallel", "compile.enable"]
    words += ["parallelism.data_parallel_shard_degree=2", "parallelism.pipeline_parallel_degree=1"]
    words += ["training.mixed_precision_param=bfloat16", "training.local_batch_size=64", "training.seq_len=256"]
    words.append("training.global_batch_size=-1")
    settings = {"world_size": 4, "gpu_text": "h100-80"}
    found = {}
    for is_async in ("true", "false"):
        chosen = [f"--{word}" for word in [*words, f"parallelism.enable_async_tensor_parallel={is_async}"]]
        assert estimate_from_command_line("debug", chosen, as_json=True, **settings) == 0
        found[is_async] = json.loads(capsys.readouterr().out)
    assert found["false"]["symmetric_memory_gib"] == 0
    dim = get_family("llama3").flavors[load_config("debug").model.flavor].dim
    pieces = 2 * (64 * 256 // 2 * dim * 2)  # two, of what is scattered
    assert found["true"]["symmetric_memory_gib"] == gib(pieces + 2 * MIB)  # of which the signal pad takes 9 KiB
    for is_async, each in found.items():
        assert ("TORCH_SYMMMEM" in "".join(each["assumptions"])) == (is_async == "true")
        (rank,) = each["per_rank"]
        symmetric = [rank["nvidia_smi_gib"][i] - rank["reserved_gib"] * factor for i, factor in enumerate((0.95, 1.05))]
        own = each["symmetric_memory_gib"]
        communicators = 3  # of all ranks, of FSDP and of TP
        assert symmetric == pytest.approx([0.5 + communicators * 0.2 + own, 0.5 + communicators * 1.0 + own], abs=0.01)
        assert each["verdicts"]["h100-80"]["needed_gib"] == rank["nvidia_smi_gib"]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pp"), [("1F1B", 2), ("Interleaved1F1B", 2), ("1F1B", 3)])
def test_pipeline_ranks_share_compiled_code_and_are_traced_as_each_alone(schedule, pp):
    config = job()
    parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=1,
    )
    config = replace(config, parallelism=parallelism)
    args = replace(ARGS, num_layers=2 * pp)
    made, kernels = Job.of(config, args, resolve(parallelism, TP * pp)), gpu_kernels(GPUS["h100-80"])
    kinds = kinds_of_ranks(made)
    assert len(kinds) == pp
    with sharing_compiled_code(config):
        shared = dict(traced_kinds(made, kinds, kernels=kernels))
    alone = dict(pair for kind in kinds for pair in traced_kinds(made, [kind], kernels=kernels))
    assert shared == alone
    assert all(trace.symmetric_bytes == SYMMETRIC_GRANULE for trace in shared.values())
