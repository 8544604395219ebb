"""Loss on held-out data: the same batches every time, summed over all ranks."""

import math
from itertools import islice

import torch
import torch.distributed as dist

from converters.errors import ConfigError
from trainer.config.sections import Validation as ValidationSection
from trainer.data.datasets import open_dataset
from trainer.data.index import HELD_OUT
from trainer.data.loader import TokenLoader
from trainer.mesh import Meshes
from trainer.train_model import TrainModel


class Validation:
    """Knows its data; `run` walks through it from the start and leaves model and training data as they were."""

    def __init__(self, model: TrainModel, settings: ValidationSection, meshes: Meshes):
        batch, dims = meshes["batch"], meshes.dims
        source = open_dataset(settings.dataset, settings.dataset_path, vocab_size=model.args.vocab_size)
        self._model, self._dims = model, dims
        self._unigram_entropy = source.unigram_entropy
        self._num_batches = None if settings.steps == -1 else settings.steps
        self._loader = TokenLoader(
            source,
            HELD_OUT,
            seq_len=settings.seq_len,
            global_batch_size=settings.local_batch_size * batch.size(),
            dp_rank=batch.get_local_rank(),
            dp_degree=batch.size(),
            seed=None,  # one pass, the same batches every time, as many on every rank
        )
        if settings.steps > self._loader.num_batches:
            raise ConfigError(
                f"validation.steps = {settings.steps}, but the held-out part has {self._loader.num_batches} batches"
                f" of {settings.local_batch_size * batch.size()} samples",
                tries=[f"--validation.steps {self._loader.num_batches}", "--validation.steps -1, for all there are"],
            )

    def run(self) -> dict[str, float | None]:
        """Loss per token in nats, perplexity, and the unigram entropy to hold it against; equal on all ranks."""
        for part in self._model.parts:
            part.eval()
        sums = torch.zeros(2, dtype=torch.float64)  # loss, tokens
        for batch in islice(self._loader, self._num_batches):
            sums += torch.tensor([self._model.forward_loss(batch).item(), batch.num_valid_tokens], dtype=torch.float64)
        for part in self._model.parts:
            part.train()
        device = next(iter(self._model.named_parameters().values())).device
        sums = sums.to(device)
        dist.all_reduce(sums)
        loss_sum, num_tokens = sums.tolist()
        # tp ranks hold the same share of the loss; all ranks but those of a batch group count the same tokens
        loss = (loss_sum / self._dims.tp) / (num_tokens / (self._dims.world_size // self._dims.batch))
        return {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700.0)),
            "validation_unigram_entropy": self._unigram_entropy,
        }
