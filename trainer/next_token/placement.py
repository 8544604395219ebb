"""Place a batch of text: this rank's part of each sequence, positions and documents; shapes of pipeline stages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.batch import Inputs
from trainer.data.batch import TokenBatch
from trainer.job.record import Job
from trainer.next_token.numbers import documents_of
from trainer.parallel.context import head_tail_positions
from trainer.parallel.document_attention import positions_in_documents
from trainer.parallel.pipeline import StageShapes
from trainer.ranks.mesh import Meshes


def place(job: Job, meshes: Meshes, device: torch.device) -> Callable[[Any], Inputs]:
    """A function from a TokenBatch to the inputs of this context rank, on the device."""
    cp, cp_rank, mask = meshes.dims.cp, meshes["cp"].get_local_rank(), documents_of(job).mask

    def inputs(samples: TokenBatch) -> Inputs:
        batch = samples.to(device)
        tokens, targets, length = batch.tokens, batch.targets, batch.tokens.shape[1]
        if cp == 1:
            positions = torch.arange(length, device=device)
            tokens = tokens.contiguous()  # pipeline stages declare their inputs' strides
        else:
            positions = head_tail_positions(length, cp_rank, cp, device)
            tokens, targets = tokens[:, positions], targets[:, positions]
        if mask == "none":
            return Inputs(tokens, {"targets": targets}, {"positions": positions})
        assert batch.documents is not None, "the model was built for attention within documents"
        by_sample = {"targets": targets, "documents": batch.documents}
        if mask == "offsets":
            by_sample["positions"] = positions_in_documents(batch.documents)[:, positions]
            return Inputs(tokens, by_sample)
        return Inputs(tokens, by_sample, {"positions": positions})

    return inputs


def zeros(job: Job, num_samples: int, is_validation: bool) -> TokenBatch:
    """A batch of zeros, which a real one would be a copy of on a GPU."""
    config = job.config
    shape = num_samples, (config.validation if is_validation else config.training).seq_len
    tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    has_documents = documents_of(job).mask != "none"
    return TokenBatch(tokens, targets, torch.zeros(shape, dtype=torch.int32) if has_documents else None)


def stage_shapes(job: Job) -> StageShapes:
    """Tokens [B, L], and between stages hidden states [B, L / tp, D], sequence shards."""
    training, dims, dim = job.config.training, job.dims, job.decoder.dim
    dtype = getattr(torch, training.mixed_precision_param)

    def hidden_like(tokens_BL: Tensor) -> Tensor:
        batch, length = tokens_BL.shape
        return torch.empty(batch, length // dims.tp, dim, dtype=dtype, device=tokens_BL.device)

    shape = job.microbatch_size, training.seq_len // dims.cp
    return StageShapes(torch.empty(shape, dtype=torch.int64, device="meta"), hidden_like)
