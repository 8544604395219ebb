"""Public Python API for training: load a config, train, write seeds; register models, sections, data, losses, sinks.

Importing it does not import torch: modules that register extensions are also imported by commands that need none.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.store.location import Place, locate
from trainer.config.load import load_config as _load_config
from trainer.config.sections import Config
from trainer.config.sections import register_section as _register_section
from trainer.config.types import Number
from trainer.data.datasets import register_dataset as _register_dataset
from trainer.data.sample import IGNORED
from trainer.data.samples import TokenSource
from trainer.job.job import resolve_job
from trainer.loss.registry import register_loss as _register_loss
from trainer.models.registry import TrainerFamily
from trainer.models.registry import register as _register_model
from trainer.objective import Data, HeldOut, Objective
from trainer.observability.sinks import LoggedRun, MetricSink
from trainer.observability.sinks import register_metric_sink as _register_metric_sink
from trainer.seed import SeedReport
from trainer.seed import seed as _seed

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.batch import Batch, Inputs
    from trainer.models.attention import GroupedQueryAttention
    from trainer.models.decoder import Transformer, TransformerBlock
    from trainer.models.feed_forward import FeedForward
    from trainer.models.moe import MoE
    from trainer.models.norms import make_norm
    from trainer.models.units import ModelPart, Unit
    from trainer.parallel.pipeline import StageShapes
    from trainer.parallel.shards import gather_shards

__all__ = [
    "load_config", "train", "seed", "register_model", "register_section", "register_dataset", "register_loss",
    "register_metric_sink", "Config", "SeedReport", "TokenSource", "TrainerFamily", "MetricSink", "LoggedRun",
    "Number", "Objective", "Data", "HeldOut", "Batch", "Inputs", "ModelPart", "Unit", "StageShapes",
    "gather_shards",
    "GroupedQueryAttention", "FeedForward", "MoE", "TransformerBlock", "Transformer", "make_norm", "IGNORED",
]  # fmt: skip

_NEED_TORCH = {
    "GroupedQueryAttention": "trainer.models.attention",
    "Batch": "trainer.batch",
    "Inputs": "trainer.batch",
    "ModelPart": "trainer.models.units",
    "Unit": "trainer.models.units",
    "StageShapes": "trainer.parallel.pipeline",
    "gather_shards": "trainer.parallel.shards",
    "FeedForward": "trainer.models.feed_forward",
    "MoE": "trainer.models.moe",
    "Transformer": "trainer.models.decoder",
    "TransformerBlock": "trainer.models.decoder",
    "make_norm": "trainer.models.norms",
}


def __getattr__(name: str) -> Any:
    """Import the names that need torch on first use."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEED_TORCH[name]), name)


def load_config(source: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Load a TOML file or a preset, with overrides as on the command line. Raises ConfigError with all problems.

    >>> config = load_config("debug", ["--training.steps", "5"])
    >>> config.training.steps, config.origins["training.steps"]
    (5, 'command line')
    """
    return _load_config(source, overrides)


def train(config: Config, *, ignore_memory: bool = False) -> None:
    """Train on this process as one rank of the job; torchrun or a scheduler has started all ranks.

    Resumes from the newest checkpoint of the run, if there is one. Raises NumericalFault before an update with NaN, and
    Preempted after it has saved on SIGTERM or SIGUSR1. Raises ConfigError if weights, gradients and optimizer states
    alone exceed the memory that is available, unless `ignore_memory`. In a script for torchrun:

    >>> config = load_config("run.toml")
    >>> train(config)  # doctest: +SKIP
    """
    from trainer.train import main

    main(config, ignore_memory=ignore_memory)


def seed(config: Config, dst: Place, *, overwrite: bool = False) -> SeedReport:
    """Write the initial weights of a config's model as a DCP checkpoint, without building the model.

    They are the weights that `train` starts with, sharded for the mesh of the config.

    >>> report = seed(load_config("debug"), "seed")
    >>> report.mesh, report.num_files
    ('pp=2,dp_shard=2,tp=2', 8)
    """
    return _seed(resolve_job(config), locate(dst), overwrite=overwrite)


def register_section(name: str, record: type) -> None:
    """Add a section to the config: a frozen dataclass with keyword-only fields that all have defaults.

    Its keys are read, checked and shown as built-in ones; `config.section(record)` returns it.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Noise:
    ...     level: float = 0.1
    >>> register_section("noise", Noise)
    >>> load_config("debug", ["--noise.level", "0.5"]).section(Noise).level
    0.5
    """
    _register_section(name, record)


def register_model(name: str, family: TrainerFamily | None = None) -> None:
    """Make a family trainable. `name` is that of the Family registered with `converters.api.register_family`.

    None: the decoder that the Family's blocks describe.

    >>> def build_model(args):
    ...     from trainer.api import Transformer
    ...     return Transformer(args)
    >>> register_model("my_llama", TrainerFamily(build_model))
    """
    _register_model(name, family)


def register_dataset(name: str, open_source: Callable[[str], TokenSource]) -> None:
    """Register a dataset under a name for `training.dataset`. `open_source(dataset_path)` is called on every rank.

    It returns an object with the attributes and methods of TokenSource.

    >>> register_dataset("my_data", lambda path: ...)
    """
    _register_dataset(name, open_source)


def register_loss(name: str, loss_sum: "Callable[..., Tensor]", *, takes_columns: bool = False) -> None:
    """Register a loss under a name for `training.loss`.

    `loss_sum(logits_BLV, targets_BL)` returns the summed loss in fp32; it adds nothing for targets equal to IGNORED.
    The trainer divides it by the number of valid tokens of the whole step. With `takes_columns` the loss also works
    with loss parallelism: it is called with `group=`, the logits are this rank's even share of the vocabulary in rank
    order, and it returns the whole loss on every rank of the group.

    >>> register_loss("my_loss", lambda logits, targets: ...)
    """
    _register_loss(name, loss_sum, takes_columns=takes_columns)


def register_metric_sink(name: str, open_sink: Callable[[LoggedRun], MetricSink]) -> None:
    """Send the metrics of every run to a sink of your own, on rank 0, in addition to the console and metrics.jsonl.

    `open_sink(run)` is called before the first step; `run` has the dump folder, the config and the number of steps that
    a resumed run has done. It returns an object with `log(step, metrics)` and `close()`.

    >>> class PrintLoss:
    ...     def log(self, step, metrics):
    ...         print(step, metrics.get("loss"))
    ...     def close(self):
    ...         pass
    >>> register_metric_sink("print_loss", lambda run: PrintLoss())
    """
    _register_metric_sink(name, open_sink)
