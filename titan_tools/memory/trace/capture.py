"""A trace of the real train step: built by trainer/build.py for one rank of any job, on fake tensors, without peers."""

import torch

from converters.collector import collector_paused
from converters.families.base import ModelArgs
from converters.layout import MeshShape
from titan_tools.memory.trace.compile import compile_traced
from titan_tools.memory.trace.events import Place, Trace
from titan_tools.memory.trace.kernels import Kernels, cublas_bytes, kernels_used
from titan_tools.memory.trace.owners import owner_of_many
from titan_tools.memory.trace.places import places_told, watch_modules
from titan_tools.memory.trace.recorder import RecordedTensors, Recorder, resizes_recorded
from trainer.build import build
from trainer.config.sections import Config
from trainer.data.batch import Batch
from trainer.fake_ranks import fake_ranks
from trainer.mesh import local_part, make_meshes
from trainer.optim import build_optimizer
from trainer.parallel_dims import samples_per_step
from trainer.step import TrainStep
from trainer.train_model import TrainModel


def capture(
    config: Config, args: ModelArgs, dims: MeshShape, *, rank: int, kernels: Kernels, num_steps: int = 2
) -> Trace:
    """Build rank `rank` of `dims.world_size` and take it through steps. The layout must have been checked.

    Needs a process without a process group; leaves it so. Peak memory and time grow with the model's depth only.
    """
    recorder = Recorder()
    tensors = RecordedTensors(recorder, kernels.workspaces)
    with (
        fake_ranks(dims.world_size, rank=rank),
        collector_paused(),
        kernels_used(kernels),
        compile_traced(config, kernels, recorder),
        resizes_recorded(recorder),
        places_told(recorder),
    ):
        meshes = make_meshes(dims, "cpu")
        model = build(config, args, dims, meshes, torch.device("cpu"), memory=tensors)
        watch_modules(model.parts, recorder)
        per_batch = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        _watch_microbatches(model, recorder, per_batch=per_batch if dims.pp > 1 else 0)
        with tensors:
            for _ in range(2):  # forward's thread and autograd's have a handle of cuBLAS each
                if size := cublas_bytes(kernels):
                    recorder.allocate(size, part="workspaces")
            recorder.place = Place(0, "states")
            optimizer = build_optimizer(model.named_parameters(), config.optimizer)
            model.follow(optimizer)
            _tell_owners(model, optimizer, recorder)
            training = config.training
            step = TrainStep(model, meshes, max_norm=training.max_norm, local_batch_size=training.local_batch_size)
            recorder.reclassify(step._clip._shares, "optimizer", owner=owner_of_many(list(model.named_parameters())))
            num_samples = samples_per_step(training, dims.batch) // dims.batch
            for number in range(1, num_steps + 1):
                _one_step(model, step, optimizer, config, recorder, number=number, num_samples=num_samples)
        return recorder.finish()


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
    recorder.place = Place(number, "forward", microbatch=-1)
    tokens = torch.zeros(num_samples, config.training.seq_len, dtype=torch.int64)
    targets = torch.zeros(num_samples, config.training.seq_len, dtype=torch.int64)
    clip = step._clip

    def clipped() -> torch.Tensor:
        recorder.place = Place(number, "clip", microbatch=-1)
        for fqn, parameter in model.named_parameters().items():
            if parameter.grad is not None:
                recorder.reclassify(local_part(parameter.grad), "gradients", owner=fqn)
        return clip()

    step._clip = clipped
    try:
        step.compute_gradients(Batch(tokens=tokens, targets=targets), stop_requested=False)
    finally:
        step._clip = clip
    recorder.place = Place(number, "optimizer", microbatch=-1)
    optimizer.step()
    recorder.place = Place(number, "zero_grad", microbatch=-1)
    optimizer.zero_grad()


def _watch_microbatches(model: TrainModel, recorder: Recorder, *, per_batch: int) -> None:
    """Number the batches that a step accumulates; a pipeline numbers the microbatches of each, `per_batch` of them."""
    once = model.forward_backward
    seen = {"step": 0, "batches": 0}

    def forward_backward(batch: Batch, num_valid_tokens: float) -> torch.Tensor:
        step = recorder.place.step
        seen["batches"] = seen["batches"] + 1 if seen["step"] == step else 0
        seen["step"] = step
        recorder.first_microbatch = seen["batches"] * per_batch
        recorder.place = Place(step, "forward", microbatch=-1 if per_batch else seen["batches"])
        return once(batch, num_valid_tokens)

    model.forward_backward = forward_backward


def _tell_owners(model: TrainModel, optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    for fqn, parameter in model.named_parameters().items():
        recorder.reclassify(local_part(parameter), "parameters", owner=fqn)
        for value in optimizer.state[parameter].values():
            recorder.reclassify(local_part(value), "optimizer", owner=fqn)
