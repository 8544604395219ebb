"""A trace is what a real step asks for, byte for byte and in the same order, on a CPU under the fake process group."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from converters.families.registry import get_family
from tests.dist.training import Layout, args_of
from tests.real_memory import NUMBER_BYTES, held_by_fake_rank, held_by_trace
from tests.state_bytes import live_at, state_bytes, traced_state_bytes
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import PARTS, Block
from titan_tools.memory.trace.kernels import Kernels, use_kernels
from trainer.job.job import resolve
from trainer.job.record import Job

pytestmark = pytest.mark.usefixtures("one_thread")

TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
REPLICAS = "data_parallel_replicate_degree"
SCHEDULE, MICROBATCH = "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"
GQA, TIED = "debug_gqa", "debug_tied"
EXPERTS, MIXED = "qwen3/debug_moe", "qwen3/debug_moe_mixed"
V3, V2, LITE = (f"deepseek_v3/debug_{name}" for name in ("v3", "v2", "v2_lite"))
WINDOW, SCOUT, MAVERICK = "gpt_oss/debug_window", "llama4/debug_scout", "llama4/debug_maverick"
OFFSETS = {"document_mask": "offsets"}
EP, ETP = {"expert_parallel_degree": 2}, {"expert_tensor_parallel_degree": 2}
SLICED = EP | ETP | {TP: 2}


def _kept(mode: str, **keys) -> dict:
    return {"activation_checkpoint": {"mode": mode} | keys}


def _optimizer(**keys) -> dict:
    return {"optimizer": keys}


BF16 = {"mixed_precision_param": "bfloat16"}
PLAIN = {"loss": "plain"}
ACCUMULATED = {"local_batch_size": 1, "global_batch_size": 4}
PIPE = {PP: 2, MICROBATCH: 1}
OP, EVERY_2ND = _kept("selective", selective_ac_option="op"), _kept("selective", selective_ac_option="2")
INTERLEAVED = PIPE | {SCHEDULE: "Interleaved1F1B"}
# layout, flavor, rank
CASES = [
    (Layout("FSDP 3, uneven", 3), TIED, 2),
    (Layout("DDP 2, accumulated", 2, {REPLICAS: 2}, ACCUMULATED), TIED, 0),
    (Layout("1F1B x TP 2, first, bf16", 4, PIPE | {TP: 2}, BF16), GQA, 0),
    (Layout("documents, FSDP 2, bf16, operations kept", 2, {}, BF16 | OFFSETS, OP), GQA, 0),
    (Layout("sinks and biased experts, EP 2 x TP 2, slices, bf16, operations kept", 4, SLICED, BF16, OP), WINDOW, 0),
    (Layout("chunks and scaled inputs, FSDP 2 x CP 2, bf16, operations kept", 4, {CP: 2}, BF16, OP), SCOUT, 1),
]
MORE_CASES = [
    (Layout("latents, groups of experts, EP 2 x TP 2, bf16, operations kept", 4, EP | {TP: 2}, BF16, OP), V3, 0),
    (Layout("FSDP 2 x TP 2, operations kept", 4, {TP: 2}, BF16, OP), GQA, 0),
    (Layout("Interleaved1F1B, last, FSDP 2", 4, INTERLEAVED), TIED, 2),
    (Layout("experts, FSDP 2, bf16, operations kept", 2, {}, BF16, OP), EXPERTS, 1),
    (Layout("experts, EP 2 x FSDP 2 of experts, bf16, operations kept", 4, EP, BF16, OP), EXPERTS, 1),
    (Layout("one rank"), GQA, 0),
    (Layout("HSDP 2 x 2", 4, {REPLICAS: 2}), GQA, 0),
    (Layout("FSDP 2 x CP 2, full recomputation", 4, {CP: 2}, {}, _kept("full")), TIED, 3),
    (Layout("1F1B, last, bf16", 2, PIPE, BF16), TIED, 1),
    (Layout("FSDP 2, accumulated, bf16", 2, {}, ACCUMULATED | BF16), TIED, 0),
    (Layout("moments in bf16", 2, {}, {}, _optimizer(state_dtype="bfloat16")), GQA, 0),
    (Layout("TP 2", 2, {TP: 2}), GQA, 0),
    (Layout("TP 2, whole logits", 2, {TP: 2, "disable_loss_parallel": True}, PLAIN), GQA, 0),
    (Layout("every 2nd layer", 2, {}, PLAIN, EVERY_2ND), GQA, 0),
    (Layout("foreach", 2, {}, {}, _optimizer(implementation="foreach")), GQA, 0),
    (Layout("one rank, bf16, accumulated", 1, {}, BF16 | ACCUMULATED), TIED, 0),
    (Layout("FSDP 2", 2), GQA, 0),
    (Layout("TP 2, plain loss", 2, {TP: 2}, PLAIN), TIED, 0),
    (Layout("CP 2", 2, {CP: 2}), GQA, 0),
    (Layout("full recomputation", 2, {}, {}, _kept("full")), GQA, 0),
    (Layout("operations kept, one rank", 1, {}, {}, OP), TIED, 0),
    (Layout("Interleaved1F1B, first", 2, INTERLEAVED), GQA, 0),
    (Layout("ZBVZeroBubble", 2, PIPE | {SCHEDULE: "ZBVZeroBubble"}), TIED, 0),
    (Layout("GPipe, TP 2, full recomputation", 4, PIPE | {SCHEDULE: "GPipe", TP: 2}, {}, _kept("full")), GQA, 2),
    (Layout("for-loop", 2, {}, {}, _optimizer(implementation="for-loop")), TIED, 0),
    (Layout("norms of q and k, FSDP 2", 2, {}, BF16), "qwen3/debug_gqa", 0),
    (Layout("experts and dense layers, one rank, full recomputation", 1, {}, {}, _kept("full")), MIXED, 0),
    (
        Layout("experts and dense layers, HSDP", 4, {REPLICAS: 2}, BF16, OP | _optimizer(implementation="foreach")),
        MIXED,
        0,
    ),
    (Layout("experts, 1F1B, bf16", 2, PIPE, BF16), EXPERTS, 0),
    (Layout("experts, Interleaved1F1B, FSDP 2", 4, INTERLEAVED, {}, _kept("full")), MIXED, 2),
    (Layout("experts, DDP 2, bf16", 2, {REPLICAS: 2}, BF16), EXPERTS, 1),
    (Layout("experts, CP 2, accumulated", 2, {CP: 2}, ACCUMULATED), EXPERTS, 1),
    (Layout("documents, FSDP 2 x CP 2, full recomputation", 4, {CP: 2}, OFFSETS, _kept("full")), GQA, 3),
    (Layout("documents by end tokens, 1F1B x TP 2, bf16", 4, PIPE | {TP: 2}, BF16 | {"document_mask": "eos"}), GQA, 0),
    (Layout("experts, TP 2", 2, {TP: 2}, BF16), EXPERTS, 0),
    (Layout("experts, EP 2 x TP 2, slices of experts", 4, EP | ETP | {TP: 2}, {}, _kept("full")), EXPERTS, 0),
    (Layout("experts, EP 2 x TP 2, whole experts", 2, EP | {TP: 2}), MIXED, 0),
    (Layout("experts, EP 12 x FSDP 2 within experts", 24, {"expert_parallel_degree": 12}), EXPERTS, 0),
    (Layout("experts, EP 2 x PP 2, bf16", 4, EP | PIPE, BF16), EXPERTS, 0),
    (Layout("experts, EP 2, HSDP 2 x 2", 4, EP | {REPLICAS: 2}, BF16), EXPERTS, 0),
    (Layout("experts in turn", 1, {}, {}, {"debug": {"moe_force_load_balance": True}}), EXPERTS, 0),
    (Layout("latents, one rank", 1), V3, 0),
    (Layout("latents, FSDP 2, full recomputation", 2, {}, BF16, _kept("full")), V2, 1),
    (Layout("latents, FSDP 2, every 2nd layer", 2, {}, BF16, EVERY_2ND), LITE, 1),
    (Layout("latents, TP 2, fp32", 2, {TP: 2}), V2, 0),
    (Layout("latents, CP 2 x FSDP 2, bf16, operations kept", 4, {CP: 2}, BF16, OP), V3, 1),
    (Layout("latents, CP 2 x TP 2, full recomputation", 4, {CP: 2, TP: 2}, {}, _kept("full")), V3, 2),
    (Layout("latents, EP 2 x TP 2, slices of experts", 4, EP | ETP | {TP: 2}, BF16), V2, 0),
    (Layout("latents, EP 4, bf16", 4, {"expert_parallel_degree": 4}, BF16), LITE, 3),
    (Layout("latents, EP 2 x 1F1B, bf16", 4, EP | PIPE, BF16, OP), V3, 2),
    (Layout("latents, stages of one and two layers, bf16", 2, PIPE | {SCHEDULE: "GPipe"}, BF16), V3, 0),
    (Layout("latents, documents, FSDP 2 x CP 2, bf16", 4, {CP: 2}, BF16 | OFFSETS, OP), V3, 0),
    (Layout("sinks, one rank", 1), WINDOW, 0),
    (Layout("sinks, FSDP 2, full recomputation", 2, {}, BF16, _kept("full")), WINDOW, 1),
    (Layout("sinks, TP 2, fp32", 2, {TP: 2}), WINDOW, 1),
    (Layout("sinks, documents, CP 2, bf16", 2, {CP: 2}, BF16 | OFFSETS), WINDOW, 0),
    (Layout("sinks, EP 2 x FSDP 2, bf16", 4, EP, BF16), WINDOW, 1),
    (Layout("sinks, EP 2 x 1F1B, operations kept", 4, EP | PIPE, BF16, OP), WINDOW, 2),
    (Layout("sinks, EP 12 x FSDP 2 within experts", 24, {"expert_parallel_degree": 12}), WINDOW, 0),
    (Layout("chunks, one rank", 1), SCOUT, 0),
    (Layout("chunks, documents, FSDP 2, full recomputation", 2, {}, BF16 | OFFSETS, _kept("full")), SCOUT, 1),
    (Layout("chunks, EP 2 x TP 2, slices, bf16", 4, SLICED, BF16), SCOUT, 0),
    (Layout("chunks, dense layers in turn, EP 2, HSDP 2 x 2", 4, EP | {REPLICAS: 2}, BF16, OP), MAVERICK, 0),
    (Layout("chunks, TP 2 x 1F1B", 4, PIPE | {TP: 2}, BF16), MAVERICK, 2),
]


_CAPTURED: dict[str, tuple] = {}


def _each(cases: list) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("layout", "flavor", "rank"), cases, ids=[layout.name for layout, *_ in cases])


def captured(layout: Layout, flavor: str, rank: int, *, imbalance: float = 1.0):
    """Its trace, and what it was made from: each only once."""
    if layout.name not in _CAPTURED:
        tiny = {"seq_len": 16, "local_batch_size": 2, "loss_chunks": 2}
        config = replace(layout, training=tiny | layout.training).config(flavor)
        args = args_of(flavor)
        if layout.parallelism.get(SCHEDULE, "1F1B") == "1F1B":  # one stage on each rank
            args = replace(args, num_layers=2)
            if flavor in (SCOUT, MAVERICK):  # one of each kind
                args = replace(args, layers_without_positions=(1,))
        dims = resolve(config.parallelism, layout.world_size)
        trace = capture(Job.of(config, args, dims), rank=rank, kernels=Kernels(imbalance=imbalance))
        _CAPTURED[layout.name] = trace, (config, args, dims)
    return _CAPTURED[layout.name]


def _compare(layout: Layout, flavor: str, rank: int) -> None:
    trace, made_from = captured(layout, flavor, rank)
    fake, real = held_by_trace(trace), held_by_fake_rank(*made_from, rank=rank)
    assert fake.peak_bytes == real.peak_bytes
    assert fake == real


@_each(CASES)
def test_trace_is_what_a_real_step_asks_for(layout, flavor, rank):
    _compare(layout, flavor, rank)


@pytest.mark.parametrize("imbalance", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_trace_has_as_many_rows_of_experts_as_a_real_step_that_receives_so_many(imbalance):
    layout = Layout(f"EP 2, {imbalance} times the rows", 2, EP)
    trace, made_from = captured(layout, EXPERTS, 0, imbalance=imbalance)
    assert held_by_trace(trace) == held_by_fake_rank(*made_from, rank=0, imbalance=imbalance)


@pytest.mark.slow
@_each(MORE_CASES)
def test_trace_is_what_a_real_step_asks_for_too(layout, flavor, rank):
    _compare(layout, flavor, rank)


@_each([case for case in CASES if "uneven" not in case[0].name])  # where FSDP holds a padded shard
def test_a_rank_holds_its_share_of_parameters_gradients_and_moments(layout, flavor, rank):
    _compare_state(layout, flavor, rank)


@pytest.mark.slow
@_each(MORE_CASES)
def test_a_rank_holds_its_share_too(layout, flavor, rank):
    _compare_state(layout, flavor, rank)


def _compare_state(layout: Layout, flavor: str, rank: int) -> None:
    trace, (config, args, dims) = captured(layout, flavor, rank)
    job = Job.of(config, args, dims)
    assert traced_state_bytes(trace, job) == state_bytes(job, dims.coordinates(rank).pp)


@_each([case for case in CASES if TP in case[0].parallelism])
def test_the_embeddings_gradient_is_of_the_rows_that_a_rank_has(layout, flavor, rank):
    """A pipeline holds it in fp32 until the last microbatch; of the whole vocabulary it would be tp times as large."""
    trace, (_, args, dims) = captured(layout, flavor, rank)
    made = [b.num_bytes for b in trace.blocks if b.part == "gradients" and b.point.module == "tok_embeddings"]
    element_bytes = 4 if dims.pp > 1 else 2
    assert max(made) == args.vocab_size // dims.tp * args.dim * element_bytes


@_each(CASES)
def test_nothing_of_a_pass_outlives_it(layout, flavor, rank):
    trace, (config, args, dims) = captured(layout, flavor, rank)
    training = config.training
    sizes = Counter()
    for block in live_at(trace, 2, "clip"):
        sizes[block.part] += block.num_bytes
    for part in ("parameters", "gradients", "optimizer"):
        assert sizes.pop(part) > 0
    num_tokens = Job.of(config, args, dims).samples_per_step // dims.batch * training.seq_len
    batch_bytes = num_tokens * (2 * 8 + (4 if training.document_mask else 0))
    assert sizes["activations"] >= batch_bytes + 16  # and the number of its tokens, also as a divisor
    if dims.pp > 1:
        sizes.pop("pipeline_buffers", 0)  # before 2.15, torch keeps what it receives into
    num_losses = training.global_batch_size if training.global_batch_size > 0 else 2
    reaches = {
        b.attention for b in get_family(config.model.name).blocks(args) if not b.latent and b.attention.needs_mask
    }
    mask_bytes = 8 * training.seq_len * len(reaches)  # which all passes share
    assert sizes.total() - batch_bytes - 16 <= 4 * num_losses + mask_bytes, sizes


@_each(CASES)
def test_a_step_leaves_what_it_found(layout, flavor, rank):
    trace, _ = captured(layout, flavor, rank)

    def kinds(blocks: list[Block]) -> Counter:
        return Counter((block.part, block.owner, block.num_bytes) for block in blocks)

    assert kinds(live_at(trace, 2, "forward")) == kinds(live_at(trace, 3, "never"))


@_each(CASES)
def test_every_block_has_a_part(layout, flavor, rank):
    trace, (_, _, dims) = captured(layout, flavor, rank)
    parts = Counter(block.part for block in trace.blocks if block.num_bytes > NUMBER_BYTES)
    assert parts["other"] == 0
    assert parts.keys() <= set(PARTS)
    if dims.fsdp > 1:
        assert parts["all_gather"] > 0
        assert parts["reduce_scatter"] > 0
    assert (parts["pipeline_buffers"] > 0) == (dims.pp > 1)


def test_a_fused_norm_without_a_weight_has_a_gradient_of_its_input_only():
    """Llama 4's of q and k."""
    x = torch.randn(3, 4, requires_grad=True)
    with use_kernels(Kernels(norm="fused")):
        F.rms_norm(x, (4,), eps=1e-5).sum().backward()
    assert x.grad.shape == x.shape
