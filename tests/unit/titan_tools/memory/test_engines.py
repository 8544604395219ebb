"""Both engines on whole models with a GPU's kernels: within 2 % of allocated memory, or the closed form is silent."""

import pytest
import torch

from titan_tools.memory.constants import ENGINES_AGREE
from titan_tools.memory.estimate import estimate
from titan_tools.memory.formula.activations import embedding_backward_bytes
from titan_tools.memory.formula.closed_form import instants
from titan_tools.memory.formula.run_shape import run_shape
from titan_tools.memory.trace.kernels import embedding_backward_bytes as traced_embedding_backward_bytes
from titan_tools.memory.trace.kernels import gpu_kernels, with_document_attention
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS

pytestmark = pytest.mark.usefixtures("one_thread")

NONE, FULL = "--activation_checkpoint.mode=none", "--activation_checkpoint.mode=full"
OP = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"
TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
PLAIN, DDP = "--training.loss=plain", "--parallelism.data_parallel_shard_degree=1"
REPLICAS = "--parallelism.data_parallel_replicate_degree"
PP, SAMPLES = "--parallelism.pipeline_parallel_degree", "--training.local_batch_size"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
# preset, ranks, overrides
QUICK = [
    ("llama3_8b", 8, OP),
    ("llama3_8b", 8, f"{REPLICAS}=8 {DDP} {NONE} {PLAIN}"),
]
THOROUGH = [
    ("llama3_8b", 16, f"{TP}=2 {CP}=2 {FULL}"),
    ("llama3_70b", 256, f"{TP}=8 {OP}"),
    ("llama3_1b", 8, FULL),
    ("llama3_8b", 1, OP),
    ("llama3_8b", 8, NONE),
    ("llama3_8b", 8, f"{FULL} {PLAIN} {SAMPLES}=4"),
    ("llama3_8b", 8, "--activation_checkpoint.selective_ac_option=2"),
    ("llama3_8b", 8, f"{SAMPLES}=1 --training.global_batch_size=32"),
    ("llama3_8b", 8, "--training.enable_cpu_offload"),
    ("llama3_8b", 8, "--optimizer.implementation=foreach"),
    ("llama3_8b", 8, "--optimizer.implementation=for-loop"),
    ("llama3_8b", 8, "--optimizer.state_dtype=bfloat16"),
    ("llama3_8b", 8, "--parallelism.fsdp_reshard_after_forward=never"),
    ("llama3_8b", 8, f"{TP}=8"),
    ("llama3_8b", 8, f"{PP}=4 {SCHEDULE}=1F1B {SAMPLES}=8"),
    ("llama3_8b", 8, f"{PP}=4 {SCHEDULE}=Interleaved1F1B {SAMPLES}=8 {FULL}"),
    ("llama3_8b", 8, f"{PP}=4 {SCHEDULE}=GPipe {SAMPLES}=4"),
    ("llama3_8b", 8, f"{PP}=2 {SCHEDULE}=LoopedBFS {SAMPLES}=4"),
    ("llama3_8b", 8, f"{PP}=2 {SCHEDULE}=InterleavedZeroBubble {SAMPLES}=4 {NONE}"),
    ("llama3_8b", 8, f"{PP}=4 {TP}=2 {SCHEDULE}=ZBVZeroBubble {SAMPLES}=8 {NONE}"),
    ("llama3_8b", 8, "--training.mixed_precision_param=float32"),
    ("llama3_1b", 8, f"{PP}=2 {SCHEDULE}=1F1B {SAMPLES}=4 --training.mixed_precision_param=float32"),
    ("llama3_8b", 16, f"{REPLICAS}=2 {FULL}"),
    ("llama3_8b", 32, f"{CP}=8 --training.seq_len=131072 {FULL}"),
    ("llama3_8b", 64, f"{TP}=8 {FULL}"),
    ("llama3_8b", 64, f"{TP}=8 {PLAIN} --parallelism.disable_loss_parallel"),
    ("llama3_70b", 256, f"{TP}=8 {NONE}"),
    ("llama3_70b", 64, f"{PP}=4 {TP}=4 {SCHEDULE}=1F1B {SAMPLES}=8"),
    ("qwen3_32b", 64, f"{TP}=8 {SAMPLES}=4"),
    ("llama3_405b", 512, f"{TP}=8"),
    ("llama3_405b", 512, f"{PP}=8 {TP}=8 {SAMPLES}=16"),
]


@pytest.mark.parametrize(("preset", "world_size", "words"), QUICK)
def test_both_engines_agree_on_whole_models(preset, world_size, words):
    _compare(preset, world_size, words)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "world_size", "words"), THOROUGH)
def test_both_engines_agree_on_whole_models_in_more_layouts(preset, world_size, words):
    _compare(preset, world_size, words)


def _compare(preset: str, world_size: int, words: str) -> None:
    config = load_config(preset, words.split())
    found = estimate(resolve_job(config, world_size=world_size), gpu=None, allocator="expandable")
    assert not found.formula_gaps
    assert max(abs(rank.engines_differ_by) for rank in found.ranks) <= ENGINES_AGREE
    assert not found.disagreeing


@pytest.mark.parametrize("num_samples", [1, 2, 32])
def test_both_engines_know_of_the_same_sums_inside_an_embeddings_backward(num_samples):
    config = load_config("llama3_8b", [f"{SAMPLES}={num_samples}", "--training.seq_len=2048"])
    run = run_shape(resolve_job(config, world_size=8))
    tokens = torch.empty(num_samples, 2048, dtype=torch.int64, device="meta")
    gradient = torch.empty(num_samples, 2048, 4096, dtype=torch.bfloat16, device="meta")
    traced = traced_embedding_backward_bytes((gradient, tokens, run.args.vocab_size))
    assert embedding_backward_bytes(run) == traced
    assert (traced > 0) == (num_samples > 1)


def test_a_pipelines_embedding_adds_up_gradients_while_its_kernel_holds_sums():
    """On 405B in 1F1B they are more than 1 % of the first rank, of larger microbatches more than 3 %."""

    words = f"{PP}=2 {TP}=1 {SCHEDULE}=1F1B {SAMPLES}=4"
    run = run_shape(resolve_job(load_config("llama3_8b", words.split()), world_size=8))
    found = [i for i in instants(run, pp_rank=0, gpu=GPUS["h100-80"]) if "embedding added up" in i.when]
    workspaces = [instant.parts["workspaces"] - 2 * 32 * 2**20 for instant in found]
    assert workspaces == [0, *[embedding_backward_bytes(run)] * 3]


def test_attention_within_documents_takes_a_padded_row_for_each_of_them_or_a_sum():
    """flash_api.cpp, mha_varlen_bwd: 2 x 1024 tokens are 4 documents of 512, each with 128 more rows."""
    queries = torch.empty(2, 1024, 4, 40, dtype=torch.bfloat16, device="meta")
    grouped = queries[:, :, :2]
    backward = torch.ops.titan.attend_within_documents_backward.default
    flex, varlen = (
        with_document_attention(gpu_kernels(GPUS["h100-80"]), kernel).workspaces[backward]
        for kernel in ("flex", "varlen")
    )
    rows = (2 * 1024 + 4 * 128) * 4 * (64 + 1) * 4
    assert varlen((queries, queries, queries, queries)) == rows
    assert varlen((queries, queries, grouped, grouped)) == rows + 2 * 2 * 1024 * 4 * 40 * 2
    assert flex((queries, queries, grouped, grouped)) == 2 * 1024 * 4 * 4


def test_attentions_backward_takes_padded_rows_and_gradients_per_query_head():
    """flash_api.cpp, mha_bwd: 200 queries of 40 as 256 of 64 in fp32, a row sum each; dk and dv in bf16 if grouped."""
    queries = torch.empty(2, 4, 200, 40, dtype=torch.bfloat16, device="meta")
    grouped = queries[:, :2]
    flash, cudnn = (gpu_kernels(GPUS[name]).workspaces for name in ("a100-80", "h100-80"))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows = 2 * 4 * 256 * (64 + 1) * 4
    assert flash[backward]((queries, queries, queries, queries)) == rows
    assert flash[backward]((queries, queries, grouped, grouped)) == rows + 2 * 2 * 200 * 4 * 40 * 2
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    assert cudnn[backward]((queries, queries, grouped, grouped)) == 2 * 4 * 200 * (40 + 1) * 4
