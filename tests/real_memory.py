"""What a real train step asks of the CPU's allocator, as torch's profiler reports it: the other side of a trace.

Which tensors come and go does not depend on the device. What kernels allocate inside of themselves does: a CPU's are
taken out, by the names of their operators, and only what is given back before the very call returns. So is what gloo
makes room for, where real ranks talk.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from converters.common.collector import collector_paused
from converters.families.args import DecoderArgs
from converters.layout.mesh_shape import MeshShape
from titan_tools.memory.trace.events import Trace
from trainer.build import build
from trainer.config.sections import Config
from trainer.data.batch import TokenBatch
from trainer.job.record import Job
from trainer.next_token.numbers import documents_of
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import make_meshes
from trainer.ranks.process_group import fake_ranks
from trainer.step import TrainStep

# Operator, and what it calls ("": nothing), → what its CPU kernel makes room for, and gives back before it returns
WITHIN_CPU_KERNELS = {
    ("aten::_scaled_dot_product_flash_attention_for_cpu",): "a block of scores and sums of each thread",
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward",): "the same, and gradients of the output in a row",
    ("aten::mm",): "oneDNN packs bf16 matrices",
    ("aten::addmm", ""): "the same; DTensor's calls others",
    ("aten::mul", "aten::to"): "arguments of two dtypes become one",
    ("aten::add", "aten::to"): "arguments of two dtypes become one",
    ("aten::add_", "aten::to"): "arguments of two dtypes become one",
    ("aten::cat", "aten::empty_like"): "arguments of two dtypes become one",
    ("aten::sum", "aten::to"): "booleans are counted as integers",
    ("aten::cumsum", "aten::to"): "the same",
    ("aten::_chunk_cat",): "pads and joins each group of chunks before all of them; a GPU does so in one kernel",
    ("fsdp::chunk_cat_mixed_dtype",): "casts each gradient before it joins them; a GPU does so in the same kernel",
    ("titan::attend_within_documents",): "attention of each document, and its lengths",
    ("titan::attend_within_documents_backward",): "the same",
    ("aten::sort",): "sorts a copy of numbers and positions",
    ("GeneratedBackwardFor_titan_counted_defaultBackward",): "differences of where the rows of experts end",
    ("titan::exchange_counts",): "counts of rows as they are sent and received",
    ("titan::send_to_experts",): "rows as they arrive, and their order",
    ("titan::return_from_experts",): "rows as they go back, and their order",
}
# What gloo allocates of its own, in the call of a collective or in the threads that carry it out, until that is done
WITHIN_GLOO = {
    "c10d::_allgather_base_": "what each rank sends, before it is copied in a row",
    "c10d::allgather_into_tensor_coalesced_": "the same",
    "gloo:all_gather": "all of it in a row, as it travels",
    "c10d::_reduce_scatter_base_": "a copy of what is scattered, to add up in",
    "c10d::reduce_scatter_tensor_coalesced_": "the same",
}
# Operator, or part of the compiler → what it makes in host memory whatever the device. A step that is estimated has no
# `nonzero` of its own: how much that makes depends on values.
ON_HOST = {
    "aten::nonzero": "a mesh finds its rank among its ranks, many times over while torch compiles",
    "build_guards": "Dynamo keeps copies of DTensors' layouts, to compare with: of a mesh, 4 bytes for each rank",
}
# A Python number that meets a tensor becomes one on a CPU; a GPU's kernels take it as it is. These, and the tensors of
# one element that there are on both sides, take up to so many bytes.
NUMBER_BYTES = 8
# Recomputation keeps a random state, a GPU's too, in host memory.
_RNG_STATE_BYTES = torch.get_rng_state().nbytes
_MESHES, _STEPS = "titan's meshes", "titan's steps"


@dataclass(frozen=True, slots=True)
class Held:
    """What is held before the first step, largest first, and all that happens from there.

    `asked`: (number, bytes) where the number counts the steps' allocations; negative bytes free that one again, and -1
    is any from before.
    """

    before: list[int]
    asked: list[tuple[int, int]]

    @property
    def peak_bytes(self) -> int:
        held = highest = sum(self.before)
        for _, num_bytes in self.asked:
            held += num_bytes
            highest = max(highest, held)
        return highest

    def unseen_frees(self) -> set[int]:
        """Allocations that are never given back, as far as was seen."""
        return {number for number, num_bytes in self.asked if num_bytes > 0} - {
            number for number, num_bytes in self.asked if num_bytes < 0
        }


def held_by_trace(trace: Trace) -> Held:
    before: Counter[int] = Counter()
    asked = []
    numbers: dict[int, int] = {}
    for segment, event in trace.events():
        block = event if event >= 0 else ~event
        num_bytes = trace.blocks[block].num_bytes
        if num_bytes <= NUMBER_BYTES:
            continue
        if not segment.point.step:
            before[num_bytes] += 1 if event >= 0 else -1
        elif event >= 0:
            numbers[block] = len(numbers)
            asked.append((numbers[block], num_bytes))
        else:
            asked.append((numbers.get(block, -1), -num_bytes))
    return Held(sorted(before.elements(), reverse=True), asked)


def held_by_step(config: Config, args: DecoderArgs, dims: MeshShape, *, num_steps: int = 2) -> Held:
    """The same of real memory, of this rank of the default process group, without what kernels make room for."""
    calls = _without_kernels_own(profile_steps(config, args, dims, num_steps=num_steps))
    first = next(i for i, call in enumerate(calls) if call.is_within(_STEPS))
    last = max(i for i, call in enumerate(calls) if call.is_within(_STEPS))
    before: dict[int, int] = {}
    for call in calls[:first]:
        if call.num_bytes < 0:
            before.pop(call.address, None)
        elif not call.is_within(_MESHES):
            before[call.address] = call.num_bytes
    asked = []
    numbers: dict[int, int] = {}  # by address
    num_taken = 0
    for call in calls[first : last + 1]:
        if call.num_bytes > 0:
            numbers[call.address] = num_taken
            num_taken += 1
            asked.append((numbers[call.address], call.num_bytes))
        else:
            asked.append((numbers.pop(call.address, -1), call.num_bytes))
    return Held(sorted(before.values(), reverse=True), asked)


def held_by_fake_rank(config: Config, args: DecoderArgs, dims: MeshShape, *, rank: int, imbalance: int = 1) -> Held:
    """Of a rank without peers: its collectives move nothing, and what it asks of a peer is answered with ones.

    Its experts receive from each rank `imbalance` times the rows that it sends there.
    """

    def all_to_all(received: torch.Tensor, sent: torch.Tensor, *_: Any, **__: Any) -> None:
        if sent.dtype == torch.int64:  # the numbers of rows
            torch.mul(sent, imbalance, out=received)
        else:
            received.zero_()

    with (
        fake_ranks(dims.world_size, rank=rank),
        patch.object(dist, "recv", lambda tensor, *_, **__: tensor.fill_(1)),
        patch.object(dist, "all_to_all_single", all_to_all),
    ):
        return held_by_step(config, args, dims)


@dataclass(frozen=True, slots=True)
class Call:
    """A free is an allocation of negative size. `operators`: name and beginning of each, the innermost last."""

    num_bytes: int
    address: int
    operators: tuple[tuple[str, int], ...]

    def is_within(self, name: str) -> bool:
        return any(name == operator for operator, _ in self.operators)


def profile_steps(config: Config, args: DecoderArgs, dims: MeshShape, *, num_steps: int) -> list[Call]:
    """Build the rank in real memory, and take it through steps as trainer/train.py does."""
    training = config.training
    job = Job.of(config, args, dims)
    shape = job.samples_per_step // dims.batch, training.seq_len
    with collector_paused(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        with record_function(_MESHES):
            meshes = make_meshes(dims, "cpu")
        model = build(job, meshes, torch.device("cpu"))
        optimizer = build_optimizer(model.named_parameters(), config.optimizer)
        with torch.no_grad():
            for parameter in model.named_parameters().values():
                parameter.zero_()
        step = TrainStep(model, meshes, max_norm=training.max_norm, local_batch_size=training.local_batch_size)
        with record_function(_STEPS):
            for _ in range(num_steps):
                step.run(_batch(*shape, has_documents=documents_of(job).mask != "none"), optimizer)
                optimizer.zero_grad()
    return _calls(seen.profiler.kineto_results.experimental_event_tree())


def _batch(num_samples: int, seq_len: int, *, has_documents: bool) -> TokenBatch:
    tokens, targets = (torch.zeros(num_samples, seq_len, dtype=torch.int64) for _ in range(2))
    return TokenBatch(tokens, targets, torch.zeros(num_samples, seq_len, dtype=torch.int32) if has_documents else None)


def _calls(events: Sequence[Any]) -> list[Call]:
    found = []
    waiting: list[tuple[Any, tuple]] = [(event, ()) for event in events]
    while waiting:
        event, operators = waiting.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, Call(fields.alloc_size, fields.ptr, operators)))
        else:
            operators = (*operators, (event.name, event.start_time_ns))
            waiting += [(child, operators) for child in event.children]
    return [call for _, call in sorted(found, key=lambda pair: pair[0])]


def _without_kernels_own(calls: Sequence[Call]) -> list[Call]:
    """Without what is given back by the operator that took it, if WITHIN_CPU_KERNELS names it, and without numbers.

    What WITHIN_GLOO and ON_HOST name is dropped, whoever gives it back.
    """
    taken: dict[int, int] = {}  # address → call
    dropped = set()
    for i, call in enumerate(calls):
        if abs(call.num_bytes) <= NUMBER_BYTES or abs(call.num_bytes) == _RNG_STATE_BYTES:
            dropped.add(i)
        elif call.num_bytes > 0:
            taken[call.address] = i
            if any(map(call.is_within, (*WITHIN_GLOO, *ON_HOST))):
                dropped.add(i)
        else:
            before = taken.pop(call.address, None)
            if before is not None and (before in dropped or _is_kernels_own(calls[before], call)):
                dropped |= {before, i}
    return [call for i, call in enumerate(calls) if i not in dropped]


def _is_kernels_own(taken: Call, freed: Call) -> bool:
    for i, operator in enumerate(taken.operators):
        if operator in freed.operators:
            names = [*(name for name, _ in taken.operators[i : i + 2]), ""]
            if (names[0],) in WITHIN_CPU_KERNELS or tuple(names[:2]) in WITHIN_CPU_KERNELS:
                return True
    return False
