"""Names of metrics in TensorBoard and Weights & Biases: torchtitan v0.2.2's if it has them, in its units."""

from collections.abc import Mapping

_TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "tokens_per_sec_per_rank": "throughput(tps)",
    "tokens_per_sec": "throughput/all_ranks(tps)",
    "tflops_per_rank": "tflops",
    "step_secs": "time_metrics/end_to_end(s)",
    "data_secs": "time_metrics/data_loading(s)",
    "memory_gib": "memory/max_resident(GiB)",  # on a CPU
    "memory_active_gib": "memory/max_active(GiB)",
    "memory_allocated_gib": "memory/max_allocated(GiB)",
    "alloc_retries": "memory/num_alloc_retries",
    "ooms": "memory/num_ooms",
    "ntokens_seen": "n_tokens_seen",
    "validation_loss": "validation_metrics/loss",
    "validation_perplexity": "validation_metrics/perplexity",
    "validation_unigram_entropy": "validation_metrics/unigram_entropy",
    "expert_load": "experts/load",
    "dead_experts": "experts/dead",
}


def torchtitan_tags(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics by tags, grouped by what stands before the first slash. Other names stay."""
    tagged = {}
    for name, value in metrics.items():
        first, slash, suffix = name.partition("/")  # expert_load/layer_0, validation_loss/SOURCE
        tagged[_TAGS.get(first, first) + slash + suffix] = value
    if "mfu" in metrics:
        tagged["mfu(%)"] = 100 * tagged.pop("mfu")
    if metrics.get("step_secs"):
        tagged["time_metrics/data_loading(%)"] = 100 * metrics["data_secs"] / metrics["step_secs"]
    if capacity := tagged.pop("memory_capacity_gib", 0):  # on a GPU, where memory_gib is what its allocator reserves
        reserved = tagged.pop("memory/max_resident(GiB)")
        tagged["memory/max_reserved(GiB)"] = reserved
        tagged["memory/max_reserved(%)"] = 100 * reserved / capacity
        tagged["memory/max_active(%)"] = 100 * metrics["memory_active_gib"] / capacity
    return tagged
