"""What a published run was made of: as a config of ours, and what torchtitan built otherwise at the row's date.

Both are told from the row's columns alone. Torch-free; `as_built_then.py` rebuilds what differs.
"""

import re
from dataclasses import dataclass
from typing import Literal

from converters.errors import ConfigError, UnsupportedError
from titan_tools.memory.published.rows import Row

# Dates of torchtitan's git log, unless another source is named.
# #1625: tok_embeddings and [norm, output] in FSDP groups of their own, the last block resharded, fused AdamW by default
SEPARATE_ENDS = "2025-08-22"
# torch's nightlies run RMSNorm on CUDA in one kernel (pytorch#153666; torchtitan#1421 of that day tells of it)
FUSED_NORM = "2025-07-20"
# The logits were deleted before backward; until then they lived until the next step's replaced them
LOGITS_DELETED = "2024-04"
# A microbatch is one sample; until then a batch was cut in as many as there were stages
MICROBATCH_OF_ONE = "2025-04"

_MODEL = re.compile(r"(Llama ?2|Llama ?3(?:\.\d)?|Qwen ?3)-([\d.]+B)")
_FAMILIES = {"Llama2": "llama2", "Llama3": "llama3", "Qwen3": "qwen3"}
_PRESETS = {"llama2": "llama3_8b", "llama3": "llama3_8b", "qwen3": "qwen3_32b"}


@dataclass(frozen=True, slots=True)
class Then:
    """Every difference that moves memory and that the row's degrees and sizes do not say."""

    norm: Literal["python", "composite", "fused"]
    optimizer: Literal["foreach", "fused"]
    has_ends_in_root: bool
    is_last_block_kept: bool
    loss_chunks: int  # of the logits; 0: none
    norms_queries: bool  # and turns them in bf16, with a cache of both halves
    has_wide_logits: bool  # the model itself ends in fp32
    num_logits_kept: int  # microbatches whose logits live until the next step's

    def told(self) -> list[str]:
        """What was set, in words."""
        said = {
            f"{self.norm} RMSNorm": True,
            f"{self.optimizer} AdamW": True,
            "embeddings, norm, output in the root group": self.has_ends_in_root,
            "groups: embeddings; norm, output": not self.has_ends_in_root,
            "last block not resharded": self.is_last_block_kept,
            "plain loss": self.loss_chunks == 0,
            f"logits in {self.loss_chunks} chunks": self.loss_chunks > 0,
            "logits in fp32": self.has_wide_logits,
            "logits kept until the next step": self.num_logits_kept > 0,
        }
        return [text for text, holds in said.items() if holds]


def then_of(row: Row) -> Then:
    """What the row's run was built of."""
    is_old = row.date < SEPARATE_ENDS
    native = "composite" if row.date < FUSED_NORM else "fused"
    keeps = row.pp > 1 or row.date < LOGITS_DELETED  # a pipeline's last stage keeps all of its outputs
    return Then(
        norm="python" if row.norm.startswith("python") else "fused" if row.norm.startswith("fused") else native,
        optimizer="foreach" if is_old else "fused",
        has_ends_in_root=is_old,
        # reshard "always" (#822) is for the last block too
        is_last_block_kept=is_old and row.reshard != "always",
        loss_chunks=8 if row.loss.startswith("chunked") else 0,
        norms_queries=row.model.startswith("Qwen"),
        has_wide_logits=row.loss.startswith("fp32 logits"),
        num_logits_kept=keeps * (row.local_batch_size // microbatch_size(row) if row.pp > 1 else 1),
    )


def settings_of(row: Row) -> tuple[str, ...]:
    """The run as a preset of ours and overrides of it.

    Raises ConfigError for a model of another family, UnsupportedError for what is not rebuilt.
    """
    if row.cp > 1:
        raise UnsupportedError(f"row {row.id}: torchtitan's context parallelism (ring attention) is not ours")
    if not (found := _MODEL.match(row.model)):
        raise ConfigError(f"row {row.id}: no model of ours is called {row.model!r}")
    family = _FAMILIES[found[1].replace(" ", "").partition(".")[0]]
    mode, _, option = row.checkpointing.partition("-")
    settings = {
        "model.name": family,
        "model.flavor": found[2],
        "training.seq_len": row.seq_len,
        "training.local_batch_size": row.local_batch_size,
        "training.loss": "plain",
        "parallelism.data_parallel_shard_degree": row.dp_shard,
        "parallelism.data_parallel_replicate_degree": row.dp_replicate,
        "parallelism.tensor_parallel_degree": row.tp,
        "parallelism.pipeline_parallel_degree": row.pp,
        "parallelism.context_parallel_degree": row.cp,
        "parallelism.fsdp_reshard_after_forward": row.reshard if row.reshard in ("always", "never") else "default",
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": option or "op",
        "optimizer.implementation": then_of(row).optimizer,
    }
    if row.pp > 1:
        settings |= {
            "parallelism.pipeline_parallel_schedule": _schedule(row),
            "parallelism.pipeline_parallel_microbatch_size": microbatch_size(row),
            # torchtitan's stages were cut evenly
            "parallelism.pipeline_parallel_first_stage_less_layers": 0,
            "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        }
    if row.is_compiled:
        settings |= {
            "compile.enable": "true",
            "compile.components": "model,loss" if "compiled" in row.loss else "model",
        }
    if row.is_float8:
        settings |= {"model.converters": "quantize.linear.float8"} | _float8(row)
    return (_PRESETS[family], *(word for key, value in settings.items() for word in (f"--{key}", str(value))))


def microbatch_size(row: Row) -> int:
    """Samples."""
    num_stages = row.pp * (2 if _schedule(row) != "1F1B" else 1)
    return max(row.local_batch_size // num_stages, 1) if row.date < MICROBATCH_OF_ONE else 1


def _schedule(row: Row) -> str:
    return "Interleaved1F1B" if "interleaved" in row.schedule.lower() else "1F1B"


def _float8(row: Row) -> dict[str, str]:
    if "rowwise" in row.float8:
        return {"quantize.linear.float8.recipe_name": "rowwise"}
    gathers = str("all-gather" in row.float8 and "bf16 all-gather" not in row.float8).lower()
    keys = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    return {f"quantize.linear.float8.{key}": gathers for key in keys}
