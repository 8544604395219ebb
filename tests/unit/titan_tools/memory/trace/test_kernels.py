"""What CUDA's kernels allocate internally, by hand from their sources."""

import pytest
import torch

from titan_tools.memory.trace.kernels import embedding_backward_bytes, gpu_kernels, with_document_attention
from trainer.ranks.gpus import GPUS


@pytest.mark.parametrize(
    ("num_samples", "num_bytes"),
    [
        (1, 0),  # of up to 3072 tokens nothing is sorted
        # 4096 tokens in runs of up to ten, and one more for each token that may begin a run; see the function
        (2, 8 * (3 * 4096 + 2 * 4096 + 409 + 4096) + (409 + 4096) * 64 * 4),
        (32, 8 * (3 * 65536 + 2 * 5000 + 6553 + 5000) + (6553 + 5000) * 64 * 4),  # no more runs than there are tokens
    ],
)
def test_an_embeddings_backward_sorts_tokens_and_adds_up_runs_of_rows(num_samples, num_bytes):
    tokens = torch.empty(num_samples, 2048, dtype=torch.int64, device="meta")
    gradient = torch.empty(num_samples, 2048, 64, dtype=torch.bfloat16, device="meta")
    assert embedding_backward_bytes((gradient, tokens, 5000)) == num_bytes


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
