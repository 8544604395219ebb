"""Trace the real train step of one rank of any job, on fake tensors and without the other ranks."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from titan_tools.memory.constants import CUBLAS_HANDLES
from titan_tools.memory.trace.coverage import chain
from titan_tools.memory.trace.events import StepPoint, Trace
from titan_tools.memory.trace.kernels import Kernels, cublas_bytes, use_kernels
from titan_tools.memory.trace.offload import HostBytes, OffloadedTensors, OffloadRecorder, track_offload
from titan_tools.memory.trace.recorder import Recorder, owner_of_many
from titan_tools.memory.trace.tensors import RecordedTensors
from titan_tools.memory.trace.tracking import track_modules, track_points
from trainer.build import build
from trainer.config.sections import Config
from trainer.data.batch import Batch
from trainer.fake_ranks import fake_ranks
from trainer.mesh import make_meshes
from trainer.optim import build_optimizer
from trainer.parallel_dims import samples_per_step
from trainer.step import TrainStep
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
    host: HostBytes | None = None,
) -> Trace:
    """Build rank `rank` of `dims.world_size`, run `num_steps` steps, and validate once if the config does.

    The layout must have been checked, and coverage.py asked. Initializes and destroys the default process group.
    Peak memory and time grow with the model's depth only. `host` counts what CPU offload keeps in host memory.
    """
    is_offloaded = config.training.enable_cpu_offload and kernels.device == "cuda"
    recorder = OffloadRecorder(host or HostBytes()) if is_offloaded else Recorder()
    kind = OffloadedTensors if is_offloaded else RecordedTensors
    tensors = kind(recorder, kernels.workspaces)
    on_parameters_side = recorder.on_host if is_offloaded else nullcontext
    with (
        _reject_value_dependent_shapes(),
        _silence_torch_logs(),
        fake_ranks(dims.world_size, rank=rank),
        collector_paused(),
        use_kernels(kernels),
        _compilation(config, kernels, recorder),
        recorder.resizes_recorded(),
        track_points(recorder),
        track_offload(recorder) if is_offloaded else nullcontext(),
    ):
        meshes = make_meshes(dims, "cpu")
        model = build(config, args, dims, meshes, torch.device("cpu"), memory=tensors)
        track_modules(model.parts, recorder)
        per_batch = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        _track_microbatches(model, recorder, per_batch=per_batch if dims.pp > 1 else 0)
        with tensors:
            if size := cublas_bytes(kernels):
                for _ in range(CUBLAS_HANDLES):
                    recorder.allocate(size, part="workspaces")
            recorder.point = StepPoint(0, "states")
            training = config.training
            with on_parameters_side():
                optimizer = build_optimizer(model.named_parameters(), config.optimizer)
                step = TrainStep(model, meshes, max_norm=training.max_norm, local_batch_size=training.local_batch_size)
            model.follow(optimizer)
            _label_parameters(model, optimizer, recorder)
            if kernels.device == "cuda" and config.optimizer.implementation != "fused":
                recorder.counts_steps_on_host = True
                for state in filter(None, optimizer.state.values()):  # empty where the first step makes them
                    recorder.forget(state["step"])
            recorder.reclassify(step._clip._shares, "optimizer", owner=_owner_of_all(model, recorder))
            num_samples = samples_per_step(training, dims.batch) // dims.batch
            for number in range(1, num_steps + 1):
                _one_step(model, step, optimizer, config, recorder, number=number, num_samples=num_samples)
            if config.validation.enable:
                recorder.point = StepPoint(num_steps, "validation", microbatch=-1)
                _validate(model, config)
        return recorder.finish()


def _compilation(config: Config, kernels: Kernels, recorder: Recorder) -> AbstractContextManager[None]:
    if not config.compile.enable or not config.compile.components:
        return nullcontext()
    from titan_tools.memory.trace.compile import trace_compiled_code

    return trace_compiled_code(config, kernels, recorder)


@contextmanager
def _reject_value_dependent_shapes() -> Iterator[None]:
    """Raise UnsupportedError where a registered family or loss makes shapes that depend on values."""
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
    model: TrainModel,
    step: TrainStep,
    optimizer: torch.optim.Optimizer,
    config: Config,
    recorder: Recorder,
    *,
    number: int,
    num_samples: int,
) -> None:
    """As trainer/train.py: gradients, clipping, update."""
    recorder.point = StepPoint(number, "forward", microbatch=-1)
    clip = step._clip

    def clipped() -> torch.Tensor:
        recorder.point = StepPoint(number, "clip", microbatch=-1)
        _label_gradients(model, recorder)
        norm = clip()
        _label_gradients(
            model, recorder
        )  # clipping redistributes gradients that tensor parallelism left in another placement
        return norm

    step._clip = clipped
    try:
        step.compute_gradients(_batch(num_samples, config.training.seq_len), stop_requested=False)
    finally:
        step._clip = clip
    recorder.point = StepPoint(number, "optimizer", microbatch=-1)
    optimizer.step()
    recorder.point = StepPoint(number, "zero_grad", microbatch=-1)
    optimizer.zero_grad()


def _label_gradients(model: TrainModel, recorder: Recorder) -> None:
    for fqn, parameter in model.named_parameters().items():
        if parameter.grad is not None:
            recorder.reclassify(parameter.grad, "gradients", owner=fqn)


def _validate(model: TrainModel, config: Config) -> None:
    """As trainer/validate.py, for one batch: the next ones do the same."""
    for part in model.parts:
        part.eval()
    model.forward_loss(_batch(config.validation.local_batch_size, config.validation.seq_len)).item()
    for part in model.parts:
        part.train()


def _batch(num_samples: int, seq_len: int) -> Batch:
    """The copy of a batch that a GPU holds."""
    tokens, targets = (torch.zeros(num_samples, seq_len, dtype=torch.int64) for _ in range(2))
    return Batch(tokens, targets)


def _track_microbatches(model: TrainModel, recorder: Recorder, *, per_batch: int) -> None:
    """Number the batches that a step accumulates; a pipeline splits each into `per_batch` microbatches."""
    once = model.forward_backward
    seen = {"step": 0, "batches": 0}

    def forward_backward(batch: Batch, num_valid_tokens: float) -> torch.Tensor:
        step = recorder.point.step
        seen["batches"] = seen["batches"] + 1 if seen["step"] == step else 0
        seen["step"] = step
        recorder.first_microbatch = seen["batches"] * per_batch
        stage, microbatch = (-1, -1) if per_batch else (0, seen["batches"])
        recorder.point = StepPoint(step, "forward", stage, microbatch)
        return once(batch, num_valid_tokens)

    model.forward_backward = forward_backward


def _owner_of_all(model: TrainModel, recorder: Recorder) -> str:
    return owner_of_many(list(model.named_parameters()), recorder.layers_of_parts)


def _label_parameters(model: TrainModel, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    for fqn, parameter in model.named_parameters().items():
        recorder.reclassify(parameter, "parameters", owner=fqn)
        for value in optimizer.state[parameter].values():
            recorder.reclassify(value, "optimizer", owner=fqn)
