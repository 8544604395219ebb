"""Next-token prediction as an Objective. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.tokenizers.notes import tokenizer_notes
from converters.tokenizers.reader import READER_VERSION, implied_class, vocabulary_file
from converters.tokenizers.tokenizer import document_ends
from trainer.data.index import digest_of
from trainer.data.kinds import C4, streams_of
from trainer.job.chosen_model import NO_TOKENIZER
from trainer.job.record import Job
from trainer.next_token.inputs import check_position, input_checks
from trainer.next_token.numbers import documents_of, flops_per_token
from trainer.next_token.problems import problems
from trainer.objective import READ_BY_SOME, Data, Objective

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from trainer.batch import Batch, Inputs
    from trainer.models.units import ModelPart
    from trainer.parallel.pipeline import StageShapes
    from trainer.ranks.mesh import Meshes


def _notes(job: Job, assets: Mapping[str, Path]) -> list[str]:
    notes = [*tokenizer_notes(assets)] if assets else [NO_TOKENIZER]
    if vocabulary_file(assets):
        notes.append(document_ends(assets).described)
    if (documents := documents_of(job)).mask != "none":
        notes.append(f"attention stays within documents; mask: {documents.mask}, packing: {documents.packing}")
    return notes


def _settings(job: Job, assets: Mapping[str, Path]) -> dict[str, Any]:
    training = job.config.training
    tokenizer = [f"{name} {digest_of(path)[:8]}" for name, path in sorted(assets.items())]
    if tokenizer and training.dataset == C4:  # of an index the ids themselves are compared
        tokenizer += [f"read as {implied_class(assets) or 'it is'} by version {READER_VERSION} of titan's reader"]
    return {
        "training.document_mask": documents_of(job).mask,
        "training.dataset_streams": streams_of(training, job.dims.batch),
        "tokenizer": ", ".join(tokenizer) or "none",
    }


def _flops_per_token(job: Job) -> int:
    return flops_per_token(
        job.decoder,
        num_parameters=job.num_active_parameters,
        seq_len=job.config.training.seq_len,
        value_dim=job.family.value_dim(job.decoder),
    )


def _open_data(job: Job, meshes: Meshes, group: dist.ProcessGroup) -> Data:
    from trainer.next_token.data import open_data

    return open_data(job, meshes, group)


def _place(job: Job, meshes: Meshes, device: torch.device) -> Callable[[Batch], Inputs]:
    from trainer.next_token.placement import place

    return place(job, meshes, device)


def _install_loss(part: ModelPart, job: Job, meshes: Meshes) -> None:
    from trainer.next_token.parts import install_loss_of

    install_loss_of(part, job, meshes)


def _prepare(part: ModelPart, job: Job, meshes: Meshes, device: torch.device) -> None:
    from trainer.next_token.parts import prepare

    prepare(part, job, meshes, device)


def _zeros(job: Job, num_samples: int, is_validation: bool) -> Batch:
    from trainer.next_token.placement import zeros

    return zeros(job, num_samples, is_validation)


def _stage_shapes(job: Job) -> StageShapes:
    from trainer.next_token.placement import stage_shapes

    return stage_shapes(job)


NEXT_TOKEN = Objective(
    unit="tokens",
    axes=("pp", "cp", "tp", "ep"),
    reads=READ_BY_SOME,
    open_data=_open_data,
    place=_place,
    install_loss=_install_loss,
    zeros=_zeros,
    problems=problems,
    input_checks=input_checks,
    check_position=check_position,
    notes=_notes,
    settings=_settings,
    units_per_sample=lambda job: job.config.training.seq_len,
    flops_per_unit=_flops_per_token,
    prepare=_prepare,
    stage_shapes=_stage_shapes,
)
