"""How many rows experts receive in an estimate: headline, verdicts and worst case; what is refused."""

from dataclasses import replace

import pytest

from converters.common.errors import ConfigError
from converters.families.registry import get_family
from titan_tools.memory.command import estimate_from_command_line
from titan_tools.memory.estimate import estimate
from titan_tools.memory.imbalance import imbalance_problems, worst_imbalance
from titan_tools.memory.report import as_json, show
from titan_tools.memory.trace.kernels import return_bytes, send_bytes, sort_bytes
from titan_tools.memory.verdict import nvidia_smi_gib
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.job.record import Job
from trainer.ranks.gpus import GPUS

pytestmark = pytest.mark.usefixtures("one_thread")

FIXED = ["--model.flavor=debug_moe", "--validation.no_enable", "--parallelism.context_parallel_degree=1"]
FIXED += ["--parallelism.data_parallel_shard_degree=-1", "--training.mixed_precision_param=bfloat16"]
EP = "--parallelism.expert_parallel_degree"
# So many tokens that the rows of experts decide the peak
ROWS = ["--training.seq_len=2048", "--activation_checkpoint.mode=none"]


def job(*words: str, world_size: int = 4, **numbers) -> Job:
    args = replace(get_family("qwen3").flavors["debug_moe"], **numbers)
    return resolve_job(load_config("qwen3_debug", [*FIXED, *words]), world_size, args=args)


@pytest.mark.parametrize(
    ("ep", "numbers", "worst"),
    [
        (1, {}, 1),
        (2, {}, 2),  # 12 experts, 3 for each token: all of them on one rank of 2
        (4, {}, 4),
        (12, {}, 4),  # one expert each: a third of each token's rows, of 12 ranks
        (6, {}, 4),
        (4, {"num_experts": 24, "experts_per_token": 8}, 3),  # 6 experts on a rank, of 8 that a token chooses
        (4, {"sparse_step": 2}, 4),
    ],
)
def test_the_worst_case_is_that_every_token_chooses_one_ranks_experts(ep, numbers, worst):
    found = job(f"{EP}={ep}", world_size=12, **numbers)
    assert worst_imbalance(found) == pytest.approx(worst)
    tokens, top_k = 7, found.args.experts_per_token
    most = max(min(top_k, found.args.num_experts // ep), 1) * tokens * ep
    assert worst_imbalance(found) * tokens * top_k == pytest.approx(most if ep > 1 else tokens * top_k)


def test_verdicts_assume_more_rows_than_the_headline(capsys):
    uneven = job(*ROWS, f"{EP}=4")
    found = estimate(uneven, gpu=GPUS["h100-80"], allocator="expandable")
    assert [each.imbalance for each in found.uneven] == [1.0, 1.5, 4.0]
    assert [each.is_judged for each in found.uneven] == [False, True, False]
    balanced, judged, worst = (each.rank for each in found.uneven)
    assert balanced == found.fullest_rank
    assert balanced.reserved_bytes < judged.reserved_bytes < worst.reserved_bytes
    (verdict,) = found.verdicts
    assert verdict.needed_gib == nvidia_smi_gib(judged.reserved_bytes, num_communicators=2)
    assert any("receive 1.5 times the mean" in line for line in found.assumptions)
    assert balanced.nvidia_smi_gib[1] < verdict.needed_gib[1]  # a GPU between the two is not said to be enough
    show(found)
    page = capsys.readouterr().out
    assert "1.5" in page and "in the verdict" in page and "the worst case" in page
    assert [each["imbalance"] for each in as_json(found)["uneven"]] == [1.0, 1.5, 4.0]


@pytest.mark.slow
def test_each_kind_of_pipeline_rank_is_judged():
    words = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"]
    words += ["--parallelism.pipeline_parallel_microbatch_size=1", "--training.local_batch_size=2", f"{EP}=2"]
    found = estimate(job(*ROWS, *words), gpu=None, allocator="expandable")
    assert len(found.ranks) == 2
    assert [each.imbalance for each in found.uneven] == [1.0, 1.5, 2.0]
    reserved = [each.rank.reserved_bytes for each in found.uneven]
    assert reserved == sorted(reserved) and reserved[0] == found.fullest_rank.reserved_bytes


def test_without_expert_parallelism_the_router_has_no_effect():
    found = estimate(job(), gpu=None, allocator="expandable")
    assert not found.uneven
    assert "expert parallelism" not in " ".join(found.assumptions)


@pytest.mark.parametrize(
    ("words", "imbalance", "message"),
    [
        (["--model.flavor=debug_gqa"], 2.0, "the model has no experts"),
        ([], 2.0, "without expert parallelism"),
        ([f"{EP}=2", "--debug.moe_force_load_balance"], 2.0, "moe_force_load_balance"),
        ([f"{EP}=2"], 2.5, "nearest: 2"),
        ([f"{EP}=2"], 0.5, "nearest: 1"),
        ([f"{EP}=2"], float("nan"), "not between 1"),
    ],
)
def test_an_imbalance_that_cannot_be_is_refused(words, imbalance, message):
    found = resolve_job(load_config("qwen3_debug", [*FIXED, *words]), 4)
    (problem,) = imbalance_problems(found, imbalance)
    assert message in problem
    assert not imbalance_problems(found, None)
    with pytest.raises(ConfigError, match="--imbalance"):
        estimate_from_command_line(
            "qwen3_debug", [*FIXED, *words], world_size=4, gpu_text=None, as_json=True, imbalance=imbalance
        )


@pytest.mark.slow
def test_the_page_and_json_show_the_imbalance_that_is_asked_for(capsys):
    found = estimate(job(f"{EP}=2", world_size=2), gpu=GPUS["h200"], allocator="expandable", imbalance=1.25)
    show(found)
    page = capsys.readouterr().out
    assert "1.25" in page and "in the verdict" in page and "the worst case" in page
    shown = as_json(found)
    assert shown["mesh"]["ep"] == 2
    assert [each["imbalance"] for each in shown["uneven"]] == [1.0, 1.25, 2.0]
    assert shown["uneven"][0]["reserved_gib"] == shown["peak"]["reserved_gib"]


def test_what_kernels_of_experts_allocate():
    """Rows before they are sorted and their positions; rows before they go back; cub's copies of a sort."""
    import torch

    rows = torch.empty(10, 64, dtype=torch.bfloat16, device="meta")
    assert send_bytes((rows, None, None, "group", 15)) == 15 * (64 * 2 + 8)
    assert return_bytes((rows, None, None, "group", 7)) == 10 * 64 * 2
    ids = torch.empty(100_000, dtype=torch.int64, device="meta")
    assert sort_bytes((ids,)) == 100_000 * 24
    assert sort_bytes((ids[:4096],)) == 0
