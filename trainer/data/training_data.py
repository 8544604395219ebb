"""Open the training data of a job: an index, a mixture of several, or a stream."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from converters.common.names import TEXT_INDEXES
from converters.store.hub_names import find_local
from converters.store.location import locate
from converters.tokenizers.assets import find_assets
from converters.tokenizers.tokenizer import load_tokenizer, tokenizer_note
from trainer.config.sections import Model, Training
from trainer.data.datasets import open_dataset, open_mixture, refuse_large_vocabulary
from trainer.data.document_ends import with_end_token
from trainer.data.document_text import document_encoder
from trainer.data.index import TRAIN, digest_of
from trainer.data.kinds import C4, streams_of
from trainer.data.loader import TokenLoader
from trainer.data.sample import DocumentRules
from trainer.data.samples import TokenSource, Weighted
from trainer.data.stream_loader import StreamLoader
from trainer.data.streamed_text import StreamedText, stream_c4
from trainer.data.text_index import Preparation, refuse_no_tokenizer
from trainer.job.chosen_model import tokenizer_folder
from trainer.job.record import Job
from trainer.next_token.numbers import documents_of
from trainer.objective import Loader
from trainer.observability.log import note
from trainer.ranks.agree import on_each, on_first
from trainer.ranks.mesh import Meshes


def text_preparation(model: Model, training: Training, dump_folder: Path, group: dist.ProcessGroup) -> Preparation:
    """The preparation of text: by the model's tokenizer, on rank 0 for all ranks, into the dump folder."""
    tokenizer = tokenizer_folder(model, training)
    found = find_local(model.hf_assets_path)
    if locate(tokenizer) == found != locate(model.hf_assets_path):
        note(f"{model.hf_assets_path}: {tokenizer}")
    return Preparation(
        tokenizer,
        dump_folder / TEXT_INDEXES,
        once=partial(on_first, group),
        say=note,
        special_tokens=training.special_tokens,
    )


def train_loader(job: Job, meshes: Meshes, preparation: Preparation, *, group: dist.ProcessGroup) -> Loader:
    """This rank's batches, each with all samples of a step; accumulation splits them later."""
    batch = meshes["batch"]
    return open_training_data(
        job.config.training,
        preparation,
        vocab_size=job.decoder.vocab_size,
        on_each=partial(on_each, group),
        global_batch_size=job.samples_per_step,
        dp_rank=batch.get_local_rank(),
        dp_degree=batch.size(),
        seed=job.seed,
        pin_memory=job.config.dataloader.pin_memory,
        documents=documents_of(job),
    )


def open_training_data(
    settings: Training,
    preparation: Preparation,
    *,
    vocab_size: int,
    on_each: Callable[[Callable[[], Any]], list[Any]],
    documents: DocumentRules,
    **batches: Any,
) -> Loader:
    """`batches` are TokenLoader's arguments: batch size, this rank's part, seed."""
    batches["documents"] = with_end_token(documents, preparation.tokenizer)
    if settings.dataset == C4:
        return _open_stream(settings, preparation, vocab_size=vocab_size, on_each=on_each, **batches)
    source: TokenSource | Sequence[Weighted]
    if settings.dataset_mix:
        mix = settings.dataset_mix
        source = open_mixture(settings.dataset, mix, vocab_size=vocab_size, preparation=preparation)
    else:
        path = settings.dataset_path
        source = open_dataset(settings.dataset, path, vocab_size=vocab_size, preparation=preparation)
    return TokenLoader(source, TRAIN, seq_len=settings.seq_len, **batches)


def _open_stream(
    settings: Training,
    preparation: Preparation,
    *,
    vocab_size: int,
    on_each: Callable[[Callable[[], Any]], list[Any]],
    **batches: Any,
) -> StreamLoader:
    refuse_no_tokenizer(settings.dataset, preparation.tokenizer)
    tokenizer = load_tokenizer(preparation.tokenizer)
    if tokenizer_text := tokenizer_note(preparation.tokenizer):
        preparation.say(tokenizer_text)
    refuse_large_vocabulary(tokenizer.vocab_size, vocab_size, str(preparation.tokenizer))
    num_streams = streams_of(settings, batches["dp_degree"])
    preparation.say(
        f"c4 is read in {num_streams} streams: the run resumes at data-parallel degrees that divide {num_streams}"
    )
    opened: list[StreamedText] = []
    on_each(lambda: opened.append(stream_c4(TRAIN, settings.dataset_path)))  # all ranks reach the hub, or all raise
    text = opened[0]
    assets = sorted((name, digest_of(path)) for name, path in find_assets(preparation.tokenizer).items())
    special = preparation.special_tokens
    identity = [text.identity, assets, *(["special tokens"] if special else [])]
    return StreamLoader(
        text,
        document_encoder(tokenizer, special_tokens=special, say=preparation.say),
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(identity).encode()),
        num_streams=num_streams,
        seq_len=settings.seq_len,
        on_each=on_each,
        **batches,
    )
