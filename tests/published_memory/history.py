"""A published run as a config of ours, and what torchtitan built differently at the row's date.

Both follow from the row's columns alone. Torch-free; `historical_build.py` rebuilds what differs.
"""

import json
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from converters.families.parameters import Role
from converters.families.registry import get_family
from tests.published_memory.rows import MICROBATCH_OF_ONE, Row

# Dates of torchtitan's git log, unless another source is named.
# #1625: tok_embeddings and [norm, output] in FSDP groups of their own, the last block resharded, fused AdamW by default
SEPARATE_ENDS = "2025-08-22"
# torch's nightlies run RMSNorm on CUDA in one kernel (pytorch#153666, mentioned in torchtitan#1421 of that day)
FUSED_NORM = "2025-07-20"
# The logits are deleted before backward; earlier they were kept until the next step's
LOGITS_DELETED = "2024-04"
# #781: as many microbatches as stages, where no number was set; earlier as many as pipeline ranks
MICROBATCHES_OF_STAGES = "2025-01-07"
# #1103: the embedding and the output count as a layer each. Earlier layers alone were split evenly, and those that do
# not divide went to the stages after the first
WEIGHTED_ENDS = "2025-04-15"
# #985: torch's own RMSNorm in place of the model's, if a row does not say which one it was
NATIVE_NORM = "2025-03-19"
# #642: the loss casts the logits; earlier the model ended in fp32
CAST_IN_LOSS = "2024-10-23"
# If the model is compiled, so is the loss: #642, until #755 disabled it (pytorch#143774); again since #1033
LOSS_COMPILED = ((CAST_IN_LOSS, "2024-12-19"), ("2025-04-01", "9999"))

# v0.2.1 (2025-12-26) with torch of this day (pytorch#165822), but not v0.2.0 (2025-10-18): the last stage of a pipeline
# does not keep its outputs
OUTPUTS_NOT_KEPT = "2025-10-20"
# #2774, in a month before #2937's: experts' rows are not padded, and the router is in fp32 (#2389). #2281, of its last
# days: experts are in their layer's FSDP group, over their own mesh
ROWS_NOT_PADDED = "2026-04"

# v0.2.2: grouped queries without copies of keys and values, cuDNN's attention before flash attention
GROUPED_QUERIES = "2026-02-20"
# #2937: chunks of the hidden states go through the output and the loss; earlier the loss read whole logits in chunks
OUTPUT_IN_CHUNKS = "2026-04-10"

# Tensor-parallel collectives recorded streams, which keeps their tensors until the GPU has caught up (#735,
# pytorch#147168), unless TORCH_NCCL_AVOID_RECORD_STREAMS was set; by #1088 torch no longer recorded them. Asynchronous
# TP copies between GPUs instead
STREAMS_NOT_RECORDED = "2025-04-10"

_BOUNDARIES = (
    SEPARATE_ENDS, FUSED_NORM, LOGITS_DELETED, MICROBATCHES_OF_STAGES, WEIGHTED_ENDS, NATIVE_NORM, CAST_IN_LOSS,
    *(day for days in LOSS_COMPILED for day in days), OUTPUTS_NOT_KEPT, ROWS_NOT_PADDED, GROUPED_QUERIES,
    OUTPUT_IN_CHUNKS, STREAMS_NOT_RECORDED, MICROBATCH_OF_ONE,
)  # fmt: skip
_FIRST_OF = {"qwen3": "2025-07", "deepseek_v3": "2025-07"}  # months in which torchtitan got the family

_PRESETS = {"llama2": "llama3_8b", "llama3": "llama3_8b", "qwen3": "qwen3_32b", "deepseek_v3": "llama3_8b"}


@dataclass(frozen=True, slots=True)
class HistoricalBuild:
    """The differences that affect memory and do not follow from the row's degrees and sizes."""

    norm: Literal["python", "composite", "fused"]
    optimizer: Literal["foreach", "fused"]
    has_ends_in_root: bool
    has_tied_ends: bool  # torchtitan gathered each by itself; here both are in one group
    is_last_block_kept: bool
    loss_chunks: int  # of the logits; 0: none
    norms_queries: bool  # and rotates them in bf16, with a cache of both halves
    has_wide_logits: bool  # the model itself ends in fp32
    num_logits_kept: int  # microbatches whose logits are kept until the next step's
    is_loss_compiled: bool
    repeats_keys: bool  # and values, for each of the queries that share them
    has_output_in_chunks: bool  # as ours, with `loss_chunks` 0
    has_experts: bool  # routed and combined as torchtitan does
    pads_experts: bool  # their rows; and shards, gathers and compiles them by themselves, with a router in bf16
    is_model_compiled: bool
    gathers_keys: bool  # as torchtitan's context ranks do by default ("allgather"); their ring over them is not rebuilt
    is_of_graph_trainer: bool  # whose graph is not rebuilt: the estimate is of the trainer of its date
    is_floor: bool  # collectives kept buffers for a time that no trace shows

    def describe(self) -> list[str]:
        """The differences in words."""
        said = {
            f"{self.norm} RMSNorm": True,
            f"{self.optimizer} AdamW": True,
            "embeddings, norm, output in the root group": self.has_ends_in_root,
            "groups: embeddings; norm, output": not (self.has_ends_in_root or self.has_tied_ends),
            "group: tied embeddings, norm, output": self.has_tied_ends and not self.has_ends_in_root,
            "last block not resharded": self.is_last_block_kept,
            "plain loss": self.loss_chunks == 0 and not self.is_loss_compiled and not self.has_output_in_chunks,
            f"logits in {self.loss_chunks} chunks": self.loss_chunks > 0,
            "logits in fp32": self.has_wide_logits,
            "logits kept until the next step": self.num_logits_kept > 0,
            "compiled loss": self.is_loss_compiled,
            "output and loss in chunks": self.has_output_in_chunks,
            "experts combined by scatter_add": self.has_experts and not self.pads_experts,
            "experts' rows padded, put back and weighted in fp32; experts in own groups": self.pads_experts,
            "keys gathered, without the ring over them": self.gathers_keys,
            "graph_trainer's graph is not rebuilt, so no bound": self.is_of_graph_trainer,
            "no recorded streams, so a floor": self.is_floor,
        }
        return [text for text, holds in said.items() if holds]


def build_of(row: Row) -> HistoricalBuild:
    """How the row's run was built."""
    is_old = row.date < SEPARATE_ENDS
    native = "composite" if row.date < FUSED_NORM else "fused"
    kind = row.norm or ("python" if row.date < NATIVE_NORM else "native")
    chunks_output = row.loss.num_chunks > 0 and row.date >= OUTPUT_IN_CHUNKS
    family = get_family(row.family)
    has_experts = family.has_role(Role.ROUTER, family.flavors[row.flavor])
    # a pipeline's last stage kept all of its outputs
    keeps = row.date < LOGITS_DELETED or (row.pp > 1 and row.date < OUTPUTS_NOT_KEPT)
    return HistoricalBuild(
        norm=native if kind == "native" else kind,
        optimizer="foreach" if is_old else "fused",
        has_ends_in_root=is_old,
        has_tied_ends=get_family(row.family).flavors[row.flavor].tied,
        # reshard "always" (#822) is for the last block too
        is_last_block_kept=is_old and row.reshard != "always",
        loss_chunks=0 if chunks_output else row.loss.num_chunks,
        repeats_keys=row.date < GROUPED_QUERIES,
        has_output_in_chunks=chunks_output,
        has_experts=has_experts,
        pads_experts=has_experts and row.date < ROWS_NOT_PADDED,
        is_model_compiled=row.is_compiled,
        norms_queries=row.family == "qwen3",
        has_wide_logits=row.loss.has_wide_logits or row.date < CAST_IN_LOSS,
        num_logits_kept=keeps * (row.local_batch_size // microbatch_size(row) if row.pp > 1 else 1),
        is_loss_compiled=row.loss.is_compiled
        or (row.is_compiled and any(since <= row.date < until for since, until in LOSS_COMPILED)),
        gathers_keys=row.cp > 1,
        is_of_graph_trainer=row.is_of_graph_trainer,
        is_floor=row.tp > 1 and row.date < STREAMS_NOT_RECORDED and not row.has_async_tp,
    )


def settings_of(row: Row) -> tuple[str, ...]:
    """The run as a preset of ours and overrides of it."""
    mode, option = row.checkpointing
    settings = {
        "model.name": row.family,
        "model.flavor": row.flavor,
        "training.seq_len": row.seq_len,
        "training.local_batch_size": row.local_batch_size,
        "training.loss": "plain",
        "parallelism.data_parallel_shard_degree": row.dp_shard,
        "parallelism.data_parallel_replicate_degree": row.dp_replicate,
        "parallelism.tensor_parallel_degree": row.tp,
        "parallelism.pipeline_parallel_degree": row.pp,
        "parallelism.context_parallel_degree": row.cp,
        "parallelism.expert_parallel_degree": row.ep,
        "parallelism.fsdp_reshard_after_forward": row.reshard if row.reshard in ("always", "never") else "default",
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": option,
        "optimizer.implementation": build_of(row).optimizer,
        "parallelism.enable_async_tensor_parallel": str(row.has_async_tp and row.tp > 1).lower(),
    }
    if row.pp > 1:
        settings |= {
            "parallelism.pipeline_parallel_schedule": row.schedule,
            "parallelism.pipeline_parallel_microbatch_size": microbatch_size(row),
        }
    if row.pp > 1 and row.date < WEIGHTED_ENDS:
        settings["parallelism.module_fqns_per_model_part"] = json.dumps(_stages(row))
    if build_of(row).has_output_in_chunks:
        settings |= {"training.loss": "chunked", "training.loss_chunks": row.loss.num_chunks}
    components = {"model": row.is_compiled, "loss": build_of(row).is_loss_compiled}
    if any(components.values()):
        settings["compile.enable"] = "true"
        settings["compile.components"] = ",".join(name for name, is_compiled in components.items() if is_compiled)
    if row.float8:
        settings |= {"model.converters": "quantize.linear.float8"} | _float8(row)
    return (_PRESETS[row.family], *(word for key, value in settings.items() for word in (f"--{key}", str(value))))


def possible_dates(row: Row) -> list[str]:
    """The row's date; where that is not known, one of each build that its run may have been of."""
    if row.has_date:
        return [row.date]
    first = _FIRST_OF.get(row.family, row.date)
    builds = {}
    for date in sorted({first, *(day for day in _BOUNDARIES if first < day < "9")}):
        dated = replace(row, date=date)
        builds.setdefault((build_of(dated), settings_of(dated)), date)
    return list(builds.values())


def microbatch_size(row: Row) -> int:
    """Samples: the row's, else torchtitan's default at its date."""
    if row.microbatch_size is not None:
        return row.microbatch_size
    if row.date >= MICROBATCH_OF_ONE:
        return 1
    return max(row.local_batch_size // (row.pp if row.date < MICROBATCHES_OF_STAGES else _num_stages(row)), 1)


def possible_microbatch_sizes(row: Row) -> list[int]:
    """One or the other end of what a run may have set: torchtitan's default, and one sample."""
    is_open = row.pp > 1 and row.date < MICROBATCH_OF_ONE and row.microbatch_size is None
    return sorted({microbatch_size(row), 1}, reverse=True) if is_open else [microbatch_size(row)]


def _num_stages(row: Row) -> int:
    return row.pp * (1 if row.schedule in ("1F1B", "GPipe") else 2)


def _stages(row: Row) -> list[list[str]]:
    """Module names by stage, before #1103."""
    num_stages, num_layers = _num_stages(row), get_family(row.family).flavors[row.flavor].num_layers
    least, more = divmod(num_layers, num_stages)
    layers = iter(f"layers.{number}" for number in range(num_layers))
    first, *middle = (list(islice(layers, least + (0 < stage <= more))) for stage in range(num_stages - 1))
    return [["tok_embeddings", *first], *middle, [*layers, "norm", "output"]]


def _float8(row: Row) -> dict[str, str]:
    """The output layer stays in bf16: torchtitan's float8.py left it out, later `filter_fqns` of its config files."""
    keys = {"filter_fqns": "output"}
    if row.float8.startswith("rowwise"):
        keys |= {"recipe_name": row.float8}
    elif "all-gather" in row.float8:
        keys |= {"enable_fsdp_float8_all_gather": "true", "precompute_float8_dynamic_scale_for_fsdp": "true"}
    return {f"quantize.linear.float8.{key}": value for key, value in keys.items()}
