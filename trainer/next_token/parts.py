"""What next-token prediction changes in a part of a decoder: attention with masks and context shards, and the loss."""

from typing import Any

import torch

from trainer.job.record import Job
from trainer.loss.install import install_loss
from trainer.loss.registry import ALL_FORWARD_FIRST, is_loss_parallel
from trainer.models.units import ModelPart
from trainer.next_token.numbers import chunk_tokens, documents_of
from trainer.parallel.attention_backend import selects_cudnn
from trainer.parallel.context import apply_cp
from trainer.parallel.document_mask import attention_kernel
from trainer.parallel.masked_attention import apply_masks, choose_masked_attention, masked_layers
from trainer.ranks.mesh import Meshes


def prepare(part: ModelPart, job: Job, meshes: Meshes, device: torch.device) -> None:
    """Masks of documents, windows and chunks, then context parallelism."""
    config, family = job.config, job.family
    kernel, mask = choose_masked_attention(attention_kernel(config, family), device), documents_of(job).mask
    masked = masked_layers(part, kernel, has_documents=mask != "none")
    if job.dims.cp > 1:
        dtype = getattr(torch, config.training.mixed_precision_param)
        uses_cudnn = selects_cudnn(job.decoder, dtype, device, value_dim=family.value_dim(job.decoder))
        apply_cp(part, meshes["cp"].get_group(), uses_cudnn=uses_cudnn, masked=masked)
    if masked or mask != "none":  # a stage may have no layers
        apply_masks(part, masked, device, positions_restart=mask == "offsets")


def install_loss_of(part: Any, job: Job, meshes: Meshes) -> None:
    """The loss that the config sets, on a part with or without `output`."""
    config, dims = job.config, job.dims
    install_loss(
        part,
        config.training,
        config.compile,
        chunk_tokens=chunk_tokens(job),
        tp_mesh=meshes["tp"] if dims.tp > 1 else None,
        is_loss_parallel=is_loss_parallel(config.parallelism, dims),
        all_forward_first=dims.pp > 1 and job.schedule in ALL_FORWARD_FIRST,
    )
