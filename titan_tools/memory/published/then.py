"""What torchtitan built at the date of a published run where titan builds otherwise: told from the row's columns alone.

Torch-free. `as_built_then.py` rebuilds it. Dates are those of torchtitan's git log.
"""

from dataclasses import dataclass
from typing import Literal

from titan_tools.memory.published.rows import Row

# The logits lived until the next step's replaced them; later they were deleted before backward .
LOGITS_DELETED = "2024-04"


@dataclass(frozen=True, slots=True)
class Then:
    """Every difference that moves memory."""

    norm: Literal["python", "composite"]
    has_ends_in_root: bool
    is_last_block_kept: bool
    loss_chunks: int  # of the logits; 0: none
    norms_queries: bool  # and turns them in bf16, with a cache of both halves
    keeps_logits: bool

    def told(self) -> list[str]:
        """What was set and why, in words."""
        said = {
            "python RMSNorm": self.norm == "python",
            "composite RMSNorm": self.norm == "composite",
            "embeddings, norm, output in the root group": self.has_ends_in_root,
            "last block not resharded": self.is_last_block_kept,
            f"logits in {self.loss_chunks} chunks": self.loss_chunks > 0,
            "logits kept until the next step": self.keeps_logits,
        }
        return [text for text, holds in said.items() if holds]


def then_of(row: Row) -> Then:
    """What the row's run was built of."""
    is_old = row.is_before_separate_ends
    return Then(
        norm="python" if row.norm == "python RMSNorm" else "composite",
        has_ends_in_root=is_old,
        # reshard "always" (#822) is for the last block too
        is_last_block_kept=is_old and row.reshard != "always",
        loss_chunks=8 if row.loss.startswith("chunked") else 0,
        norms_queries=row.model.startswith("Qwen3"),
        keeps_logits=row.date < LOGITS_DELETED,
    )
