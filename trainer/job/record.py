"""The job record: config, model numbers, degrees and stage split. Torch-free."""

from dataclasses import dataclass

from converters.families.args import DecoderArgs, ModelArgs, decoder_args
from converters.families.base import Family
from converters.families.registry import get_family
from converters.layout.mesh_shape import MeshShape
from trainer.config.sections import Config
from trainer.parallel.stages import StageSplit, schedule_of, split_model


@dataclass(frozen=True, slots=True)
class Job:
    """A run: the computation, and the layout of its ranks. `resolve_job` makes it and checks it."""

    config: Config
    family: Family
    args: ModelArgs
    dims: MeshShape
    split: StageSplit

    @staticmethod
    def of(config: Config, args: ModelArgs, dims: MeshShape) -> "Job":
        """A job of a layout that was checked before. `args` may differ from the flavor's."""
        family = get_family(config.model.name)
        return Job(config, family, args, dims, split_model(config.parallelism, family.units(args), dims.pp))

    @property
    def decoder(self) -> DecoderArgs:
        """The numbers of a decoder. Raises UnsupportedError for another model."""
        return decoder_args(self.args)

    @property
    def seed(self) -> int:
        """Seed of the initial weights and of the data order."""
        return self.config.debug.seed or 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return self.family.num_parameters(self.args)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one row of activations is multiplied with: fewer in a mixture of experts."""
        return self.family.num_active_parameters(self.args)

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step over all ranks."""
        training = self.config.training
        size = training.global_batch_size
        return training.local_batch_size * self.dims.batch if size == -1 else size

    @property
    def num_accumulated(self) -> int:
        """Forward and backward passes of one optimizer step (gradient accumulation)."""
        return self.samples_per_step // (self.config.training.local_batch_size * self.dims.batch)

    @property
    def microbatch_size(self) -> int:
        """Samples of one forward pass: a pipeline's microbatch, else the local batch."""
        config = self.config
        has_stages = self.dims.pp > 1
        return config.parallelism.pipeline_parallel_microbatch_size if has_stages else config.training.local_batch_size

    @property
    def schedule(self) -> str:
        """The pipeline's, which the number of microbatches may change."""
        return schedule_of(self.config.parallelism, num_microbatches=self.num_microbatches, pp=self.dims.pp)

    @property
    def num_microbatches(self) -> int:
        """Microbatches that each pass sends through the pipeline; 1 without a pipeline."""
        return self.config.training.local_batch_size // self.microbatch_size


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples on either side of a value, as text."""
    return " or ".join(map(str, multiples_near(value, divisor)))


def multiples_near(value: int, divisor: int) -> list[int]:
    """The multiples on either side of a value."""
    below = value // divisor * divisor
    return [n for n in (below, below + divisor) if n > 0]
