"""Tags of TensorBoard and Weights & Biases are torchtitan's, in its units."""

import pytest

from trainer.observability.tags import torchtitan_tags

# The keys of MetricsProcessor.log in torchtitan v0.2.2's components/metrics.py, and those that Trainer.train_step adds
TORCHTITANS = {
    *("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm"),
    *("throughput(tps)", "tflops", "mfu(%)"),
    *("time_metrics/end_to_end(s)", "time_metrics/data_loading(s)", "time_metrics/data_loading(%)"),
    *("memory/max_active(GiB)", "memory/max_active(%)", "memory/max_reserved(GiB)", "memory/max_reserved(%)"),
    *("memory/num_alloc_retries", "memory/num_ooms", "n_tokens_seen", "lr"),
}
STEP = {
    "loss": 2.0,
    "max_loss": 2.5,
    "grad_norm": 1.0,
    "lr": 0.1,
    "tokens_per_sec": 16.0,
    "tokens_per_sec_per_rank": 8.0,
}
STEP |= {"tflops_per_rank": 400.0, "step_secs": 2.0, "data_secs": 0.5, "ntokens_seen": 100, "skipped_steps": 0}
ON_GPU = {"mfu": 0.4, "memory_gib": 70.0, "memory_allocated_gib": 50.0, "memory_active_gib": 60.0}
ON_GPU |= {"memory_capacity_gib": 80.0, "alloc_retries": 1, "ooms": 2}
OURS = {"throughput/all_ranks(tps)", "memory/max_allocated(GiB)", "skipped_steps"}


def test_a_step_on_a_gpu_has_all_tags_of_torchtitan():
    tagged = torchtitan_tags(STEP | ON_GPU)
    assert tagged.keys() == TORCHTITANS | OURS
    assert tagged["mfu(%)"] == pytest.approx(40) and tagged["time_metrics/data_loading(%)"] == pytest.approx(25)
    assert (tagged["memory/max_reserved(GiB)"], tagged["memory/max_reserved(%)"]) == (70, pytest.approx(87.5))
    assert (tagged["memory/max_active(GiB)"], tagged["memory/max_active(%)"]) == (60, pytest.approx(75))
    assert (tagged["throughput(tps)"], tagged["throughput/all_ranks(tps)"]) == (8, 16)


def test_a_step_on_a_cpu_has_the_memory_of_its_process():
    tagged = torchtitan_tags(STEP | {"memory_gib": 0.5})
    assert {tag for tag in tagged if tag.startswith("memory/")} == {"memory/max_resident(GiB)"}
    assert tagged.keys() - {"memory/max_resident(GiB)"} - OURS <= TORCHTITANS


def test_validation_and_experts_are_groups():
    validation = {"validation_loss": 3.0, "validation_perplexity": 20.0, "validation_loss/code": 2.0}
    assert torchtitan_tags(validation) == {
        "validation_metrics/loss": 3.0,
        "validation_metrics/perplexity": 20.0,
        "validation_metrics/loss/code": 2.0,
    }
    experts = {"expert_load": 1.5, "dead_experts": 1, "expert_load/layer_0": 1.5, "dead_experts/layer_0": 1}
    assert torchtitan_tags(experts) == {
        "experts/load": 1.5,
        "experts/dead": 1,
        "experts/load/layer_0": 1.5,
        "experts/dead/layer_0": 1,
    }
    assert torchtitan_tags({"of_ones_own": 1.0}) == {"of_ones_own": 1.0}
