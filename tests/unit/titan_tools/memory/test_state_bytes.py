"""Whole presets hold the sum of their shards: parameters, gradients and moments of each pipeline rank."""

import pytest

from tests.state_bytes import state_bytes, traced_state_bytes
from titan_tools.memory.expand.ranks import trace_ranks
from titan_tools.memory.trace.kernels import gpu_kernels
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS

pytestmark = pytest.mark.usefixtures("one_thread")

TP, EP = "--parallelism.tensor_parallel_degree", "--parallelism.expert_parallel_degree"
PP, SCHEDULE = "--parallelism.pipeline_parallel_degree", "--parallelism.pipeline_parallel_schedule"
FULL, SAMPLES = "--activation_checkpoint.mode=full", "--training.local_batch_size"
SHORT = f"{FULL} --training.seq_len=4096 {SAMPLES}=1"
QUICK = [("llama3_8b", 8, FULL)]
THOROUGH = [
    ("llama3_1b", 8, FULL),  # tied
    ("llama3_8b", 8, "--model.name=llama2 --model.flavor=7B"),
    ("llama3_8b", 8, "--parallelism.data_parallel_replicate_degree=8 --parallelism.data_parallel_shard_degree=1"),
    ("llama3_8b", 8, "--optimizer.implementation=foreach"),
    ("llama3_8b", 8, "--optimizer.state_dtype=bfloat16"),
    ("llama3_70b", 256, f"{TP}=8"),
    ("llama3_70b", 64, f"{PP}=4 {TP}=4 {SCHEDULE}=1F1B {SAMPLES}=8"),
    ("llama3_405b", 512, f"{PP}=8 {TP}=8 {SAMPLES}=16"),
    ("llama3_8b", 8, f"{PP}=4 {TP}=2 {SCHEDULE}=ZBVZeroBubble {SAMPLES}=8 --activation_checkpoint.mode=none"),
    ("llama3_8b_float8", 8, ""),
    ("qwen3_32b", 64, f"{TP}=8 {SAMPLES}=4"),
    ("qwen3_32b", 8, f"--model.flavor=30B-A3B {EP}=8 {SHORT}"),
    ("llama3_8b", 256, f"--model.name=deepseek_v3 --model.flavor=671B {EP}=32 {SHORT}"),
    ("llama3_8b", 8, f"--model.name=gpt_oss --model.flavor=20b {EP}=2 {SHORT}"),
    (
        "llama3_8b",
        64,
        f"--model.name=llama4 --model.flavor=17bx16e_irope {TP}=8 {EP}=8"
        f" --parallelism.expert_tensor_parallel_degree=8 {SHORT}",
    ),
]


@pytest.mark.parametrize(
    ("preset", "world_size", "words"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in THOROUGH)]
)
def test_each_pipeline_rank_holds_the_sum_of_its_shards(preset, world_size, words):
    job = resolve_job(load_config(preset, words.split()), world_size)
    for pp_rank, trace in trace_ranks(job, kernels=gpu_kernels(GPUS["h100-80"])).items():
        assert traced_state_bytes(trace, job) == state_bytes(job, pp_rank), pp_rank
