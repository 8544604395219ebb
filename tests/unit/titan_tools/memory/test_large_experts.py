"""Estimates of Kimi K2 and Moonlight: a rank holds its share of the values, in few layers and in all."""

from dataclasses import replace
from math import prod

import pytest

from converters.families.registry import get_family
from titan_tools.memory.estimate import estimate
from titan_tools.memory.expand import ranks
from titan_tools.memory.expand.ranks import trace_rank
from titan_tools.memory.replay.replay import replay
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import gpu_kernels
from titan_tools.memory.verdict import FITS
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.ranks.gpus import GPUS

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILY, H100 = get_family("deepseek_v3"), GPUS["h100-80"]
# flavor → ranks, degree of expert parallelism, trained values as in their config.json and published weights
MODELS = {"Kimi-K2": (512, 32, 1_026_408_209_408), "Moonlight-16B-A3B": (8, 8, 15_960_108_544)}


def job_of(flavor: str, *, num_layers: int | None = None) -> Job:
    """Fully sharded and recomputed; one sample of 4096 tokens."""
    num_ranks, ep, _ = MODELS[flavor]
    words = ["--model.name=deepseek_v3", f"--model.flavor={flavor}", f"--parallelism.expert_parallel_degree={ep}"]
    words += ["--training.seq_len=4096", "--training.local_batch_size=1", "--activation_checkpoint.mode=full"]
    args = FAMILY.flavors[flavor]
    args = args if num_layers is None else replace(args, num_layers=num_layers)
    return resolve_job(load_config("llama3_8b", words), num_ranks, args=args)


def assert_holds_its_share(peak, *, num_values: int, num_ranks: int) -> None:
    """fp32 values and AdamW's two moments of each, over all ranks; a percent for padding and what is not trained."""
    share = num_values / num_ranks
    assert peak.by_part["parameters"] == pytest.approx(4 * share, rel=0.01)
    assert peak.by_part["optimizer"] == pytest.approx(8 * share, rel=0.01)


@pytest.mark.parametrize(
    "flavor", [pytest.param(each, marks=[pytest.mark.slow] * (each != "Kimi-K2")) for each in MODELS]
)
def test_a_rank_of_few_layers(flavor):
    job = job_of(flavor, num_layers=3)
    sizes = [prod(parameter.shape) for parameter in FAMILY.parameters(job.args) if parameter.is_trained]
    trace = trace_rank(job, rank=0, kernels=gpu_kernels(H100), num_steps=1)
    peak = replay(trace, allocator="expandable").step1
    assert_holds_its_share(peak, num_values=sum(sizes), num_ranks=job.dims.world_size)


@pytest.mark.slow
@pytest.mark.parametrize("flavor", MODELS)
def test_a_whole_model(flavor, monkeypatch):
    """Five layers run, of which the first is dense; those behind the others are copies."""
    captured = []

    def counted(job, **more):
        captured.append(len(job.split.modules[0]) - 3)  # embedding, norm, output
        return capture(job, **more)

    monkeypatch.setattr(ranks, "capture", counted)
    made = estimate(job_of(flavor), gpu=H100, allocator="expandable")
    num_ranks, _, num_values = MODELS[flavor]
    assert_holds_its_share(made.fullest_rank.steady, num_values=num_values, num_ranks=num_ranks)
    assert set(captured) == {5}
    assert made.verdicts[0].verdict == FITS
    assert [each.is_judged for each in made.uneven] == [False, True, False]
