"""Float8 in a trace: torchao's own operations, as a GPU runs them, against bytes counted by hand."""

import pytest
import torch

pytest.importorskip("torchao")

from dataclasses import replace

from torch._subclasses.fake_tensor import FakeTensor
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from tests.dist.training import Layout, args_of
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import Kernels
from titan_tools.memory.trace.recorder import Recorder
from titan_tools.memory.trace.tensors import RecordedTensors
from trainer.job.job import resolve
from trainer.job.record import Job

pytestmark = pytest.mark.usefixtures("one_thread")

ARGS = replace(args_of("debug_gqa"), num_layers=1)
SAMPLES, LENGTH, DIM = 2, 64, ARGS.dim
TOKENS = SAMPLES * LENGTH
SMALL = 1024  # bytes: above scales, below tensors
LAYER = 128 * 128 * 2 + 64 * 128 * 2 + 3 * 128 * 384  # elements of a layer's products


def captured(
    settings: dict,
    *,
    tp: int = 1,
    is_float8: bool = True,
    keeps: str = "none",
    device: str = "cuda",
    num_steps: int = 1,
) -> Trace:
    kept = {"mode": "none"} if keeps == "none" else {"mode": "selective", "selective_ac_option": keeps}
    converters = ("quantize.linear.float8",) if is_float8 else ()
    layout = Layout(
        "float8",
        2,
        {"tensor_parallel_degree": tp},
        {"seq_len": LENGTH, "local_batch_size": SAMPLES, "mixed_precision_param": "bfloat16", "loss_chunks": 2},
        {
            "model": {"converters": converters},
            "float8": {"filter_fqns": ("output",)} | settings,
            "activation_checkpoint": kept,
        },
    )
    config = layout.config("debug_gqa")
    kernels = Kernels(device=device)
    return capture(Job.of(config, ARGS, resolve(config.parallelism, 2)), rank=0, kernels=kernels, num_steps=num_steps)


def cast(num_elements: int, itemsize: int = 2) -> list[int]:
    """abs, for its maximum; then fp32, scaled, within float8's range, and float8."""
    return [itemsize * num_elements, 4 * num_elements, 4 * num_elements, 4 * num_elements, num_elements]


def test_a_product_forward_and_back_takes_what_torchao_writes_down():
    recorder, out = Recorder(), 3 * DIM
    with RecordedTensors(recorder, {}):
        plain = torch.nn.Linear(DIM, out, bias=False, dtype=torch.bfloat16)
        linear = Float8Linear.from_float(plain, Float8LinearConfig())
        x = torch.empty(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)
        done = len(recorder.trace.blocks)
        y = linear(x)
        forward = [b.num_bytes for b in recorder.trace.blocks[done:] if b.num_bytes > SMALL]
        held = sum(b.num_bytes for b in map(recorder.block_of, (x, linear.weight, y)))
        live = sum(recorder.trace.blocks[number].num_bytes for number in recorder._live.values())
        done = len(recorder.trace.blocks)
        torch.autograd.grad(y, [x, linear.weight], torch.empty_like(y))
        backward = [b.num_bytes for b in recorder.trace.blocks[done:] if b.num_bytes > SMALL]
    n, w, g = TOKENS * DIM, out * DIM, TOKENS * out
    assert forward == [*cast(n), *cast(w), 2 * g]
    assert live == held  # backward casts what is there in high precision: nothing else is kept
    # Of two factors the first is laid out by rows and the second by columns; what is not is copied.
    assert backward == [2 * g, *cast(g), *cast(w), w, 2 * n, *cast(g), *cast(n), g, n, 2 * w]


@pytest.mark.parametrize("keeps", [pytest.param("none", marks=pytest.mark.slow), "op"])
def test_a_layer_keeps_what_it_keeps_in_high_precision(keeps):
    """Also where recomputation keeps operations' results: no absolute values, no cast weights; of maxima numbers."""
    high = at_end_of_forward(captured({}, is_float8=False, keeps=keeps))
    for recipe in ("tensorwise", "rowwise"):
        assert at_end_of_forward(captured({"recipe_name": recipe}, keeps=keeps)) == high


def at_end_of_forward(trace: Trace) -> list[int]:
    """Sizes of what the layer has left behind."""
    held = set()
    for segment, event in trace.events():
        if segment.point.step == 1 and segment.point.module == "norm":
            break
        held.add(event) if event >= 0 else held.discard(~event)
    blocks = (trace.blocks[number] for number in held)
    return sorted(b.num_bytes for b in blocks if b.point.module == "layers.0" and b.num_bytes > SMALL)


def test_fsdp_gathers_a_byte_of_each_weight():
    def gathered(**settings) -> list[int]:
        trace = captured(settings, num_steps=2)
        return [b.num_bytes for b in trace.blocks if b.point.step == 2 and b.part == "all_gather"]

    norms = 2 * 2 * DIM
    assert 2 * LAYER + norms in gathered()
    low = gathered(enable_fsdp_float8_all_gather=True)
    assert LAYER + norms in low
    assert 2 * LAYER + norms not in low
    gathered_blocks = gathered(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)
    assert LAYER + norms in gathered_blocks
    # Scales that are there need no absolute values of the shards
    assert len(gathered_blocks) < len(low)


@pytest.mark.parametrize(
    ("device", "recipe", "num_low"),
    [("cuda", None, 2), ("cpu", None, 0), pytest.param("cuda", "rowwise", 0, marks=pytest.mark.slow)],
)
def test_tensor_parallel_ranks_gather_float8_on_a_gpu(device, recipe, num_low, monkeypatch):
    """Of hidden states, before attention and before the feed-forward."""
    gathered = []
    own = RecordedTensors.dispatch

    def dispatch(tensors, operation, types, args=(), kwargs=None):
        is_forward = tensors.recorder.point[:2] == (1, "forward")
        if operation is torch.ops._c10d_functional.all_gather_into_tensor.default and is_forward:
            gathered.extend([args[0].dtype] if type(args[0]) is FakeTensor else [])
        return own(tensors, operation, types, args, kwargs)

    monkeypatch.setattr(RecordedTensors, "dispatch", dispatch)
    captured({"recipe_name": recipe}, tp=2, device=device)
    assert gathered.count(torch.float8_e4m3fn) == num_low
    assert len(gathered) >= 2
