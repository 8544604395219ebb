"""Published peaks of torchtitan runs, compared with traces of the build of their date.

The rows come from the project's table if it is next to the repository, else from the few copied here.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from converters.common.sizes import GIB
from tests.published_memory.history import build_of
from tests.published_memory.measure import estimate
from tests.published_memory.rows import read_rows
from tests.published_memory.table import MOST_WORST, document, score
from titan_tools.memory.estimate import estimate as whole_estimate
from titan_tools.memory.verdict import DOES_NOT_FIT, FITS
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = Path(__file__).parents[4].parent / "shared" / "data" / "memory_published.csv"
EXPERT_ROWS, UNREAD_EXPERTS = read_rows((Path(__file__).parents[3] / "published_memory" / "experts.csv").read_text())
EXPERTS = {row.id: row for row in EXPERT_ROWS}
DEEPSEEK = Path(__file__).parents[2] / "trainer" / "config" / "configs" / "deepseek_v3_671b.toml"
# From torchtitan's git log: 6a6f755d2 (#699), 5940ddeb5 (#822), b00e484e1 (#1625), d66b72a6a (#1690)
COPIED = """\
id,grade,date,stack,hardware,gpu_total_gib,model,seq_len,local_bs,world,dp_shard,dp_rep,tp,pp,pp_sched,cp,ac,compile,float8,loss,fsdp_reshard,norm,metric,value_gib,step,source,notes,allocator,flags_known
A01,A,2024-12-03,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,default,python RMSNorm,active,41.17145,>=2,,,expandable,yes
A02,A,2024-12-03,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,default,python RMSNorm,reserved,49.58594,>=2,,,expandable,yes
A03,A,2025-02-05,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,default,python RMSNorm,reserved,42.08,1,,,expandable,yes
A04,A,2025-02-05,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,default,python RMSNorm,reserved,49.59,>=2,,,expandable,yes
A05,A,2025-02-05,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,always,python RMSNorm,reserved,41.89,1,,,expandable,yes
A06,A,2025-02-05,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,always,python RMSNorm,reserved,49.41,>=2,,,expandable,yes
A08,A,2025-02-05,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,never,python RMSNorm,reserved,62.18,>=2,,,expandable,yes
A16,A,2025-08-22,,H100-96GB HBM2e,95.04,Llama3-8B,8192,1,8,8,1,1,1,,1,selective-op,0,none,CE fp32 cast,default,native RMSNorm,reserved,47.38,>=2,,,expandable,yes
A53,A,2025-09-05..11,,H100-96GB HBM2e,95.04,Qwen3-32B,4096,8,16,16,1,1,1,,1,full,0,none,CE fp32 cast,default,native RMSNorm,reserved,OOM,step 10-90,,,expandable,yes
"""  # noqa: E501
ROWS, UNREAD = read_rows(TABLE.read_text() if TABLE.is_file() else COPIED)
QUICK = ("A01", "A02", "A03", "A04")  # one run


@pytest.fixture(scope="module")
def estimates():
    """Estimates by row, each made when asked for."""
    made = {}

    def of(row):
        if row.id not in made:
            made[row.id] = estimate(row)
        return made[row.id]

    return of


def some(*ids):
    return [row for row in ROWS if row.id in ids]


@pytest.mark.parametrize("row", some(*QUICK), ids=lambda row: row.id)
def test_a_published_row(row, estimates):
    made = estimates(row)
    assert made.error == pytest.approx(0, abs=0.01)
    assert made.verdict == FITS


def test_active_memory_to_the_last_digit_that_was_published(estimates):
    (row,) = some("A01")
    assert estimates(row).high_gib == pytest.approx(41.17145, abs=0.001)


def test_step_1_lacks_the_optimizer_states_where_its_step_makes_them(estimates):
    first, steady = (estimates(row).high_gib for row in some("A03", "A04"))
    assert steady - first == pytest.approx(49.59 - 42.08, abs=0.05)


def test_a_row_whose_flags_are_not_known_is_an_interval_without_an_error(estimates):
    (row,) = some("A02")
    made = estimate(replace(row, is_scored=False))
    assert made.error is None
    assert made.low_gib < made.high_gib
    assert made.low_gib <= estimates(row).high_gib <= made.high_gib


def test_the_score_names_what_was_misjudged_and_the_worst_row(estimates):
    good = [estimates(row) for row in some(*QUICK)]
    assert score(good).is_good
    off = replace(good[0], row=replace(good[0].row, id="off", gib=30.0))
    died = replace(good[0], row=replace(good[0].row, id="died", gib=None))
    lived = replace(good[1], row=replace(good[1].row, id="lived"), verdict=DOES_NOT_FIT)
    made = score([*good, off, died, lived])
    assert (made.worst_id, made.misjudged, made.is_good) == ("off", ("died", "lived"), False)
    assert "| died |" in document([*good, died])


def test_every_row_can_be_read():
    assert not UNREAD


def test_the_historical_build_follows_from_columns_alone():
    (row,) = some("A01")
    assert build_of(row) == build_of(replace(row, id="other", gib=1.0, metric="reserved"))
    assert build_of(row).describe() == [
        "python RMSNorm",
        "foreach AdamW",
        "embeddings, norm, output in the root group",
        "last block not resharded",
        "plain loss",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.is_scored and row.id not in QUICK], ids=lambda row: row.id)
def test_every_scored_row(row, estimates):
    made = estimates(row)
    if row.gib is None:
        assert made.verdict == DOES_NOT_FIT
        return
    assert made.verdict != DOES_NOT_FIT
    assert made.error == pytest.approx(0, abs=MOST_WORST)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["M01", "M02"])
def test_a_published_mixture_of_experts(name, estimates):
    """An allocator and a setting of each are not published: an interval, of which both ends are close.

    M01: its option of checkpointing. M02, DeepSeek V3 671B on 512 GPUs: which components were compiled.
    """
    made = estimates(EXPERTS[name])
    assert made.low_gib == pytest.approx(made.row.gib, rel=0.1) and made.high_gib == pytest.approx(
        made.row.gib, rel=0.1
    )
    assert made.verdict == FITS


def test_rows_of_experts_can_be_read():
    assert [each.id for each in UNREAD_EXPERTS if not each.is_by_design] == []
    assert (EXPERTS["M02"].ep, EXPERTS["M02"].pp, build_of(EXPERTS["M02"]).pads_experts) == (32, 8, True)
    assert "graph_trainer" in str(build_of(EXPERTS["M03"]).describe())


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["expandable", "classic"])
def test_deepseek_v3_in_titans_own_build(allocator):
    """M02's run, torchtitan#2107: 671B on 512 GPUs, uncompiled. Which allocator it had is not published."""
    overrides = ["--parallelism.pipeline_parallel_degree=8", "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]
    overrides += ["--parallelism.expert_parallel_degree=32", "--training.local_batch_size=16"]
    overrides += ["--activation_checkpoint.mode=full", "--debug.moe_force_load_balance", "--compile.no_enable"]
    job = resolve_job(load_config(str(DEEPSEEK), overrides), 512)
    made = whole_estimate(job, gpu=GPUS["h100-96"], allocator=allocator)
    assert made.fullest_rank.reserved_bytes / GIB == pytest.approx(60.18, rel=0.1)
    assert made.verdicts[0].verdict == FITS


@pytest.mark.slow
def test_all_rows_together_are_good_enough(estimates):
    assert score([estimates(row) for row in ROWS if row.is_scored]).is_good
