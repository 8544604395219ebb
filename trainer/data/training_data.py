"""The data that a run learns from, as its config names it: an index, a mixture of several, or a stream."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import xxhash

from converters.assets import find_assets
from trainer.config.sections import Training
from trainer.data.batch import Batch
from trainer.data.datasets import open_dataset, open_mixture, refuse_large_vocabulary
from trainer.data.index import TRAIN, digest_of
from trainer.data.kinds import C4
from trainer.data.loader import TokenLoader
from trainer.data.stream_loader import StreamLoader
from trainer.data.streamed_text import StreamedText, stream_c4
from trainer.data.text_index import Preparation, refuse_no_tokenizer
from trainer.data.tokenizer import load_tokenizer, tokenizer_note


class Loader(Protocol):
    """Batches without end, and the position in them as plain values that are the same on all ranks."""

    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def open_training_data(
    settings: Training,
    preparation: Preparation,
    *,
    vocab_size: int,
    on_each: Callable[[Callable[[], Any]], list[Any]],
    **batches: Any,
) -> Loader:
    """`batches`: which part of which batches is wanted, and in which order; see TokenLoader."""
    if settings.dataset == C4:
        return _open_stream(settings, preparation, vocab_size=vocab_size, on_each=on_each, **batches)
    opened = {"vocab_size": vocab_size, "preparation": preparation}
    if settings.dataset_mix:
        source = open_mixture(settings.dataset, settings.dataset_mix, **opened)
    else:
        source = open_dataset(settings.dataset, settings.dataset_path, **opened)
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
    if text := tokenizer_note(preparation.tokenizer):
        preparation.say(text)
    refuse_large_vocabulary(tokenizer.vocab_size, vocab_size, str(preparation.tokenizer))
    opened: list[StreamedText] = []
    on_each(lambda: opened.append(stream_c4(TRAIN, settings.dataset_path)))  # all ranks reach the hub, or none goes on
    text = opened[0]
    assets = sorted((name, digest_of(path)) for name, path in find_assets(preparation.tokenizer).items())
    return StreamLoader(
        text,
        tokenizer,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps([text.identity, assets]).encode()),
        num_streams=settings.dataset_streams,
        seq_len=settings.seq_len,
        on_each=on_each,
        **batches,
    )
