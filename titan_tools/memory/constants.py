"""Constants that both engines of the memory estimate use, with their sources."""

# What memory is used for: both engines count every byte to one of these
PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "recompute",
    "logits_and_loss",
    "all_gather",
    "reduce_scatter",
    "pipeline_buffers",
    "workspaces",
    "other",
)
# Forward runs in the main thread, backward in autograd's: each has a cuBLAS handle of its own, with its own workspace.
CUBLAS_HANDLES = 2
# The two engines may differ by this share of allocated memory; beyond it one of them is wrong.
ENGINES_AGREE = 0.02
# How far an estimate of reserved memory may be off, as a share of it: the limit that the published peaks are held to,
# docs/memory_validation.md.
RESERVED_ERROR = 0.05

# An embedding's backward, ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, torch 2.11 to 2.13: up to this
# many tokens need no sorting; of more, runs of this many rows for one token are summed separately.
EMBEDDING_UNSORTED_TOKENS = 3072
EMBEDDING_ROWS_PER_THREAD = 10
