"""Activations and instants against torch: the real train step on CPU, every tensor counted while it lives."""

from dataclasses import replace
from math import ceil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from converters.families.base import ModelArgs
from converters.families.qwen3 import Qwen3Args
from converters.families.registry import get_family
from converters.layout.mesh_shape import MeshShape
from converters.layout.stages import split_stages
from titan_tools.memory.formula.activations import activations_of
from titan_tools.memory.formula.closed_form import instants
from titan_tools.memory.formula.rank import Instant
from titan_tools.memory.formula.run_shape import Recompute, RunShape, run_shape
from trainer.build import build
from trainer.config.load import load_config
from trainer.config.sections import ActivationCheckpoint, Compile, Training
from trainer.data.batch import Batch
from trainer.job.job import resolve_job
from trainer.loss.install import install_loss
from trainer.models.decoder import Transformer
from trainer.models.registry import get_trainer_family
from trainer.parallel.activation_checkpoint import apply_activation_checkpoint
from trainer.ranks.gpus import GPUS
from trainer.ranks.mesh import make_meshes
from trainer.runner import WholeModel

PLAIN = (torch.Tensor, nn.Parameter)
NO_WORKSPACES = replace(GPUS["h200"], cublas_mib=0)
MODES = {
    "none": (Recompute(mode="none"), ActivationCheckpoint(mode="none")),
    "full": (Recompute(mode="full"), ActivationCheckpoint(mode="full")),
    "op": (
        Recompute(mode="op", stops_early=False),
        ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    ),
    "op, early stop": (
        Recompute(mode="op", stops_early=True),
        ActivationCheckpoint(mode="selective", selective_ac_option="op", early_stop=True),
    ),
    "every 2nd": (
        Recompute(mode="full", every=2),
        ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    ),
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made under it that still live, and the most there were after any operation."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.at_most_bytes = 0  # live bytes when they were last counted, and all that was made since
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a wrapper: the operations on what it wraps come here on their own
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if type(tensor) in PLAIN and tensor.untyped_storage()._cdata not in given:
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        """A storage was made or resized."""
        self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.at_most_bytes += storage.nbytes()
        if self.at_most_bytes > self.peak_bytes:  # counting each time would take most of the test
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @property
    def live_bytes(self) -> int:
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        self.at_most_bytes = sum(size for _, size in self.made.values())
        return self.at_most_bytes


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps what CUDA's fused kernel keeps: its input and one fp32 number per row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True, dtype=torch.float32) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse = ctx.saved_tensors
        scaled = grad * weight
        inner = (scaled * x).mean(-1, keepdim=True) * inverse.square()
        by_row = grad * x * inverse  # not flattened: torch 2.11 refuses that where a DTensor is cut along dim 1
        return ((scaled - x * inner) * inverse).to(x.dtype), by_row.sum(tuple(range(by_row.ndim - 1))), None


def family_of(args: ModelArgs) -> str:
    return "qwen3" if isinstance(args, Qwen3Args) else "llama3"


def shape(args: ModelArgs, mode: str, **changes) -> RunShape:
    run = RunShape(
        family=get_family(family_of(args)),
        args=args,
        mesh=MeshShape(),
        uses_fsdp=False,
        stages=tuple(map(tuple, split_stages(1, args.num_layers))),
        schedule="1F1B",
        microbatch_size=2,
        num_microbatches=1,
        num_accumulated=1,
        seq_len=128,
        param_bytes=4,
        compute_bytes=4,
        recompute=MODES[mode][0],
        optimizer="fused",
        reshard_after_forward=True,
        reshard_output=False,
        loss_parallel=False,
        loss_chunks=0,
    )
    return replace(run, **changes)


def build_model(args: ModelArgs, mode: str, monkeypatch, dtype=torch.float32) -> Transformer:
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight, self.eps))
    model = get_trainer_family(family_of(args)).build_model(args).to(dtype)
    apply_activation_checkpoint(model, MODES[mode][1])
    return model


def peak_of_passes(run: RunShape) -> Instant:
    """The largest instant of forward and backward: these tests take no optimizer step."""
    found = (i for i in instants(run, pp_rank=0, gpu=NO_WORKSPACES) if i.when != "optimizer step")
    return max(found, key=lambda instant: instant.total_bytes)


def peak_without_state(run: RunShape) -> int:
    """Its bytes but for what was there before the step."""
    return sum(size for part, size in peak_of_passes(run).parts.items() if part not in ("parameters", "optimizer"))


SMALL = ModelArgs(64, 4, 4, 2, 16, 192, vocab_size=256)
QWEN = Qwen3Args(64, 4, 8, 4, 16, 192, vocab_size=256)  # heads wider, together, than the stream


@pytest.mark.parametrize(
    ("args", "dtype"),
    [
        (SMALL, torch.bfloat16),
        (QWEN, torch.float32),
        pytest.param(SMALL, torch.float32, marks=pytest.mark.slow),
        pytest.param(QWEN, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["llama3, bf16", "qwen3, fp32", "llama3, fp32", "qwen3, bf16"],
)
@pytest.mark.parametrize("mode", MODES)
def test_what_blocks_keep_is_what_torch_keeps(args, mode, dtype, monkeypatch):
    run = shape(args, mode, compute_bytes=dtype.itemsize)
    model = build_model(args, mode, monkeypatch, dtype)
    rotary = model.rope(torch.arange(run.seq_len))
    x = torch.randn(run.microbatch_size, run.seq_len, args.dim, dtype=dtype, requires_grad=True)
    with LiveBytes() as live:
        h = x
        for layer in model.layers.values():
            h = layer(h, rotary)
        kept = live.live_bytes
    sizes = activations_of(run)
    # the first block's input was there before, the last block's output was made under the count
    assert kept == pytest.approx(sum(sizes.kept), rel=0.01)


LOGITS, BLOCKS = {"vocab_size": 4096}, {"vocab_size": 64, "dim": 64, "ffn_hidden": 512}


PEAKS = {
    "whole logits": (LOGITS, 0, "cross-entropy backward"),
    "logits in one piece": (LOGITS, 1, "cross-entropy backward of a piece"),
    "logits in three pieces": (LOGITS, 3, "cross-entropy backward of a piece"),
    "logits in small pieces": (LOGITS, 32, ""),  # nothing of the loss stands out
    "large blocks": (BLOCKS, 0, "block"),
    "large blocks, loss in pieces": (BLOCKS, 3, "block"),
}
# One family in every mode; the other family in one, and the remaining cases in the slow set
OFTEN = {(SMALL, mode, peak) for mode in MODES for peak in ("logits in three pieces", "large blocks")}
OFTEN |= {(SMALL, "op", peak) for peak in PEAKS} | {
    (QWEN, "op", "logits in three pieces"),
    (QWEN, "none", "large blocks"),
}


@pytest.mark.parametrize(
    ("family", "mode", "changes", "chunks", "when"),
    [
        pytest.param(
            *(family, mode, *PEAKS[peak]),
            id=f"{family_of(family)}, {mode}, {peak}",
            marks=[pytest.mark.slow] * ((family, mode, peak) not in OFTEN),
        )
        for family in (SMALL, QWEN)
        for mode in MODES
        for peak in PEAKS
    ],
)
def test_the_peak_of_a_step_is_torchs(family, mode, changes, chunks, when, monkeypatch):
    args = replace(family, **changes)
    run = shape(args, mode, loss_chunks=chunks)
    model = build_model(args, mode, monkeypatch)
    loss = {"loss": "chunked", "loss_chunks": chunks} if chunks else {"loss": "plain"}
    install_loss(model, Training(**loss), Compile(), chunk_tokens=ceil(run.num_tokens / (chunks or 1)))
    tokens = torch.randint(args.vocab_size, (run.microbatch_size, run.seq_len))
    with LiveBytes() as live:
        WholeModel(model).forward_backward(tokens, tokens, torch.arange(run.seq_len), 1.0)
    peak = peak_of_passes(run)
    assert when in peak.when
    assert peak_without_state(run) == pytest.approx(live.peak_bytes, rel=0.003)


# --- sharded: the model of trainer/build.py on a fake process group, whose collectives only allocate

SHORT = ["--training.seq_len=8", "--training.local_batch_size=2"]  # buffers of FSDP dominate
LONG = ["--training.seq_len=128", "--training.local_batch_size=2"]
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
QWEN3 = ["--model.name=qwen3"]
BF16 = ["--training.mixed_precision_param=bfloat16"]
PLAIN_LOSS = ["--training.loss=plain"]
RESHARDED = ["--parallelism.fsdp_reshard_after_forward=always"]
LARGE_PIECES, SMALL_PIECES = ["--training.loss_chunks=2"], ["--training.loss_chunks=64"]


def degrees(**wanted: int) -> list[str]:
    names = {"fsdp": "data_parallel_shard", "rep": "data_parallel_replicate", "tp": "tensor_parallel"}
    names |= {"cp": "context_parallel", "pp": "pipeline_parallel"}
    return [f"--parallelism.{name}_degree={wanted.get(axis, 1)}" for axis, name in names.items()]


def follow_resize(monkeypatch, live: LiveBytes) -> None:
    """FSDP2 frees and takes gathered parameters by resizing their storage, which is no operation of the dispatcher."""
    resize = torch.UntypedStorage.resize_

    def counted(storage, size):
        result = resize(storage, size)
        live.add(storage)
        return result

    monkeypatch.setattr(torch.UntypedStorage, "resize_", counted)


SHARDED = [
    [*degrees(fsdp=2, rep=2), *LONG, *OP],
    [*degrees(tp=4), *LONG, "--parallelism.disable_loss_parallel"],
    [*degrees(fsdp=4, tp=2), *LONG, *BF16, *LARGE_PIECES],
    [*degrees(fsdp=4), *LONG, *BF16, *LARGE_PIECES, *RESHARDED],
    [*degrees(fsdp=4, tp=2), *LONG, "--activation_checkpoint.mode=full"],
    [*degrees(fsdp=4), *SHORT, "--model.flavor=debug_tied"],
    [*degrees(tp=4), *LONG, *OP, *QWEN3],
    [*degrees(fsdp=2, cp=2), *LONG, *BF16, *QWEN3],
]
# Of what these have together, one at a time
MORE_SHARDED = [
    [*degrees(fsdp=2), *LONG],
    [*degrees(tp=4), *LONG, *OP, *SMALL_PIECES],
    [*degrees(fsdp=8), *LONG, *BF16, *PLAIN_LOSS],
    [*degrees(fsdp=2, cp=2), *LONG, *OP],
    [*degrees(fsdp=4), *SHORT, *BF16, "--model.flavor=debugmodel"],
    [*degrees(fsdp=8), *LONG, *BF16],
    [*degrees(tp=4), *LONG],
    [*degrees(tp=4), *LONG, *OP],
    [*degrees(tp=4), *LONG, *PLAIN_LOSS],
    [*degrees(tp=4), *LONG, *PLAIN_LOSS, "--parallelism.disable_loss_parallel"],
    [*degrees(fsdp=2, cp=2), *LONG],
    [*degrees(fsdp=4), *SHORT, *BF16, "--model.flavor=debugmodel", *RESHARDED],
    [*degrees(fsdp=2), *LONG, *QWEN3],
    [*degrees(tp=4), *LONG, *QWEN3],
]


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=" ".join(words)) for words in SHARDED]
    + [pytest.param(words, id=" ".join(words), marks=pytest.mark.slow) for words in MORE_SHARDED],
)
def test_the_peak_of_a_sharded_step_is_torchs(words, monkeypatch):
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight, self.eps))
    config = load_config("debug", ["--validation.no_enable", "--training.global_batch_size=-1", *words])
    run = replace(run_shape(resolve_job(config)), keeps_scores=False, cpu_attention=True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.mesh.world_size)
    try:
        job = resolve_job(config, run.mesh.world_size)
        model = build(job, make_meshes(job.dims, "cpu"), torch.device("cpu"))
        tokens = torch.randint(run.args.vocab_size, (run.microbatch_size, run.seq_len))
        batch = Batch(tokens=tokens, targets=tokens)
        model.forward_backward(batch, 1.0)  # FSDP makes some buffers only once
        for parameter in model.named_parameters().values():
            parameter.grad = None
        with LiveBytes() as live:
            follow_resize(monkeypatch, live)
            model.forward_backward(batch, 1.0)
    finally:
        dist.destroy_process_group()
    assert peak_without_state(run) == pytest.approx(live.peak_bytes, rel=0.01)
