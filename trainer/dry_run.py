"""Dry run: build one rank of a job of any size on fake tensors and run one training step, without memory or peers.

The process group is fake, so any world size fits on one machine; the model is the one that trainer/build.py builds.
Features that only change speed (compile, and what needs it) are disabled for the step and reported.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.utils._pytree import tree_leaves

from converters.common.collector import collector_paused
from converters.layout.mesh_shape import MeshShape
from trainer.build import build
from trainer.config.sections import Config
from trainer.job.record import Job
from trainer.models.objectives import get_objective
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.expert_exchange import EXCHANGES, bytes_sent
from trainer.parallel.float8 import is_float8
from trainer.parallel.tied import has_group_of_ends
from trainer.ranks.mesh import ALL_RANKS, Meshes, communicators, local_part, make_meshes
from trainer.ranks.process_group import fake_ranks
from trainer.step import Phase, TrainStep
from trainer.train_model import TrainModel

_ENDS = "embedding and output"
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_KINDS = {  # by the beginning of an operation's name, in trainer/parallel/expert_exchange.py
    "exchange_counts": "all-to-all",
    "send_to_experts": "all-to-all",
    "return_from_experts": "all-to-all",
    # and in torch's two libraries of collectives
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}


@dataclass(slots=True)
class Traffic:
    """Calls of one kind over one group, and the bytes of their larger side: gathered output or scattered input.

    Of an exchange of experts, the bytes that this rank sends: what it receives depends on all ranks' routers.
    """

    calls: int = 0
    bytes: int = 0


class CollectiveCount:
    """Traffic by (kind, name of the group). Each call counts `times` times."""

    def __init__(self) -> None:
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self.times = 1

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each call inside as so many."""
        before, self.times = self.times, times
        try:
            yield
        finally:
            self.times = before

    def see(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count an operation if it is a collective."""
        if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "titan"):
            return
        name = func._opname
        kind = next((kind for beginning, kind in _KINDS.items() if name.startswith(beginning)), None)
        if kind is None:
            return  # a wait, a barrier, or a computation
        found = self.traffic[kind, _group_of(args)]
        found.calls += self.times
        found.bytes += self.times * (bytes_sent(func, args) if func in EXCHANGES else _payload_bytes(args))


def _group_of(args: tuple[Any, ...]) -> str:
    """Functional collectives have their group's name as the last argument, the others the group itself."""
    held = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    if held is not None:
        return dist.ProcessGroup.unbox(held).group_name
    return next(arg for arg in reversed(args) if isinstance(arg, str))


def _payload_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the larger side. Functional all-gathers have the smaller one and the factor by which it grows."""
    first = tree_leaves(args[0])
    sides = [sum(t.nbytes for t in first)]
    if len(args) > 1:
        second = [t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)]
        sides.append(sum(t.nbytes for t in second))
    grows = args[1] if len(args) == 3 and isinstance(args[1], int) else 1
    return int(max(sides)) * grows


class TracedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose collectives are counted. Shapes and dtypes go through the operations that training runs.

    Reading a number from a fake tensor gives 1.
    """

    def __init__(self, count: CollectiveCount):
        super().__init__(allow_non_fake_inputs=True)
        self.count = count

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if all(kind in _PLAIN for kind in types):  # a DTensor's operations are dispatched again on its local tensors
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1.0 if args[0].is_floating_point() else 1
            self.count.see(func, args)
        return super().dispatch(func, types, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one rank of a job holds, and the collectives that it issues in one step."""

    dims: MeshShape
    rank: int
    coordinates: MeshShape  # from 0
    stages: Mapping[int, tuple[str, ...]]  # this rank's, with their modules
    num_stages: int
    model_parameters: int
    rank_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    communicators: Mapping[str, tuple[str, ...]]  # by name, with the mesh axes that use each
    collectives: Mapping[tuple[str, str], Traffic]  # by (mesh axis, kind)
    steps: int
    samples_per_step: int
    unit: str  # of progress, in the plural
    units_per_step: int
    num_accumulated: int  # forward and backward passes of a step; at most two of them were traced
    num_microbatches: int  # of each pass, through the pipeline
    left_out: tuple[str, ...]


def dry_run(job: Job, *, rank: int) -> DryRun:
    """Build rank `rank` of the job and run one step.

    The process must not have a process group; it has none afterwards either.
    """
    config, left_out = _disable_speed_features(job.config)
    traced, dims, split = replace(job, config=config), job.dims, job.split
    objective = get_objective(job.family.name)
    count = CollectiveCount()
    with fake_ranks(dims.world_size, rank=rank), collector_paused():
        meshes = make_meshes(dims, "cpu")
        names = _group_names(meshes)
        tensors = TracedTensors(count)
        model = build(traced, meshes, torch.device("cpu"), memory=tensors)
        with tensors, _connections_not_counted(count):
            optimizer = build_optimizer(model.named_parameters(), config.optimizer)
            _one_step(model, optimizer, traced, meshes, count)
        model_parameters = list(model.named_parameters().values())
        parameters = [local_part(p) for p in model_parameters]
        gradients = [local_part(p.grad) for p in model_parameters if p.grad is not None]
        states = [local_part(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        copies = {id(p) for p in model.tied_copies()}
        coordinates = dims.coordinates(rank)
        return DryRun(
            dims=dims,
            rank=rank,
            coordinates=coordinates,
            stages={stage: split.modules[stage] for stage in split.stages_of(coordinates.pp)},
            num_stages=split.num_stages,
            model_parameters=job.num_parameters,
            rank_parameters=sum(local_part(p).numel() for p in model_parameters if id(p) not in copies),
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes(gradients),
            optimizer_bytes=_bytes(states),
            communicators=communicators(dims)
            | ({_ENDS: ()} if has_group_of_ends(job.args, split, coordinates.pp) else {}),
            collectives=_by_axis(count, names),
            steps=config.training.steps,
            samples_per_step=job.samples_per_step,
            unit=objective.unit,
            units_per_step=objective.units_per_step(job),
            num_accumulated=job.num_accumulated,
            num_microbatches=job.num_microbatches,
            left_out=tuple(left_out),
        )


def _disable_speed_features(config: Config) -> tuple[Config, list[str]]:
    """The config to trace, and a line for each feature that it disables."""
    left_out = []
    if config.compile.enable:
        left_out.append("compile: the step is traced without it")
        config = replace(config, compile=replace(config.compile, enable=False))
        if config.activation_checkpoint.mode == "memory_budget":
            left_out.append("activation_checkpoint.mode = memory_budget, which needs compile")
            config = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode="none"))
        if config.parallelism.enable_async_tensor_parallel:
            left_out.append("asynchronous tensor parallelism: its collectives are counted as if they were synchronous")
            config = replace(config, parallelism=replace(config.parallelism, enable_async_tensor_parallel=False))
    if config.training.enable_cpu_offload:
        left_out.append("CPU offload: the bytes above are in host memory")
        config = replace(config, training=replace(config.training, enable_cpu_offload=False))
    if is_float8(config.model) and not config.float8.emulate:
        config = replace(config, float8=replace(config.float8, emulate=True))  # the same tensors, on any device
    return config, left_out


@contextmanager
def _connections_not_counted(count: CollectiveCount) -> Iterator[None]:
    """Do not count the messages by which torch's pipeline schedules connect neighbours before their first step."""
    owners = {PipelineScheduleSingle: "_initialize_stage", PipelineScheduleMulti: "_initialize_stages"}
    before = [(owner, name, getattr(owner, name)) for owner, name in owners.items()]

    def uncounted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with count.repeated(0):
                return method(*args, **kwargs)

        return run

    for owner, name, method in before:
        setattr(owner, name, uncounted(method))
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


@dataclass(frozen=True, slots=True)
class _RepeatedPasses:
    """Counts each traced forward and backward pass as several: all but the last of an accumulated step are alike."""

    count: CollectiveCount
    times: tuple[int, ...]  # of each traced pass

    def during(self, phase: Phase, number: int = 0) -> AbstractContextManager[None]:
        return self.count.repeated(self.times[number]) if phase == "forward_backward" else nullcontext()


def _one_step(
    model: TrainModel, optimizer: torch.optim.Optimizer, job: Job, meshes: Meshes, count: CollectiveCount
) -> None:
    """One optimizer step. Of many accumulated passes the last is traced, and one that counts for all before it."""
    training = job.config.training
    passes = _RepeatedPasses(count, (job.num_accumulated - 1, 1) if job.num_accumulated > 1 else (1,))
    step = TrainStep(
        model,
        meshes,
        max_norm=training.max_norm,
        local_batch_size=training.local_batch_size,
        num_batches=len(passes.times),
        observer=passes,
    )
    model.follow(optimizer)
    with count.repeated(0):
        optimizer.step()  # without gradients: runs what follows an update, as before every step but the first
    num_samples = len(passes.times) * training.local_batch_size
    step.run(get_objective(job.family.name).zeros(job, num_samples, False), optimizer)


def _group_names(meshes: Meshes) -> dict[str, str]:
    """What runs over each group: the first mesh axis that uses it. All ranks last."""
    default = dist.group.WORLD
    assert default is not None
    users = communicators(meshes.dims)
    named: dict[str, str] = {meshes.groups[name].group_name: name for name in users if name != ALL_RANKS}
    axis = next((axis for axis in users.get(ALL_RANKS, ()) if axis != "batch"), "")
    return named | {default.group_name: f"{axis} = {ALL_RANKS}" if axis else ALL_RANKS}


def _by_axis(count: CollectiveCount, names: Mapping[str, str]) -> dict[tuple[str, str], Traffic]:
    """Traffic by axis and kind, ordered by axis; groups of one rank send nothing."""
    found: dict[tuple[str, str], Traffic] = {}
    for (kind, group), traffic in count.traffic.items():
        if group not in names and _size_of(group) == 1:
            continue
        total = found.setdefault((names.get(group, _ENDS), kind), Traffic())
        total.calls += traffic.calls
        total.bytes += traffic.bytes
    order = [*names.values(), _ENDS]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0][0])))


def _size_of(group_name: str) -> int:
    from torch._C._distributed_c10d import _resolve_process_group

    return int(_resolve_process_group(group_name).size())  # type: ignore[arg-type]


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
