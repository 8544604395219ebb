"""A trace of the real train step: built by trainer/build.py for one rank of any job, on fake tensors, without peers."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from converters.collector import collector_paused
from converters.errors import UnsupportedError
from converters.families.base import ModelArgs
from converters.layout import MeshShape
from titan_tools.memory.trace.compile.plan import compile_traced
from titan_tools.memory.trace.events import Place, Trace
from titan_tools.memory.trace.kernels.kernels import Kernels, cublas_bytes, kernels_used
from titan_tools.memory.trace.record.offload import HostMemory, OffloadedTensors, OffloadRecorder, offload_seen
from titan_tools.memory.trace.record.owners import owner_of_many
from titan_tools.memory.trace.record.places import places_told, watch_modules
from titan_tools.memory.trace.record.recorder import RecordedTensors, Recorder, resizes_recorded
from titan_tools.memory.trace.refused import chain
from trainer.build import build
from trainer.config.sections import Config
from trainer.data.batch import Batch
from trainer.fake_ranks import fake_ranks
from trainer.job import Job
from trainer.mesh import make_meshes
from trainer.optim import build_optimizer
from trainer.step import Phase, TrainStep
from trainer.train_model import TrainModel

_WITHOUT_SHAPES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def capture(
    config: Config,
    args: ModelArgs,
    dims: MeshShape,
    *,
    rank: int,
    kernels: Kernels,
    num_steps: int = 2,
    host: HostMemory | None = None,
) -> Trace:
    """Build rank `rank` of `dims.world_size`, take it through steps, and validate once if the config does.

    The layout must have been checked, and coverage.py asked. Needs a process without a process group; leaves it so.
    Peak memory and time grow with the model's depth only. `host` is told what CPU offload keeps in host memory.
    """
    is_offloaded = config.training.enable_cpu_offload and kernels.device == "cuda"
    recorder = OffloadRecorder(host or HostMemory()) if is_offloaded else Recorder()
    kind = OffloadedTensors if is_offloaded else RecordedTensors
    tensors = kind(recorder, kernels.workspaces)
    at_home = recorder.on_host if is_offloaded else nullcontext  # where parameters and states are
    with (
        _values_refused(),
        _remarks_left_out(),
        fake_ranks(dims.world_size, rank=rank),
        collector_paused(),
        kernels_used(kernels),
        compile_traced(config, kernels, recorder),
        resizes_recorded(recorder),
        places_told(recorder),
        offload_seen(recorder) if is_offloaded else nullcontext(),
    ):
        job, meshes = Job.of(config, args, dims), make_meshes(dims, "cpu")
        model = build(job, meshes, torch.device("cpu"), memory=tensors)
        watch_modules(model.parts, recorder)
        per_batch = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        observer = _StepPlaces(model, recorder, per_batch=per_batch if dims.pp > 1 else 0)
        with tensors:
            for _ in range(2):  # forward's thread and autograd's have a handle of cuBLAS each
                if size := cublas_bytes(kernels):
                    recorder.allocate(size, part="workspaces")
            recorder.place = Place(0, "states")
            training = config.training
            with at_home():
                optimizer = build_optimizer(model.named_parameters(), config.optimizer)
                step = TrainStep(
                    model,
                    meshes,
                    max_norm=training.max_norm,
                    local_batch_size=training.local_batch_size,
                    observer=observer,
                )
            model.follow(optimizer)
            _tell_owners(model, optimizer, recorder)
            if kernels.device == "cuda" and config.optimizer.implementation != "fused":
                recorder.counts_steps_on_host = True
                for state in filter(None, optimizer.state.values()):  # empty where the first step makes them
                    recorder.leave_out(state["step"])
            recorder.reclassify(step.clip.shares, "optimizer", owner=_owner_of_all(model, recorder))
            num_samples = job.samples_per_step // dims.batch
            for number in range(1, num_steps + 1):
                _one_step(step, optimizer, config, recorder, number=number, num_samples=num_samples)
            if config.validation.enable:
                recorder.place = Place(num_steps, "validation", microbatch=-1)
                _validate(model, config)
        return recorder.finish()


@contextmanager
def _values_refused() -> Iterator[None]:
    """Families and losses of one's own may do what has no size until it is computed."""
    try:
        yield
    except RuntimeError as error:
        reasons = (each for each in chain(error) if isinstance(each, _WITHOUT_SHAPES) or "no fake impl" in str(each))
        if (reason := next(reasons, None)) is None:
            raise
        what = getattr(reason, "func", None) or str(reason).partition(". ")[0]
        raise UnsupportedError(
            "no estimate is given: how much a train step makes depends on what tensors hold, or is known to a kernel"
            f" alone: {what}",
            hint="multiply by a mask instead of taking what it selects; give an operation of your own its shapes"
            " (torch.library.register_fake)",
        ) from error


@contextmanager
def _remarks_left_out() -> Iterator[None]:
    """What torch logs is for who trains: messages that could be one, failures of stages, which we tell ourselves."""
    with ExitStack() as quiet:
        for name in ("torch.distributed.pipelining.schedules", "torch.distributed.tensor._redistribute"):
            quiet.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        yield


def _one_step(
    step: TrainStep,
    optimizer: torch.optim.Optimizer,
    config: Config,
    recorder: Recorder,
    *,
    number: int,
    num_samples: int,
) -> None:
    """As trainer/train.py: gradients, clipping, update."""
    recorder.place = Place(number, "forward", microbatch=-1)
    step.compute_gradients(_batch(num_samples, config.training.seq_len), stop_requested=False)
    step.update(optimizer)
    recorder.place = Place(number, "zero_grad", microbatch=-1)
    optimizer.zero_grad()


def _tell_gradients(model: TrainModel, recorder: Recorder) -> None:
    for fqn, parameter in model.named_parameters().items():
        if parameter.grad is not None:
            recorder.reclassify(parameter.grad, "gradients", owner=fqn)


def _validate(model: TrainModel, config: Config) -> None:
    """As trainer/validate.py: one batch, which leaves nothing behind for the next one."""
    for part in model.parts:
        part.eval()
    model.forward_loss(_batch(config.validation.local_batch_size, config.validation.seq_len)).item()
    for part in model.parts:
        part.train()


def _batch(num_samples: int, seq_len: int) -> Batch:
    """What a GPU holds of a batch while it is worked on: copies, of what lies in host memory."""
    tokens, targets = (torch.zeros(num_samples, seq_len, dtype=torch.int64) for _ in range(2))
    return Batch(tokens, targets)


@dataclass(frozen=True, slots=True)
class _StepPlaces:
    """Tells the recorder where the step stands. A pipeline splits each batch into `per_batch` microbatches."""

    model: TrainModel
    recorder: Recorder
    per_batch: int

    @contextmanager
    def during(self, phase: Phase, number: int = 0) -> Iterator[None]:
        recorder, step = self.recorder, self.recorder.place.step
        match phase:
            case "forward_backward":
                recorder.first_microbatch = number * self.per_batch
                recorder.place = Place(step, "forward", -1, -1) if self.per_batch else Place(step, "forward", 0, number)
                yield
            case "clip":
                recorder.place = Place(step, "clip", microbatch=-1)
                _tell_gradients(self.model, recorder)
                yield
                _tell_gradients(self.model, recorder)  # clipping lays out anew what tensor parallelism left otherwise
            case "update":
                recorder.place = Place(step, "optimizer", microbatch=-1)
                yield


def _owner_of_all(model: TrainModel, recorder: Recorder) -> str:
    return owner_of_many(list(model.named_parameters()), recorder.layers_of_parts)


def _tell_owners(model: TrainModel, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    for fqn, parameter in model.named_parameters().items():
        recorder.reclassify(parameter, "parameters", owner=fqn)
        for value in optimizer.state[parameter].values():
            recorder.reclassify(value, "optimizer", owner=fqn)
