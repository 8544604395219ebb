"""What is rebuilt of torchtitan for published runs: it computes what our modules do, and reads rows of any layout."""

import csv
import importlib.util
import io
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from converters.common.errors import ConfigError, UnsupportedError
from converters.families import llama3
from converters.families.args import DecoderArgs
from converters.families.blocks import Experts, rope_of
from converters.families.qwen3 import Qwen3Args
from converters.families.registry import get_family
from converters.layout.mesh_shape import MeshShape
from tests.published_memory import historical_modules as rebuilt
from tests.published_memory.cells import Loss
from tests.published_memory.historical_build import historical_build
from tests.published_memory.historical_experts import complex_rotate, padded_experts
from tests.published_memory.history import (
    build_of,
    microbatch_size,
    possible_dates,
    possible_microbatch_sizes,
    settings_of,
)
from tests.published_memory.measure import RowEstimate, _variants, estimate
from tests.published_memory.rows import read_rows
from tests.published_memory.table import markdown, score
from titan_tools.memory.expand.layers import expand_layers, shallow_model
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.kernels import Kernels
from trainer.config.load import load_config
from trainer.job.record import Job
from trainer.loss.cross_entropy import cross_entropy_sum
from trainer.models.attention import GroupedQueryAttention
from trainer.models.moe import MoE
from trainer.models.rope import RotaryAngles, rotate

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parents[4] / "scripts" / "validate_memory.py"
ARGS = DecoderArgs(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden=64, vocab_size=64)
PIPELINED = """\
id,grade,date,stack,hardware,gpu_total_gib,model,seq_len,local_bs,world,dp_shard,dp_rep,tp,pp,pp_sched,cp,ac,compile,\
float8,loss,fsdp_reshard,norm,metric,value_gib,step,source,notes,allocator,flags_known
X1,A,2024-12-26,,H100-96GB HBM2e,95.04,Llama3.1-8B,256,8,16,2,1,2,4,Interleaved 1F1B,1,full,1,rowwise,CE fp32 cast,\
default,python RMSNorm,reserved,70.0,>=2,,,classic,no
"""


def row_of(text, **cells):
    """The one row of a table, with other cells."""
    lines = list(csv.DictReader(io.StringIO(text)))
    (row,), refused = read_rows(table_of([lines[0] | cells]))
    assert not refused
    return row


def table_of(lines):
    out = io.StringIO()
    writer = csv.DictWriter(out, lines[0])
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


@pytest.mark.parametrize(
    ("family", "attend", "cache"),
    [
        ("llama3", rebuilt.llama_attention, rebuilt.llama_freqs_cis),
        ("qwen3", rebuilt.qwen_attention, rebuilt.qwen_rope_cache),
        ("qwen3", rebuilt.grouped_qwen_attention, rebuilt.qwen_rope_cache),
    ],
)
def test_attention_computes_what_ours_does(family, attend, cache):
    torch.manual_seed(0)
    kind = get_family(family).block(Qwen3Args(**asdict(ARGS)) if family == "qwen3" else ARGS, 0).attention
    attention = GroupedQueryAttention(ARGS, kind)
    x, positions = torch.randn(2, 6, ARGS.dim), torch.arange(6)
    ours = RotaryAngles(kind.rope)
    expected = attention(x, (ours(positions),))
    for points in (positions, positions.expand(2, 6)):
        assert torch.allclose(attend(attention, x, (cache(ours, points),)), expected, atol=1e-5)


@pytest.mark.parametrize("compute", [rebuilt.scatter_added_experts, padded_experts])
def test_experts_compute_what_ours_do(compute):
    torch.manual_seed(0)
    moe = MoE(32, Experts(num=6, top_k=2, hidden=48, shared_hidden=40 * (compute is padded_experts)))
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.3)
    moe.expert_bias.uniform_(-0.1, 0.1)
    x = torch.randn(2, 5, 32)
    assert torch.allclose(compute(moe, x), moe(x), atol=1e-5)


def test_the_complex_rotation_computes_what_ours_does():
    torch.manual_seed(0)
    rope, x = RotaryAngles(rope_of(ARGS, pairs=True)), torch.randn(2, 6, 4, 8)
    rotations = rope(torch.arange(6))
    assert torch.allclose(complex_rotate(x, rebuilt.llama_freqs_cis(rope, torch.arange(6))), rotate(x, rotations))


def test_experts_of_december_2025_pad_their_rows_and_weight_them_in_fp32():
    row = row_of(PIPELINED, model="DeepSeek V3 16B", date="2025-12-04", seq_len="512", world="8", dp_shard="4", ep="2")
    row = replace(row, tp=1, pp=2, schedule="1F1B", checkpointing=("none", "op"), is_compiled=False, float8="")
    args = replace(get_family("deepseek_v3").flavors["debug_v3"], num_layers=3)
    job = Job.of(load_config(settings_of(row)[0], settings_of(row)[1:]), args, MeshShape(pp=2, dp_shard=4, ep=2))
    assert build_of(row).pads_experts and not build_of(row).num_logits_kept
    with historical_build(build_of(row), tp=1):
        trace = capture(job, rank=4, kernels=Kernels("cuda", "cudnn", "fused"), num_steps=1)
    rows, padded, dim = 512 * 3, 512 * 3 + 8 * 12 // 2, args.dim
    sizes = Counter(block.num_bytes for block in trace.blocks if block.point.phase == "forward")
    assert sizes[rows * dim * 4] >= 1  # to be weighted
    assert sizes[(rows + 1) * dim * 2] >= 2 and sizes[padded * dim * 2] >= 2  # before and after the experts


@pytest.mark.parametrize("rms_norm", [rebuilt.python_rms_norm, rebuilt.composite_rms_norm])
def test_norms_compute_what_torch_does(rms_norm):
    torch.manual_seed(0)
    norm = nn.RMSNorm(32, eps=1e-5)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 32)
    assert torch.allclose(rms_norm(norm, x), norm(x), atol=1e-6)


@pytest.mark.parametrize("chunks", [0, 4])
@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_the_loss_computes_what_ours_does_and_keeps_the_logits_of_a_step(chunks, num_kept):
    torch.manual_seed(0)
    row = row_of(PIPELINED)
    build = replace(build_of(row), loss_chunks=chunks, num_logits_kept=num_kept)
    made = []

    def forward(x, positions):
        made.append(torch.randn(2, 8, 16))
        return made[-1]

    loss = rebuilt.LossOfLogits(forward, None, build)
    targets = torch.randint(16, (2, 8))
    for _ in range(3):
        for _ in range(max(num_kept, 1)):
            computed = loss(None, None, targets)
            assert torch.allclose(computed, cross_entropy_sum(made[-1], targets))
        assert [id(kept) for kept in loss._kept] == [id(each) for each in made[len(made) - num_kept :]]


def test_a_row_says_its_layout_in_keys_of_ours():
    row = row_of(PIPELINED)
    preset, *overrides = settings_of(row)
    config = load_config(preset, overrides)
    assert (config.model.name, config.model.flavor) == ("llama3", "8B")
    assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    # four ranks, so four microbatches
    assert config.parallelism.pipeline_parallel_microbatch_size == 2
    assert (build_of(row).num_logits_kept, build_of(row).has_ends_in_root) == (4, True)
    assert config.float8.recipe_name == "rowwise"
    assert config.compile.components == ("model",)


def test_the_output_layer_of_a_float8_run_stays_in_bf16():
    preset, *overrides = settings_of(row_of(PIPELINED, float8="tensorwise dynamic + fp8 all-gather"))
    float8 = load_config(preset, overrides).float8
    assert float8.filter_fqns == ("output",)
    assert (float8.recipe_name, float8.enable_fsdp_float8_all_gather) == (None, True)


def test_asynchronous_tensor_parallelism_is_found_in_a_row_s_words():
    for words, has_it in (("3D + AsyncTP", True), ("async TP", True), ("no async TP", False), ("", False)):
        preset, *overrides = settings_of(row_of(PIPELINED, notes=words))
        assert load_config(preset, overrides).parallelism.enable_async_tensor_parallel is has_it


def test_what_a_date_tells():
    def describe(**cells):
        return build_of(row_of(PIPELINED, **cells))

    days = ("2024-10-22", "2024-10-23", "2024-12-18", "2024-12-19", "2025-03-31", "2025-04-01")
    compiled = [describe(date=day).is_loss_compiled for day in days]
    assert compiled == [False, True, True, False, False, True]  # #642, #755, #1033
    assert not describe(date="2025-06-13", compile="0").is_loss_compiled
    assert describe(loss="CE, compiled").is_loss_compiled
    assert [describe(date=day).num_logits_kept for day in ("2025-10-19", "2025-10-20")] == [8, 0]
    assert [describe(date=day).has_wide_logits for day in days[:2]] == [True, False]
    assert [describe(date=day, norm="").norm for day in ("2025-03-18", "2025-03-19")] == ["python", "composite"]
    assert [describe(date=day).is_floor for day in ("2025-04-09", "2025-04-10")] == [True, False]
    assert not describe(tp="1", world="8").is_floor
    assert not describe(date="2025-04-09", notes="async TP").is_floor


@pytest.mark.parametrize(
    ("date", "schedule", "size", "possible"),
    [
        ("2024-12-26", "1F1B", 4, [4, 1]),  # as many microbatches as pipeline ranks
        ("2024-12-26", "Interleaved 1F1B", 4, [4, 1]),
        ("2025-01-07", "Interleaved 1F1B", 2, [2, 1]),  # #781: as many as stages
        ("2025-04-08", "Interleaved 1F1B", 1, [1]),  # #1073
    ],
)
def test_microbatches_of_a_pipelines_date(date, schedule, size, possible):
    row = row_of(PIPELINED, date=date, pp_sched=schedule, pp="8", world="64", local_bs="32", flags_known="yes")
    assert (microbatch_size(row), possible_microbatch_sizes(row)) == (size, possible)
    assert row.is_scored == (len(possible) == 1)


def test_stages_of_a_pipelines_date():
    """generate_split_points before #1103: what does not divide goes to the stages after the first."""
    row = row_of(PIPELINED, model="Llama3.1-405B", date="2024-12-26", pp="8", world="512", tp="8", pp_sched="1F1B")
    stages = load_config(settings_of(row)[0], settings_of(row)[1:]).parallelism.module_fqns_per_model_part
    assert [sum(name.startswith("layers.") for name in stage) for stage in stages] == [15, *[16] * 6, 15]
    assert [name for stage in stages for name in stage if name.startswith("layers.")][-1] == "layers.125"
    row = replace(row, date="2025-04-15")
    assert load_config(settings_of(row)[0], settings_of(row)[1:]).parallelism.module_fqns_per_model_part is None


@pytest.mark.slow
@pytest.mark.parametrize("date", ["2025-02-05", "2025-09-05"])
def test_few_layers_stand_for_all_although_states_come_with_the_first_step(date):
    row = row_of(PIPELINED, date=date, world="2", pp="1", tp="1", local_bs="2", compile="0", float8="")
    config, dims = load_config(*settings_of(row)[:1], settings_of(row)[1:]), MeshShape(dp_shard=2)
    args = replace(ARGS, num_layers=5, tied=date > "2025-09")
    settings = {"rank": 0, "kernels": Kernels()}
    with historical_build(build_of(row), tp=1):
        shallow = shallow_model(Job.of(config, args, dims), rank=0)
        few = capture(shallow.job, **settings)
        assert expand_layers(few, shallow.depths) == capture(Job.of(config, args, dims), **settings)


@pytest.mark.parametrize(
    ("column", "spellings", "field", "value"),
    [
        ("model", ["Llama3-8B", "Llama 3 8B", "Llama-3.1-8B (128k)", "llama3.1_8b"], "flavor", "8B"),
        ("model", ["Qwen3-0.6B (tied)", "Qwen 3 0.6B"], "flavor", "0.6B"),
        ("model", ["DeepSeek V3 671B", "DeepSeek-V3-671B"], "family", "deepseek_v3"),
        ("pp_sched", ["", "1F1B", "1f1b", "Schedule1F1B"], "schedule", "1F1B"),
        ("pp_sched", ["Interleaved 1F1B", "interleaved_1f1b", "Interleaved1F1B"], "schedule", "Interleaved1F1B"),
        ("ac", ["selective-op", "selective op", "op", "Selective_Op"], "checkpointing", ("selective", "op")),
        ("ac", ["selective-layer", "selective-2", "selective layer 2"], "checkpointing", ("selective", "2")),
        ("ac", ["none", "", "no"], "checkpointing", ("none", "op")),
        ("float8", ["", "none", "0", "bf16"], "float8", ""),
        ("float8", ["1", "tensorwise", "tensorwise dynamic", "tensorwise, bf16 all-gather"], "float8", "tensorwise"),
        (
            "float8",
            ["tensorwise+fsdp", "fp8 all-gather", "tensorwise with float8 all-gather"],
            "float8",
            "tensorwise, float8 all-gather",
        ),
        ("float8", ["rowwise", "row-wise", "rowwise with bfloat16 all-gather"], "float8", "rowwise"),
        ("float8", ["rowwise_with_gw_hp"], "float8", "rowwise_with_gw_hp"),
        ("norm", ["python RMSNorm", "rmsnorm (python)"], "norm", "python"),
        ("norm", ["fused_rmsnorm", "compiled RMSNorm"], "norm", "fused"),
        ("loss", ["", "CE", "CE fp32 cast, loss parallel", "cross-entropy"], "loss", Loss()),
        ("loss", ["chunked CE", "chunked CE (8 chunks on logits)", "chunked 8"], "loss", Loss(num_chunks=8)),
        ("loss", ["chunked (16 chunks)"], "loss", Loss(num_chunks=16)),
        ("loss", ["compiled", "CE fp32 cast, compiled"], "loss", Loss(is_compiled=True)),
        ("world", ["16", ""], "world_size", 16),
        ("dp_shard", ["2", "", "-1"], "dp_shard", 2),
        ("dp_rep", ["1", ""], "dp_replicate", 1),
        ("gpu_total_gib", ["95.04", ""], "total_gib", 95.04),
        ("value_gib", ["OOM", "oom", "out of memory"], "gib", None),
        ("allocator", ["expandable", "expandable_segments:True"], "allocator", "expandable"),
        ("allocator", ["classic", "default"], "allocator", "classic"),
    ],
)
def test_spellings_of_a_cell(column, spellings, field, value):
    assert {text: getattr(row_of(PIPELINED, **{column: text}), field) for text in spellings} == dict.fromkeys(
        spellings, value
    )


@pytest.mark.parametrize(
    ("column", "text", "why", "is_by_design"),
    [
        ("model", "Mixtral-8x7B", "Mixtral.*llama3, qwen3, deepseek_v3", False),
        ("model", "Llama3-9B", "no size 9B: .*8B", False),
        ("model", "Qwen3-30B-A4B", "no size 30B-A4B: .*30B-A3B", False),
        ("model", "GPT-OSS 20B", "torchtitan's GPT-OSS of that date is not rebuilt", True),
        ("model", "DeepSeek V2 236B", "DeepSeek V2.*deepseek_v3", False),
        ("hardware", "MI300X", "MI300X.*A100, H100", False),
        ("value_gib", "", "no number of GiB", False),
        ("seq_len", "", "no whole number", False),
        ("tp", "eight", "'eight' is no whole number", False),
        ("dp_shard", "x", "dp_shard: 'x'", False),
        ("date", "last week", "begins with no year", False),
        ("ac", "budget 0.5", "none, full, selective-op", False),
        ("compile", "maybe", "neither 0 nor 1", False),
        ("float8", "half", "tensorwise", False),
        ("float8", "mxfp8", "not ours", True),
        ("loss", "focal", "plain|CE", False),
        ("norm", "layernorm", "python RMSNorm", False),
        ("metric", "nvidia-smi", "interval", True),
        ("metric", "peak", "allocated, active, reserved", False),
        ("pp_sched", "PipeDream", "PipeDream.*1F1B", True),
        ("allocator", "jemalloc", "classic, expandable", False),
    ],
)
def test_a_cell_that_cannot_be_read_fails_its_row_alone(column, text, why, is_by_design):
    good = next(csv.DictReader(io.StringIO(PIPELINED)))
    rows, (refused,) = read_rows(table_of([good, good | {"id": "X2", "flags_known": "yes", column: text}]))
    assert [row.id for row in rows] == ["X1"]
    assert re.search(why, refused.why)
    assert refused.why.startswith(f"column {column}: ")
    assert (refused.id, refused.is_scored, refused.is_by_design) == ("X2", True, is_by_design)
    assert score([], [refused]).is_good == is_by_design
    assert "X2" in markdown([], [refused])


def test_the_script_goes_on_after_a_row_that_fails(monkeypatch, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("validate_memory", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def fails(row):
        raise UnsupportedError("no such thing here") if row.id == "X2" else RuntimeError("sizes differ")

    good = next(csv.DictReader(io.StringIO(PIPELINED)))
    (tmp_path / "rows.csv").write_text(table_of([good | {"id": name} for name in ("X1", "X2", "X3")]))
    monkeypatch.setattr(script, "estimate", fails)
    monkeypatch.setattr("sys.argv", ["validate_memory.py", str(tmp_path / "rows.csv"), "--only", "X2", "X3"])
    script.main()
    said = capsys.readouterr().out
    assert re.search(r"- X2 .*: not covered: no such thing here\n- X3 .*: RuntimeError: sizes differ", said)
    assert "X1" not in said


def test_a_row_without_a_word_on_the_allocator_is_not_scored():
    assert not row_of(PIPELINED, allocator="", flags_known="yes").is_scored


def test_a_row_without_a_date_may_be_of_any_build_and_one_with_a_release_of_its_own():
    row = row_of(PIPELINED, date="", norm="", flags_known="yes", allocator="classic", pp="1", tp="1", world="4")
    assert not row.has_date and not row.is_scored
    dates = possible_dates(row)
    builds = [build_of(replace(row, date=date)) for date in dates]
    assert {build.norm for build in builds} == {"composite", "fused", "python"}
    assert {build.optimizer for build in builds} == {"foreach", "fused"} and len({*builds}) == len(builds)
    assert {(each.date, each.allocator) for each in _variants(row)} == {
        (date, name) for date in dates for name in ("classic", "expandable")
    }
    assert possible_dates(replace(row, family="qwen3"))[0] >= "2025-07"
    released = row_of(PIPELINED, date="", stack="torchtitan v0.2.1", flags_known="yes", allocator="classic", pp="1")
    assert (released.date, released.is_scored, possible_dates(released)) == ("2025-12-26", True, ["2025-12-26"])


@pytest.mark.parametrize(
    ("published", "cells", "outside"),
    [
        ("62", {}, 0.0),
        ("54", {}, -0.1),
        ("71.5", {}, 0.1),
        ("71.5", {"notes": "as published"}, 0.1),
        ("71.5", {"pp": "1", "world": "4"}, 0.0),  # a floor: recorded streams
        ("54", {"pp": "1", "world": "4"}, -0.1),
        ("OOM", {}, None),
        ("62", {"notes": "graph_trainer"}, None),
    ],
)
def test_a_peak_is_inside_or_outside_of_the_interval_of_what_is_open(published, cells, outside):
    row = row_of(PIPELINED, value_gib=published, **cells)
    made = RowEstimate(row, build_of(row), low_gib=60.0, high_gib=65.0, allocated_gib=50.0, verdict="fits")
    assert made.outside_by == (None if outside is None else pytest.approx(outside))
    accuracy = score([made])
    assert accuracy.inside == ("X1",) * (outside == 0)
    assert [name for name, _ in accuracy.outside] == ["X1"] * bool(outside)
    if outside:
        assert f"outside: X1 by {outside:+.2%}" in markdown([made])


EXPERTS = {"model": "DeepSeek V3 16B", "pp": "1", "tp": "1", "world": "4", "dp_shard": "4", "ep": "4", "float8": ""}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("date", [pytest.param("2025-12-04", marks=pytest.mark.slow), "2026-05"])
@pytest.mark.parametrize(
    "checkpointing",
    [("selective", "op"), *(pytest.param((mode, "op"), marks=pytest.mark.slow) for mode in ("full", "none"))],
    ids=lambda c: c[0],
)
def test_experts_on_several_ranks_are_rebuilt_with_every_checkpointing(date, checkpointing, is_compiled):
    """Until #2281 their FSDP hooks run within a recomputed layer, afterwards experts are in their layer's group."""
    row = row_of(PIPELINED, **EXPERTS, date=date, seq_len="64", local_bs="1")
    row = replace(row, checkpointing=checkpointing, is_compiled=is_compiled)
    args = replace(get_family("deepseek_v3").flavors["debug_v3"], num_layers=3)
    job = Job.of(load_config(settings_of(row)[0], settings_of(row)[1:]), args, MeshShape(dp_shard=4, ep=4))
    with historical_build(build_of(row), tp=1):
        trace = capture(job, rank=0, kernels=Kernels("cuda", "cudnn", "fused"), num_steps=1)
    rows = 64 * 3  # of each token's experts, received if all ranks are alike
    held = [
        block for block in trace.blocks if block.point.phase == "forward" and block.num_bytes == rows * args.dim * 2
    ]
    assert len(held) >= 4  # sent, received, computed, returned


def test_a_table_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="no column id, model, value_gib"):
        read_rows("a,b\n1,2\n")


def test_what_is_not_known_of_a_row_widens_its_interval():
    row = row_of(PIPELINED)
    ways = {(each.is_compiled, each.is_first_step, each.allocator) for each in _variants(replace(row, has_step=False))}
    assert ways == {(True, first, name) for first in (True, False) for name in ("classic", "expandable")}
    row = replace(row, is_compiled=False, has_flags=False)
    assert {each.is_compiled for each in _variants(row)} == {True, False}
    words = {word for each in _variants(replace(row, is_compiled=True)) for word in settings_of(each)}
    assert {"model", "loss"} <= words
    row = replace(row, is_compiled=True)
    assert list(_variants(replace(row, is_scored=True))) == [replace(row, is_scored=True)]


@pytest.mark.slow
def test_a_pipeline_is_estimated_by_its_fullest_rank(monkeypatch):
    monkeypatch.setitem(llama3.FLAVORS, "8B", replace(ARGS, num_layers=2, vocab_size=2**16))
    row = row_of(PIPELINED)
    row = replace(row, pp=2, tp=1, world_size=4, schedule="1F1B", local_batch_size=4, is_compiled=False, float8="")
    made = estimate(row)
    assert build_of(row).num_logits_kept == 2
    # the last rank keeps the logits of both microbatches of two samples, in bf16
    assert made.allocated_gib > 4 * 256 * 2**16 * 2 / 2**30


def test_a_row_says_at_least_only_where_it_is_a_bound():
    def said(**cells):
        row = row_of(PIPELINED, **cells)
        made = RowEstimate(row, build_of(row), low_gib=60.0, high_gib=65.0, allocated_gib=50.0, verdict="fits")
        return markdown([made]).rstrip().splitlines()[-1].split(" | ")[6]

    assert said() == said(notes="async TP") == "about 60.00 … 65.00"
    assert said(pp="1", world="4") == "≥ 60.00 … 65.00"  # streams that collectives recorded
    assert said(pp="1", world="4", notes="async TP") == "60.00 … 65.00"
