"""Trace the real train step of one rank of any job, on fake tensors and without the other ranks."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from converters.common.collector import collector_paused
from converters.common.errors import UnsupportedError
from titan_tools.memory.trace.coverage import chain
from titan_tools.memory.trace.events import StepPoint, Trace, layer_of
from titan_tools.memory.trace.kernels import CUBLAS_HANDLES, Kernels, cublas_bytes, use_kernels, with_attention_of
from titan_tools.memory.trace.offload import OffloadedTensors, OffloadRecorder, move_to_gpu, track_offload
from titan_tools.memory.trace.recorder import Recorder, owner_of_many
from titan_tools.memory.trace.tensors import RecordedTensors
from titan_tools.memory.trace.tracking import track_modules, track_points
from trainer.build import build
from trainer.config.sections import Config
from trainer.job.record import Job
from trainer.models.objectives import get_objective
from trainer.optim.clip import square_sums_on_gpu
from trainer.optim.optimizer import build_optimizer
from trainer.ranks.mesh import make_meshes
from trainer.ranks.process_group import fake_ranks
from trainer.step import Phase, TrainStep
from trainer.train_model import TrainModel

_WITHOUT_SHAPES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def capture(job: Job, *, rank: int, kernels: Kernels, num_steps: int = 2) -> Trace:
    """Build one rank of a job, run `num_steps` steps, and validate once if the config does.

    Check coverage.py's gaps before. Initializes and destroys the default process group. Memory and time grow with the
    model's depth only.
    """
    config, dims = job.config, job.dims
    kernels = with_attention_of(kernels, job)
    recorder = Recorder()
    offloaded: AbstractContextManager[None] = nullcontext()
    on_parameters_side: Callable[[], AbstractContextManager[None]] = nullcontext
    is_offloaded = config.training.enable_cpu_offload and kernels.device == "cuda"
    if is_offloaded:
        recorder = offload_recorder = OffloadRecorder()
        tensors: RecordedTensors = OffloadedTensors(offload_recorder, kernels.workspaces)
        offloaded, on_parameters_side = track_offload(offload_recorder), offload_recorder.on_host
    else:
        tensors = RecordedTensors(recorder, kernels.workspaces)
    with (
        _reject_value_dependent_shapes(),
        _silence_torch_logs(),
        fake_ranks(dims.world_size, rank=rank),
        collector_paused(),
        use_kernels(kernels),
        _compilation(config, kernels, recorder),
        recorder.resizes_recorded(),
        track_points(recorder),
        offloaded,
    ):
        meshes = make_meshes(dims, "cpu")
        with on_parameters_side():  # float8 is gathered in float8 as with NCCL: gloo has no float8
            model = build(
                job,
                meshes,
                torch.device("cpu"),
                memory=tensors,
                collectives_of=kernels.device,
                imbalance=kernels.imbalance,
            )
        holds_last = job.split.num_stages - 1 in job.split.stages_of(meshes["pp"].get_local_rank())
        track_modules(model.parts, recorder, holds_last=holds_last)
        observer = _PointObserver(model, recorder, per_batch=job.num_microbatches if dims.pp > 1 else 0)
        with tensors:
            if is_offloaded:
                move_to_gpu(model.parts)
            if size := cublas_bytes(kernels):
                for _ in range(CUBLAS_HANDLES):
                    recorder.allocate(size, part="workspaces")
            recorder.point = StepPoint(0, "states")
            training = config.training
            with on_parameters_side():
                optimizer = build_optimizer(model.named_parameters(), config.optimizer)
                step = TrainStep(
                    model,
                    meshes,
                    max_norm=training.max_norm,
                    local_batch_size=training.local_batch_size,
                    observer=observer,
                )
            if kernels.device == "cuda":
                step.clip.square_sums = square_sums_on_gpu
            model.follow(optimizer)
            recorder.parameters_per_layer = Counter(map(layer_of, model.named_parameters()))
            _label_parameters(model, optimizer, recorder)
            _label_experts(model, step, recorder)
            if kernels.device == "cuda" and config.optimizer.implementation != "fused":
                recorder.counts_steps_on_host = True
                for state in filter(None, optimizer.state.values()):  # empty where the first step makes them
                    recorder.forget(state["step"])
            recorder.reclassify(step.clip.shares, "optimizer", owner=_owner_of_all(model, recorder))
            num_samples = job.samples_per_step // dims.batch
            for number in range(1, num_steps + 1):
                _one_step(step, optimizer, job, recorder, number=number, num_samples=num_samples)
            if config.validation.enable:
                recorder.point = StepPoint(num_steps, "validation", microbatch=-1)
                _validate(model, job)
        return recorder.finish()


def _compilation(config: Config, kernels: Kernels, recorder: Recorder) -> AbstractContextManager[None]:
    if not config.compile.enable or not config.compile.components:
        return nullcontext()
    from titan_tools.memory.trace.compile import trace_compiled_code

    return trace_compiled_code(config, kernels, recorder)


@contextmanager
def _reject_value_dependent_shapes() -> Iterator[None]:
    """Raise UnsupportedError if a registered family or loss makes shapes that depend on values."""
    try:
        yield
    except RuntimeError as error:
        reasons = (each for each in chain(error) if isinstance(each, _WITHOUT_SHAPES) or "no fake impl" in str(each))
        if (reason := next(reasons, None)) is None:
            raise
        what = getattr(reason, "func", None) or str(reason).partition(". ")[0]
        raise UnsupportedError(
            f"no estimate is given: the shapes of {what} depend on values, or only its kernel knows them",
            hint="multiply by a mask instead of indexing with it; register shapes for a custom operation"
            " (torch.library.register_fake)",
        ) from error


@contextmanager
def _silence_torch_logs() -> Iterator[None]:
    """Silence torch's remarks on a training run: collectives that could be one, failed stages that we report."""
    with ExitStack() as quiet:
        for name in ("torch.distributed.pipelining.schedules", "torch.distributed.tensor._redistribute"):
            quiet.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        yield


def _one_step(
    step: TrainStep,
    optimizer: torch.optim.Optimizer,
    job: Job,
    recorder: Recorder,
    *,
    number: int,
    num_samples: int,
) -> None:
    """A step of the loop in trainer/train.py, with the recorder's points."""
    recorder.point = StepPoint(number, "forward", microbatch=-1)
    # The step alone holds the batch
    step.run(get_objective(job.family.name).zeros(job, num_samples, False), optimizer)
    recorder.point = StepPoint(number, "zero_grad", microbatch=-1)
    optimizer.zero_grad()


def _label_gradients(model: TrainModel, recorder: Recorder) -> None:
    for fqn, parameter in model.named_parameters().items():
        if parameter.grad is not None:
            recorder.reclassify(parameter.grad, "gradients", owner=fqn)


def _validate(model: TrainModel, job: Job) -> None:
    """The validation of trainer/validate.py, of one batch: the next ones do the same."""
    for part in model.parts:
        part.eval()
    num_samples = job.config.validation.local_batch_size
    model.forward_loss(get_objective(job.family.name).zeros(job, num_samples, True)).item()
    for part in model.parts:
        part.train()


@dataclass(frozen=True, slots=True)
class _PointObserver:
    """Sets the recorder's point at each phase of a step. A pipeline splits a batch into `per_batch` microbatches."""

    model: TrainModel
    recorder: Recorder
    per_batch: int

    @contextmanager
    def during(self, phase: Phase, number: int = 0) -> Iterator[None]:
        recorder, step = self.recorder, self.recorder.point.step
        match phase:
            case "forward_backward":
                recorder.first_microbatch = number * self.per_batch
                stage, microbatch = (-1, -1) if self.per_batch else (0, number)
                recorder.point = StepPoint(step, "forward", stage, microbatch)
                yield
            case "clip":
                recorder.point = StepPoint(step, "clip", microbatch=-1)
                _label_gradients(self.model, recorder)
                yield
                _label_gradients(self.model, recorder)  # clipping redistributes gradients with another placement
            case "update":
                recorder.point = StepPoint(step, "optimizer", microbatch=-1)
                yield


def _owner_of_all(model: TrainModel, recorder: Recorder) -> str:
    return owner_of_many(list(model.named_parameters()), recorder.layers_of_parts, recorder.parameters_per_layer)


def _label_experts(model: TrainModel, step: TrainStep, recorder: Recorder) -> None:
    """What balances experts: a bias in each layer, and the rows of each expert in all layers of the whole model."""
    untrained = set(model.named_buffers())
    for part in model.parts:  # CPU offload replaced the model's own list
        for fqn, buffer in part.named_buffers():
            if fqn in untrained:
                recorder.reclassify(buffer, "parameters", owner=fqn)
    if step.balance is not None:
        for tensor in (step.balance.counts_LE, step.balance.rates_L1):
            recorder.reclassify(tensor, "optimizer", owner="balance of experts")


def _label_parameters(model: TrainModel, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    for fqn, parameter in model.named_parameters().items():
        recorder.reclassify(parameter, "parameters", owner=fqn)
        for value in optimizer.state[parameter].values():
            recorder.reclassify(value, "optimizer", owner=fqn)
