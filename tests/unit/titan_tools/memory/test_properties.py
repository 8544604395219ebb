"""How an estimate changes with the settings: batch, recomputation, accumulation, loss, validation."""

from dataclasses import replace
from math import prod

import pytest

from converters.families.registry import get_family
from tests.state_bytes import live_at
from titan_tools.memory.expand.ranks import global_rank, trace_rank
from titan_tools.memory.replay.replay import Peak, replay
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import gpu_kernels
from trainer.config.load import load_config
from trainer.job.job import resolve_job
from trainer.ranks.gpus import GPUS

pytestmark = pytest.mark.usefixtures("one_thread")

ARGS = replace(get_family("llama3").flavors["8B"], num_layers=2)
NONE, FULL = "--activation_checkpoint.mode=none", "--activation_checkpoint.mode=full"
SELECTIVE = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option"
TP, SAMPLES = "--parallelism.tensor_parallel_degree", "--training.local_batch_size"
COMPILE, FLOAT8 = "--compile.enable", "--model.converters=quantize.linear.float8"


def trace_of(words: str, *, pp_rank: int = 0, num_steps: int = 1) -> Trace:
    """The first steps of Llama 3 8B with two layers on 8 ranks."""
    job = resolve_job(load_config("llama3_8b", words.split()), 8, args=ARGS)
    return trace_rank(job, rank=global_rank(job, pp_rank), kernels=gpu_kernels(GPUS["h100-80"]), num_steps=num_steps)


def peak_of(words: str) -> Peak:
    return replay(trace_of(words), allocator="expandable").step1


def kept_bytes(words: str) -> int:
    """Activations that forward keeps for backward."""
    return sum(block.num_bytes for block in live_at(trace_of(words), 1, "backward") if block.part == "activations")


def most_of_loss(trace: Trace) -> int:
    """The most that logits and loss take at any instant."""
    held = highest = 0
    for _, event in trace.events():
        block = trace.blocks[event if event >= 0 else ~event]
        if block.part == "logits_and_loss":
            held += block.num_bytes if event >= 0 else -block.num_bytes
            highest = max(highest, held)
    return highest


def test_doubling_the_batch_doubles_activations():
    assert kept_bytes(f"{SAMPLES}=2") == pytest.approx(2 * kept_bytes(f"{SAMPLES}=1"), rel=0.01)  # but for positions


@pytest.mark.parametrize("tp", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_recomputing_more_keeps_less(tp):
    modes = [NONE, f"{SELECTIVE}=op", f"{SELECTIVE}=2", FULL]
    none, op, every_2nd, full = (kept_bytes(f"{TP}={tp} {mode}") for mode in modes)
    assert none > op > full
    assert none > every_2nd > full


@pytest.mark.slow
@pytest.mark.parametrize("mode", [NONE, f"{SELECTIVE}=op"])
def test_fusing_leaves_out_of_what_is_kept_and_float8_leaves_out_more(mode):
    eager, compiled, in_float8 = (kept_bytes(f"{mode} {words}") for words in ("", COMPILE, f"{COMPILE} {FLOAT8}"))
    assert in_float8 <= compiled < eager
    assert (in_float8 < compiled) == (mode == NONE)


@pytest.mark.slow
def test_a_compiled_step_leaves_no_activations_to_the_next_one():
    """Not of context parallelism either, whose compilation leaves cycles of references: torch collects them."""
    trace = trace_of(f"{COMPILE} --parallelism.context_parallel_degree=2 {FULL}", num_steps=2)
    points = [block.point for block in live_at(trace, 2, "backward")]
    assert {point.step for point in points if point.phase == "forward"} == {2}


def test_accumulation_adds_the_gradients_of_earlier_passes():
    once, twice = (peak_of(f"{SAMPLES}=1 {FULL} {words}") for words in ("", "--training.global_batch_size=16"))
    num_values = sum(prod(parameter.shape) for parameter in get_family("llama3").parameters(ARGS))
    assert twice.allocated_bytes - once.allocated_bytes == pytest.approx(num_values * 4 / 8, rel=0.001)


def test_a_larger_validation_batch_counts():
    words = "--validation.enable --validation.local_batch_size=32 --validation.seq_len=8192 --training.loss=plain"
    peak = peak_of(words)
    assert peak.point.phase == "validation"
    # bf16 logits, their fp32 cast and log_softmax's result; and the loss
    assert peak.by_part["logits_and_loss"] == 32 * 8192 * 128256 * 10 + 1024


def test_pieces_take_less_than_whole_logits():
    whole, pieces, more = (
        most_of_loss(trace_of(f"--training.{words}")) for words in ("loss=plain", "loss=chunked", "loss_chunks=16")
    )
    assert whole == 8192 * 128256 * 12 + 8  # the loss and the number of tokens
    assert pieces < 0.45 * whole
    assert more < pieces


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_loss_in_pieces_does_not_grow_with_the_microbatches_in_flight(schedule):
    def loss_bytes(num_samples: int, loss: str) -> int:
        words = f"--parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule={schedule}"
        return most_of_loss(trace_of(f"{words} {SAMPLES}={num_samples} --training.loss={loss}", pp_rank=1))

    assert loss_bytes(4, "chunked") == pytest.approx(loss_bytes(8, "chunked"), abs=100)  # numbers for each microbatch
    grown = loss_bytes(8, "plain") - loss_bytes(4, "plain")
    assert grown == pytest.approx(4 * 8192 * 128256 * 4 if schedule == "GPipe" else 0, abs=100)
