"""What is learned, as one record of functions: the data, the inputs, the loss, validation, and the unit of progress.

The loop, the step, pipelines, accumulation and resume know nothing else of it. Torch-free: its functions import what
they need. Random numbers of an objective, such as noise, are functions of the seed and of the sample's number in the
run: then any number of ranks trains as one does, and a resumed run as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from converters.common.extensions import ExtensionError, check_attributes, check_protocol, check_record
from trainer.config.load import origins
from trainer.config.sections import Config
from trainer.config.show import toml_text
from trainer.job.record import Job

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from trainer.batch import Batch, Inputs
    from trainer.models.units import ModelPart
    from trainer.parallel.pipeline import StageShapes
    from trainer.ranks.mesh import Meshes


class Loader(Protocol):
    """Endless batches, each with this rank's samples of a step, and the position in them: plain values, equal on all
    ranks.
    """

    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out data: batches from one or more sources, as many on each rank, the same in every iteration."""

    loaders: Sequence[Iterable[Batch]]
    num_batches: int | None  # of each that a validation reads; None: all
    metrics: Callable[[Sequence[float]], Mapping[str, float | None]]  # of the mean loss of each loader


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a run. `held_out` is None if the config does not validate."""

    loader: Loader
    held_out: HeldOut | None = None


READ_BY_SOME = (
    *("model.attn_type", "model.converters"),
    *("training.dataset", "training.dataset_path", "training.dataset_mix", "training.dataset_streams"),
    *("training.special_tokens", "training.seq_len", "training.document_mask", "training.packing"),
    *("training.loss", "training.loss_chunks", "training.dataloader.pin_memory"),
    *("parallelism.disable_loss_parallel", "compile.components"),
    *("validation.enable", "validation.dataset", "validation.dataset_path", "validation.dataset_mix"),
    *("validation.local_batch_size", "validation.seq_len", "validation.steps", "validation.dataloader.pin_memory"),
)
"""Keys of the config that an objective may leave unread; then they may not be set.

Of compile.components it may leave "loss" unread: the model is compiled, whatever it learns.
"""
_DEGREES = {"pp": "pipeline", "cp": "context", "tp": "tensor", "ep": "expert"}

# The keys of the config that a check depends on, and the check: it raises a TitanError, or returns what it could not
# check
InputCheck = tuple[tuple[str, ...], Callable[[], str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What the models of a family learn. TrainerFamily.objective names it; language models predict the next token."""

    unit: str
    """Unit of progress, in the plural: tokens, images."""
    open_data: Callable[[Job, Meshes, dist.ProcessGroup], Data]
    """Opens this rank's data, on all ranks together. The group is for agreement."""
    place: Callable[[Job, Meshes, torch.device], Callable[[Batch], Inputs]]
    """Makes the function from a batch to this rank's inputs on its device: context shards, noise, frozen encoders."""
    install_loss: Callable[[ModelPart, Job, Meshes], None]
    """Makes the forward of a part that has the last units return the summed loss of its inputs, in fp32.

    The loss is divided by the units of the whole step, and added up over data-parallel and context-parallel ranks.
    """
    zeros: Callable[[Job, int, bool], Batch]
    """A batch of so many samples of zeros, of training or (True) of validation, for a dry run and an estimate."""
    axes: tuple[str, ...] = ()
    """Mesh axes besides those of data parallelism that it supports, of pp, cp, tp and ep; others are refused."""
    reads: tuple[str, ...] = ()
    """The keys of READ_BY_SOME that it reads; others are refused."""
    problems: Callable[[Job], list[str]] = lambda job: []
    """What the config asks for and cannot be, each with the nearest that can. Torch-free."""
    input_checks: Callable[[Job], Iterable[InputCheck]] = lambda job: ()
    """Checks of the data before a run starts. Torch-free."""
    check_position: Callable[[Job, Mapping[str, Any]], None] = lambda job, state: None
    """Raises DataError if a loader's saved state is not of this run's data, as far as that is quick. Torch-free."""
    notes: Callable[[Job, Mapping[str, Path]], list[str]] = lambda job, assets: []
    """Lines about the run for its beginning; `assets` are the model's tokenizer files. Torch-free."""
    settings: Callable[[Job, Mapping[str, Path]], Mapping[str, Any]] = lambda job, assets: {}
    """Plain values besides the config's that change what is learned, by name: checkpoints record them, and a resumed
    run prints those that differ. `assets` as for `notes`. Torch-free."""
    units_per_sample: Callable[[Job], int] = lambda job: 1
    """Units of a sample, those that are not counted included, for speed."""
    flops_per_unit: Callable[[Job], int | None] = lambda job: None
    """Floating-point operations of forward and backward for one unit; None: not known, and no FLOP/s are reported."""
    prepare: Callable[[ModelPart, Job, Meshes, torch.device], None] = lambda part, job, meshes, device: None
    """Changes a part before it is parallelized: attention of context shards, masks."""
    stage_shapes: Callable[[Job], StageShapes] | None = None
    """Shapes of what pipeline stages pass on, for the axis pp."""

    def units_per_step(self, job: Job) -> int:
        """Units of an optimizer step over all ranks, those that are not counted included."""
        return job.samples_per_step * self.units_per_sample(job)


def check_objective(objective: Objective, family: str) -> None:
    """Raise ExtensionError for fields of other types, functions with other arguments, and unknown names."""
    what = f"the objective of family {family!r}"
    check_record(objective, Objective, what)
    for name, given, known in (("axes", objective.axes, [*_DEGREES]), ("reads", objective.reads, READ_BY_SOME)):
        if unknown := [each for each in given if each not in known]:
            raise ExtensionError(f"{what}: {name} has {', '.join(unknown)}; there are {', '.join(known)}")
    if not objective.unit.isidentifier():
        raise ExtensionError(f"{what}: unit = {objective.unit!r} is not a word, which names of metrics begin with")
    if "pp" in objective.axes and objective.stage_shapes is None:
        raise ExtensionError(f"{what}: the axis pp needs `stage_shapes`, the shapes of what pipeline stages pass on")


def check_data(data: Data, objective: Objective) -> None:
    """Raise ExtensionError unless `open_data` has returned what the loop, resuming and validation call."""
    what, made_by = "the Data that `open_data` returns", objective.open_data
    check_attributes(data, ("loader", "held_out"), what, made_by=made_by)
    check_protocol(data.loader, Loader, f"the loader of {what}")
    check_attributes(data.loader, ("__iter__",), f"the loader of {what}")
    if data.held_out is not None:
        check_record(data.held_out, HeldOut, f"`held_out` of {what}")


def support_problems(objective: Objective, job: Job) -> list[str]:
    """Degrees of axes that the config sets and the objective does not support, and keys that it does not read."""
    learned = f"what models of family {job.family.name} learn"
    axes = ", ".join(("dp_replicate", "dp_shard", *objective.axes))
    problems = [
        f"parallelism.{name}_parallel_degree = {degree} is not supported by {learned}; its axes are {axes}; nearest: 1"
        for axis, name in _DEGREES.items()
        if (degree := getattr(job.dims, axis)) > 1 and axis not in objective.axes
    ]
    settings, defaults = origins(job.config), origins(Config())
    for key in READ_BY_SOME:
        value, default = settings[key].value, defaults[key].value
        if key not in objective.reads and value != default:
            if key == "compile.components":
                if "loss" not in value:
                    continue
                default = ("model",)
            problems.append(f"{key} = {toml_text(value)} is not read by {learned}; nearest: {toml_text(default)}")
    return problems
