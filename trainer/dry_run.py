"""One rank of any job, without its memory, its data and its peers: built and taken through a step on fake tensors.

The process group is fake, so that any world size fits on one machine, and the model is trainer/build.py's. What only
changes how fast things are computed is left out of the step, and told: compile, and what needs it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from converters.collector import collector_paused
from converters.families.base import ModelArgs
from converters.families.registry import get_family
from converters.layout import MeshShape
from trainer.build import build
from trainer.config.sections import Config
from trainer.data.batch import Batch
from trainer.fake_ranks import fake_ranks
from trainer.mesh import Meshes, local_part, make_meshes
from trainer.optim import build_optimizer
from trainer.parallel.float8 import is_float8
from trainer.parallel_dims import samples_per_step
from trainer.stages import split_model
from trainer.step import TrainStep
from trainer.traced_step import CollectiveCount, TracedTensors, Traffic
from trainer.train_model import TrainModel

_AXES = ("pp", "dp_replicate", "fsdp", "tp", "cp", "batch", "loss")


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one rank of a job would hold and send in a step."""

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
    collectives: Mapping[tuple[str, str], Traffic]  # by (mesh axis, kind)
    steps: int
    samples_per_step: int
    tokens_per_step: int
    num_accumulated: int  # forward and backward passes of a step; two of them were traced at most
    num_microbatches: int  # of each, through the pipeline
    left_out: tuple[str, ...]


def dry_run(config: Config, args: ModelArgs, dims: MeshShape, *, rank: int) -> DryRun:
    """Build rank `rank` of `dims.world_size` and take it through one step. The layout must have been checked.

    Needs a process without a process group; leaves it so.
    """
    traced, left_out = _without_what_only_speeds(config)
    training = config.training
    samples = samples_per_step(training, dims.batch)
    num_accumulated = samples // (training.local_batch_size * dims.batch)
    count = CollectiveCount()
    with fake_ranks(dims.world_size, rank=rank), collector_paused():
        meshes = make_meshes(dims, "cpu")
        names = _group_names(meshes)
        tensors = TracedTensors(count)
        model = build(traced, args, dims, meshes, torch.device("cpu"), memory=tensors)
        with tensors, _connections_not_counted(count):
            optimizer = build_optimizer(model.named_parameters(), traced.optimizer)
            _one_step(model, optimizer, traced, meshes, count, num_accumulated=num_accumulated)
        held = [p for fqn, p in model.named_parameters().items()]
        parameters = [local_part(p) for p in held]
        gradients = [local_part(p.grad) for p in held if p.grad is not None]
        states = [local_part(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        copies = {id(p) for p in model.tied_copies()}
        split = split_model(config.parallelism, args.num_layers, dims.pp)
        coordinates = dims.coordinates(rank)
        return DryRun(
            dims=dims,
            rank=rank,
            coordinates=coordinates,
            stages={stage: split.modules[stage] for stage in split.stages_of(coordinates.pp)},
            num_stages=split.num_stages,
            model_parameters=get_family(config.model.name).num_parameters(args),
            rank_parameters=sum(local_part(p).numel() for p in held if id(p) not in copies),
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes(gradients),
            optimizer_bytes=_bytes(states),
            collectives=_by_axis(count, names),
            steps=training.steps,
            samples_per_step=samples,
            tokens_per_step=samples * training.seq_len,
            num_accumulated=num_accumulated,
            num_microbatches=_num_microbatches(config, dims),
            left_out=tuple(left_out),
        )


def _without_what_only_speeds(config: Config) -> tuple[Config, list[str]]:
    """The config to trace, and what is not in it."""
    left_out = []
    if config.compile.enable:
        left_out.append("compile: the step is traced as it runs without")
        config = replace(config, compile=replace(config.compile, enable=False))
        if config.activation_checkpoint.mode == "memory_budget":
            left_out.append("activation_checkpoint.mode = memory_budget, which compile carries out")
            config = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode="none"))
        if config.parallelism.enable_async_tensor_parallel:
            left_out.append("asynchronous tensor parallelism: its pieces are told as the collectives they are cut from")
            config = replace(config, parallelism=replace(config.parallelism, enable_async_tensor_parallel=False))
    if config.training.enable_cpu_offload:
        left_out.append("CPU offload: the bytes told lie in host memory")
        config = replace(config, training=replace(config.training, enable_cpu_offload=False))
    if is_float8(config) and not config.float8.emulate:
        config = replace(config, float8=replace(config.float8, emulate=True))  # the same tensors, on any device
    return config, left_out


def _num_microbatches(config: Config, dims: MeshShape) -> int:
    size = config.parallelism.pipeline_parallel_microbatch_size
    return config.training.local_batch_size // size if dims.pp > 1 else 1


@contextmanager
def _connections_not_counted(count: CollectiveCount) -> Iterator[None]:
    """Before its first step a pipeline sends its neighbours a number each, to connect: that is not part of a step."""
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


def _one_step(
    model: TrainModel,
    optimizer: torch.optim.Optimizer,
    config: Config,
    meshes: Meshes,
    count: CollectiveCount,
    *,
    num_accumulated: int,
) -> None:
    """One optimizer step. Of many accumulated passes the last is traced, and one that stands for all before it."""
    training = config.training
    step = TrainStep(model, meshes, max_norm=training.max_norm, local_batch_size=training.local_batch_size)
    model.follow(optimizer)
    with count.repeated(0):
        optimizer.step()  # without gradients: only what follows an update, as before any step but the first
    once = model.forward_backward

    stands_for = [num_accumulated - 1, 1] if num_accumulated > 1 else [1]
    num_traced = len(stands_for)

    def stands_for_many(batch: Batch, num_valid_tokens: float) -> torch.Tensor:
        with count.repeated(stands_for.pop(0)):
            return once(batch, num_valid_tokens)

    model.forward_backward = stands_for_many
    tokens = torch.zeros(num_traced * training.local_batch_size, training.seq_len, dtype=torch.int64)
    step.compute_gradients(Batch(tokens=tokens, targets=tokens), stop_requested=False)
    optimizer.step()


def _group_names(meshes: Meshes) -> dict[str, str]:
    """Each group's mesh axis. An axis over all ranks may be torch's default group, which others use as well."""
    named = {dist.group.WORLD.group_name: "all ranks"}
    for axis in reversed(_AXES):
        mesh = meshes[axis]
        name = mesh.get_group().group_name
        if name != dist.group.WORLD.group_name:
            named[name] = axis
        elif mesh.size() > 1 and axis not in ("batch", "loss"):
            named[name] = f"{axis} = all ranks"
    return named


def _by_axis(count: CollectiveCount, names: Mapping[str, str]) -> dict[tuple[str, str], Traffic]:
    """Traffic by axis and kind, in the order of the axes; groups of one rank send nothing."""
    found: dict[tuple[str, str], Traffic] = {}
    for (kind, group), traffic in count.traffic.items():
        if group not in names and _size_of(group) == 1:
            continue
        total = found.setdefault((names.get(group, "embedding and output"), kind), Traffic())
        total.calls += traffic.calls
        total.bytes += traffic.bytes
    order = list(dict.fromkeys([*names.values()][::-1]))
    return dict(sorted(found.items(), key=lambda item: (order + [item[0][0]]).index(item[0][0])))


def _size_of(group_name: str) -> int:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group_name).size()


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
