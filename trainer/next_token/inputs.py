"""Check the data of a job that predicts the next token: documents, sources, number of samples. Torch-free."""

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trainer.config.sections import Training, Validation
from trainer.data.datasets import check_dataset, open_dataset, open_mixture
from trainer.data.document_ends import with_end_token
from trainer.data.index import HELD_OUT, TRAIN
from trainer.data.kinds import TOKENS
from trainer.data.position import POSITION_KEYS, refuse_other_position
from trainer.data.sample import DocumentRules
from trainer.data.samples import MixedSamples, SourceSamples, Weighted, refuse_too_few, refuse_too_many_steps
from trainer.job.chosen_model import tokenizer_folder
from trainer.job.record import Job
from trainer.next_token.numbers import documents_of
from trainer.objective import InputCheck

_DATA_KEYS = ("dataset", "dataset_path", "dataset_mix")


class _Inputs:
    """A job's tokenizer as several checks need it, read once: a large one takes a second."""

    def __init__(self, job: Job):
        self.job, self.rules = job, documents_of(job)

    @cached_property
    def tokenizer(self) -> Path:
        return tokenizer_folder(self.job.config.model, self.job.config.training)

    @cached_property
    def documents(self) -> DocumentRules:
        return with_end_token(self.rules, self.tokenizer)


def input_checks(job: Job) -> Iterator[InputCheck]:
    """The checks, each with the config keys that it depends on."""
    training, validation = job.config.training, job.config.validation
    inputs = _Inputs(job)

    def check_data(name: str, path: str | None, section: str) -> str:
        return check_dataset(
            name,
            path,
            split=TRAIN if section == "training" else HELD_OUT,
            vocab_size=job.decoder.vocab_size,
            tokenizer=inputs.tokenizer,
            needs_offsets=inputs.rules.needs_offsets,
        )

    yield ("training.document_mask",), partial(_check_end_token, inputs)
    for section, settings in (("training", training), ("validation", validation)):
        if section == "validation" and not validation.enable:
            continue
        keys = tuple(f"{section}.{key}" for key in _DATA_KEYS) + (
            ("validation.enable",) if settings is validation else ()
        )
        for path in dict(settings.dataset_mix) or (settings.dataset_path,):
            yield keys, partial(check_data, settings.dataset, path, section)
        if settings.dataset == TOKENS:
            yield keys, partial(_check_samples, inputs, settings)


def check_position(job: Job, state: Mapping[str, Any]) -> None:
    """The position in an index; that in a text is compared when it has been tokenized."""
    training, inputs = job.config.training, _Inputs(job)
    if training.dataset != TOKENS or inputs.rules.packing == "best_fit":
        return
    keys: dict[str, Any] = {"seq_len": training.seq_len, "seed": job.seed, "documents": inputs.documents}
    vocab_size = job.decoder.vocab_size
    samples: MixedSamples | SourceSamples
    if training.dataset_mix:
        sources = open_mixture(training.dataset, training.dataset_mix, vocab_size=vocab_size)
        samples = MixedSamples(sources, TRAIN, **keys)
    else:
        source = open_dataset(training.dataset, training.dataset_path, vocab_size=vocab_size)
        samples = SourceSamples(source, TRAIN, **keys)
    expected = {**dict.fromkeys(POSITION_KEYS), "fingerprint": samples.fingerprint_of(samples.cut), "seed": job.seed}
    refuse_other_position(state, expected, samples)


def _check_end_token(inputs: _Inputs) -> None:
    _ = inputs.documents


def _check_samples(inputs: _Inputs, settings: Training | Validation) -> None:
    """The sources of a mixture together, and the number of samples; packing them takes too long."""
    job, config = inputs.job, inputs.job.config
    vocab_size, is_training = job.decoder.vocab_size, settings is config.training
    if settings.dataset_mix:
        sources = open_mixture(settings.dataset, settings.dataset_mix, vocab_size=vocab_size)
    else:
        path = settings.dataset_path
        sources = [Weighted(str(path), open_dataset(settings.dataset, path, vocab_size=vocab_size), 1.0)]
    if inputs.rules.packing == "best_fit":
        return
    batch_size = job.samples_per_step if is_training else config.validation.local_batch_size * job.dims.batch
    for source in sources:
        samples = SourceSamples(
            source.source,
            TRAIN if is_training else HELD_OUT,
            seq_len=settings.seq_len,
            seed=job.seed,
            documents=inputs.documents,
        )
        if settings is config.validation:
            num_batches = samples.num_samples // batch_size
            refuse_too_many_steps(config.validation.steps, num_batches, name=source.name, batch_size=batch_size)
        refuse_too_few(samples, 1 if is_training and settings.dataset_mix else batch_size)
