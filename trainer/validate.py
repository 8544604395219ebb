"""Validation: the loss on held-out data, over the same batches every time, for each source separately."""

import math
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist

from trainer.config.sections import Validation
from trainer.data.datasets import open_dataset, open_mixture
from trainer.data.index import HELD_OUT
from trainer.data.loader import TokenLoader
from trainer.data.sample import NO_DOCUMENTS, DocumentRules
from trainer.data.samples import Weighted, refuse_too_many_steps
from trainer.data.text_index import Preparation
from trainer.ranks.mesh import Meshes
from trainer.train_model import TrainModel


@dataclass(frozen=True, slots=True)
class _Part:
    """A source, its weight in the mean, and its batches, the same number on every rank."""

    name: str
    share: float
    unigram_entropy: float | None
    loader: TokenLoader


class Validator:
    """Computes the held-out loss; `run` starts from the beginning each time and does not change the model."""

    def __init__(
        self,
        model: TrainModel,
        settings: Validation,
        meshes: Meshes,
        preparation: Preparation,
        *,
        pin_memory: bool = False,
        documents: DocumentRules = NO_DOCUMENTS,
    ):
        batch, self._dims, self._model = meshes["batch"], meshes.dims, model
        self._num_batches = None if settings.steps == -1 else settings.steps
        global_batch_size = settings.local_batch_size * batch.size()
        most_tokens = settings.steps * global_batch_size * settings.seq_len + 1 if self._num_batches else None
        vocab_size = model.args.vocab_size
        if settings.dataset_mix:
            mix = settings.dataset_mix
            sources = open_mixture(settings.dataset, mix, vocab_size=vocab_size, preparation=preparation)
        else:
            source = open_dataset(
                settings.dataset,
                settings.dataset_path,
                vocab_size=vocab_size,
                preparation=preparation,
                most_tokens=most_tokens,
            )
            sources = [Weighted(settings.dataset_path or settings.dataset, source, 1.0)]
        total = sum(source.weight for source in sources)
        self._parts = [
            _Part(
                source.name,
                source.weight / total,
                source.source.unigram_entropy,
                TokenLoader(
                    source.source,
                    HELD_OUT,
                    seq_len=settings.seq_len,
                    global_batch_size=global_batch_size,
                    dp_rank=batch.get_local_rank(),
                    dp_degree=batch.size(),
                    seed=None,  # one pass, the same batches every time
                    pin_memory=pin_memory,
                    documents=documents,
                ),
            )
            for source in sources
        ]
        fewest = min(self._parts, key=lambda part: part.loader.num_batches)
        refuse_too_many_steps(settings.steps, fewest.loader.num_batches, name=fewest.name, batch_size=global_batch_size)

    def run(self) -> dict[str, float | None]:
        """Loss per token in nats, perplexity, and the unigram entropy for comparison; equal on all ranks.

        For several sources the weighted mean, and each loss under its source's name.
        """
        for part in self._model.parts:
            part.eval()
        sums = torch.stack([self._sums(part.loader) for part in self._parts])  # loss, tokens
        for part in self._model.parts:
            part.train()
        device = next(iter(self._model.named_parameters().values())).device
        sums = sums.to(device)
        dist.all_reduce(sums)
        # tp ranks hold the same share of the loss; all ranks outside a batch group count the same tokens
        copies = self._dims.world_size // self._dims.batch
        losses = [(loss / self._dims.tp) / (tokens / copies) for loss, tokens in sums.tolist()]
        loss = sum(part.share * loss for part, loss in zip(self._parts, losses, strict=True))
        entropies = [part.share * part.unigram_entropy for part in self._parts if part.unigram_entropy is not None]
        metrics: dict[str, float | None] = {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700.0)),
            "validation_unigram_entropy": sum(entropies) if len(entropies) == len(self._parts) else None,
        }
        if len(self._parts) > 1:
            metrics |= {f"validation_loss/{p.name}": loss for p, loss in zip(self._parts, losses, strict=True)}
        return metrics

    def _sums(self, loader: TokenLoader) -> torch.Tensor:
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in islice(loader, self._num_batches):
            sums += torch.tensor([self._model.forward_loss(batch).item(), batch.num_valid_tokens], dtype=torch.float64)
        return sums
