"""Open the training data and the held-out data of a job that predicts the next token."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from trainer.data.datasets import open_dataset, open_mixture
from trainer.data.document_ends import with_end_token
from trainer.data.index import HELD_OUT
from trainer.data.loader import TokenLoader
from trainer.data.samples import Weighted, refuse_too_many_steps
from trainer.data.text_index import Preparation
from trainer.data.training_data import text_preparation, train_loader
from trainer.job.record import Job
from trainer.next_token.numbers import documents_of
from trainer.objective import Data, HeldOut
from trainer.ranks.mesh import Meshes


def open_data(job: Job, meshes: Meshes, group: dist.ProcessGroup) -> Data:
    """The loader of this rank, and the held-out data if the config validates."""
    config = job.config
    preparation = text_preparation(config.model, config.training, Path(config.job.dump_folder), group)
    loader = train_loader(job, meshes, preparation, group=group)
    return Data(loader, open_held_out(job, meshes, preparation) if config.validation.enable else None)


def open_held_out(job: Job, meshes: Meshes, preparation: Preparation) -> HeldOut:
    """The held-out part of each source. Its metrics: loss per token in nats, perplexity, and the unigram entropy for
    comparison; of several sources the mean by weight, and each loss under its source's name.
    """
    settings, batch, vocab_size = job.config.validation, meshes["batch"], job.decoder.vocab_size
    num_batches = None if settings.steps == -1 else settings.steps
    global_batch_size = settings.local_batch_size * batch.size()
    if settings.dataset_mix:
        sources = open_mixture(settings.dataset, settings.dataset_mix, vocab_size=vocab_size, preparation=preparation)
    else:
        most_tokens = settings.steps * global_batch_size * settings.seq_len + 1 if num_batches else None
        opened = open_dataset(
            settings.dataset,
            settings.dataset_path,
            vocab_size=vocab_size,
            preparation=preparation,
            most_tokens=most_tokens,
        )
        sources = [Weighted(settings.dataset_path or settings.dataset, opened, 1.0)]
    loaders = [
        TokenLoader(
            source.source,
            HELD_OUT,
            seq_len=settings.seq_len,
            global_batch_size=global_batch_size,
            dp_rank=batch.get_local_rank(),
            dp_degree=batch.size(),
            seed=None,  # one pass, the same batches every time
            pin_memory=job.config.validation_dataloader.pin_memory,
            documents=with_end_token(documents_of(job), preparation.tokenizer),
        )
        for source in sources
    ]
    fewest, source = min(zip(loaders, sources, strict=True), key=lambda pair: pair[0].num_batches)
    refuse_too_many_steps(settings.steps, fewest.num_batches, name=source.name, batch_size=global_batch_size)

    def metrics(losses: Sequence[float]) -> dict[str, float | None]:
        total = sum(source.weight for source in sources)
        shares = [source.weight / total for source in sources]
        loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        entropies = [source.source.unigram_entropy for source in sources]
        weighted = [share * entropy for share, entropy in zip(shares, entropies, strict=True) if entropy is not None]
        measured: dict[str, float | None] = {
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700.0)),
            "validation_unigram_entropy": sum(weighted) if len(weighted) == len(sources) else None,
        }
        if len(sources) > 1:
            by_source = zip(sources, losses, strict=True)
            measured |= {f"validation_loss/{source.name}": loss for source, loss in by_source}
        return measured

    return HeldOut(loaders, num_batches, metrics)
