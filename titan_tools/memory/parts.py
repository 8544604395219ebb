"""What memory is taken for: the parts that every byte of a run is counted to, by both engines and in what is told."""

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
