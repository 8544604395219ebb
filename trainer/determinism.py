"""The same numbers again: what debug.seed and debug.deterministic tell torch."""

import os

import torch
import torch.distributed as dist

from trainer.config.sections import Debug


def set_determinism(debug: Debug) -> None:
    """Seed torch, for models that draw numbers as they go; weights and data have seeds of their own."""
    torch.manual_seed((debug.seed or 0) + dist.get_rank())
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses determinism without it
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
