"""What is rebuilt of torchtitan for published runs: it computes what our modules do, and reads rows of any layout."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from converters.errors import ConfigError, UnsupportedError
from converters.families import llama3
from converters.families.base import ModelArgs
from titan_tools.memory.published import modules_then as rebuilt
from titan_tools.memory.published.measure import _variants, estimate
from titan_tools.memory.published.rows import read_rows
from titan_tools.memory.published.then import settings_of, then_of
from trainer.config.load import load_config
from trainer.loss.cross_entropy import cross_entropy_sum
from trainer.models.llama3 import model as llama
from trainer.models.llama3.rope import RotaryAngles
from trainer.models.qwen3 import model as qwen

pytestmark = pytest.mark.usefixtures("one_thread")

ARGS = ModelArgs(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden=64, vocab_size=64)
PIPELINED = """\
id,grade,date,stack,hardware,gpu_total_gib,model,seq_len,local_bs,world,dp_shard,dp_rep,tp,pp,pp_sched,cp,ac,compile,\
float8,loss,fsdp_reshard,norm,metric,value_gib,step,source,notes,allocator,flags_known
X1,A,2024-12-26,,H100-96GB HBM2e,95.04,Llama3.1-8B,256,8,16,2,1,2,4,Interleaved 1F1B,1,full,1,rowwise,CE fp32 cast,\
default,python RMSNorm,reserved,70.0,>=2,,,classic,no
"""


@pytest.mark.parametrize(
    ("family", "attend", "cache"),
    [
        (llama, rebuilt.llama_attention, rebuilt.llama_freqs_cis),
        (qwen, rebuilt.qwen_attention, rebuilt.qwen_rope_cache),
    ],
)
def test_attention_computes_what_ours_does(family, attend, cache):
    torch.manual_seed(0)
    attention = family.Attention(ARGS)
    x, positions = torch.randn(2, 6, ARGS.dim), torch.arange(6)
    ours = RotaryAngles(ARGS, stacked_on=0 if family is qwen else -1)
    expected = attention(x, ours(positions))
    for places in (positions, positions.expand(2, 6)):
        assert torch.allclose(attend(attention, x, cache(ours, places)), expected, atol=1e-5)


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
    (row,) = read_rows(PIPELINED)
    then = replace(then_of(row), loss_chunks=chunks, num_logits_kept=num_kept)
    made = []

    def forward(x, positions):
        made.append(torch.randn(2, 8, 16))
        return made[-1]

    loss = rebuilt.LossOfLogits(forward, SimpleNamespace(dims=SimpleNamespace(tp=1)), then)
    targets = torch.randint(16, (2, 8))
    for _ in range(3):
        for _ in range(max(num_kept, 1)):
            computed = loss(None, None, targets)
            assert torch.allclose(computed, cross_entropy_sum(made[-1], targets))
        assert [id(kept) for kept in loss._kept] == [id(each) for each in made[len(made) - num_kept :]]


def test_a_row_says_its_layout_in_keys_of_ours():
    (row,) = read_rows(PIPELINED)
    preset, *overrides = settings_of(row)
    config = load_config(preset, overrides)
    assert (config.model.name, config.model.flavor) == ("llama3", "8B")
    assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    # four ranks with two stages each, so eight microbatches: #1033's time later made them of one sample
    assert config.parallelism.pipeline_parallel_microbatch_size == 1
    assert (then_of(row).num_logits_kept, then_of(row).has_ends_in_root) == (8, True)
    assert config.float8.recipe_name == "rowwise"
    assert config.compile.components == ("model",)


def test_a_model_of_no_family_of_ours_is_refused():
    (row,) = read_rows(PIPELINED)
    with pytest.raises(ConfigError, match="X1.*Mixtral"):
        settings_of(replace(row, model="Mixtral-8x7B"))


def test_ring_attention_is_refused():
    (row,) = read_rows(PIPELINED)
    with pytest.raises(UnsupportedError, match="ring attention"):
        settings_of(replace(row, cp=2))


def test_unknown_hardware_is_refused():
    with pytest.raises(ConfigError, match="MI300X.*A100, H100"):
        read_rows(PIPELINED.replace("H100-96GB HBM2e", "MI300X"))


def test_what_is_not_known_of_a_row_widens_its_interval():
    (row,) = read_rows(PIPELINED)
    ways = {(each.is_compiled, each.is_first_step, each.allocator) for each in _variants(replace(row, has_step=False))}
    assert ways == {(True, first, name) for first in (True, False) for name in ("classic", "expandable")}
    row = replace(row, is_compiled=False, has_flags=False)
    assert {each.is_compiled for each in _variants(row)} == {True, False}
    assert list(_variants(replace(row, is_scored=True))) == [replace(row, is_scored=True)]


def test_a_pipeline_is_estimated_by_its_fullest_rank(monkeypatch):
    monkeypatch.setitem(llama3.FLAVORS, "8B", replace(ARGS, num_layers=2, vocab_size=2**16))
    (row,) = read_rows(PIPELINED)
    row = replace(row, pp=2, tp=1, world_size=4, schedule="1F1B", local_batch_size=4, is_compiled=False, float8="none")
    made = estimate(row)
    assert made.closed_gib is None
    assert then_of(row).num_logits_kept == 2
    # the last rank keeps the logits of both microbatches of two samples, in bf16
    assert made.allocated_gib > 4 * 256 * 2**16 * 2 / 2**30
