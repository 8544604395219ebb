"""The vocabulary's keys that nothing here reads: which values ask for nothing, and why the others are refused.

To accept a key and ignore it would be a lie, so a file may carry these only with values that change nothing.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refused:
    """`harmless` None means any value: the key matters only together with another one, named in `reason`."""

    kind: Any
    harmless: tuple[Any, ...] | None
    reason: str


def _only(harmless: Any, reason: str, *, kind: Any = None) -> Refused:
    return Refused(kind or type(harmless), (harmless,), reason)


def _unread(kind: Any, switch: str) -> Refused:
    return Refused(kind, None, f"read only with {switch}, which is not covered")


_WORKERS = "data is read from a memory-mapped index in a background thread; there are no worker processes"
_TRACES = "Flight Recorder traces are not written yet"
_NO_EXPERTS = "mixture-of-experts models are not covered yet"
_LOADER = "a folder's format is read from its files: name any folder as checkpoint.initial_load_path"

REFUSED: dict[str, Refused] = {
    "job.config_file": _only("", "the config file is the command's argument: titan train FILE"),
    "job.custom_config_module": _only("", "extension sections are not covered"),
    "metrics.enable_wandb": _only(False, "Weights & Biases is not covered yet; metrics.enable_tensorboard is"),
    "model.tokenizer_path": _only("", "its meaning changed from a file to a folder: use model.hf_assets_path"),
    "optimizer.early_step_in_backward": _only(
        False, "the step comes after gradient clipping, which needs all gradients"
    ),
    "training.dataloader.num_workers": _only(0, _WORKERS),
    "training.dataloader.persistent_workers": _unread(bool, "training.dataloader.num_workers"),
    "training.dataloader.pin_memory": _only(False, "pinned batches are not covered yet"),
    "training.dataloader.prefetch_factor": _unread(int, "training.dataloader.num_workers"),
    "parallelism.pipeline_parallel_schedule_csv": _only("", "schedules from a CSV file are not covered"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": _unread(bool, "parallelism.expert_parallel_degree"),
    "parallelism.context_parallel_load_balancer": _only("headtail", "sequences are balanced head to tail"),
    "parallelism.context_parallel_rotate_method": _only("allgather", "keys and values are all-gathered"),
    "parallelism.expert_parallel_degree": _only(1, _NO_EXPERTS),
    "parallelism.expert_tensor_parallel_degree": _only(1, _NO_EXPERTS),
    "parallelism.expert_parallel_comm_backend": _unread(str, "parallelism.expert_parallel_degree"),
    "checkpoint.enable_ft_dataloader_checkpoints": _unread(bool, "fault_tolerance.enable"),
    "checkpoint.initial_load_in_hf_quantized": _only(False, "quantized weights are not covered yet"),
    "checkpoint.create_seed_checkpoint": _only(False, "run `titan seed CONFIG OUT`"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Refused(
        tuple[str, ...], ((), ("moe.router.gate",)), _NO_EXPERTS
    ),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": _unread(str, 'model.converters = ["quantize.linear.mx"]'),
    "quantize.linear.mx.recipe_name": _unread(str, 'model.converters = ["quantize.linear.mx"]'),
    "quantize.linear.mx.filter_fqns": _unread(tuple[str, ...], 'model.converters = ["quantize.…mx"]'),
    "quantize.grouped_mm.float8.fqns": _unread(tuple[str, ...], 'model.converters = ["quantize.…mx"]'),
    "quantize.grouped_mm.mx.recipe_name": _unread(str, 'model.converters = ["quantize.linear.mx"]'),
    "quantize.grouped_mm.mx.fqns": _unread(tuple[str, ...], 'model.converters = ["quantize.…mx"]'),
    "comm.mode": _only("default", "simulated process groups are not covered yet"),
    "memory_estimation.enable": _only(False, "run `titan estimate-memory CONFIG`"),
    "memory_estimation.disable_fake_mode": _unread(bool, "memory_estimation.enable"),
    "fault_tolerance.enable": _only(False, "TorchFT replica groups are not covered"),
    "fault_tolerance.process_group": _unread(str, "fault_tolerance.enable"),
    "fault_tolerance.process_group_timeout_ms": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.replica_id": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.group_size": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.min_replica_size": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.semi_sync_method": _unread(str, "fault_tolerance.enable"),
    "experimental.custom_args_module": _only("", "extension sections are not covered"),
    "validation.dataloader.num_workers": _only(0, _WORKERS),
    "validation.dataloader.persistent_workers": _unread(bool, "validation.dataloader.num_workers"),
    "validation.dataloader.pin_memory": _only(False, "pinned batches are not covered yet"),
    "validation.dataloader.prefetch_factor": _unread(int, "validation.dataloader.num_workers"),
    "debug.moe_force_load_balance": _only(False, _NO_EXPERTS),
}

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
REFUSED_VALUES: dict[tuple[str, str], str] = {
    (_SCHEDULE, "DualPipeV"): "it is made for experts, which are not covered yet; ZBVZeroBubble has the same stages",
}
"""Values of keys that are read, which the vocabulary allows and nothing here does."""

RENAMED: dict[str, str] = {
    "job.print_args": "job.print_config",
    "experimental.custom_args_module": "job.custom_config_module",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "memory_estimation.enabled": "memory_estimation.enable",
}
"""Names that older files use, and what they are called now: for the suggestion only, nothing is translated."""
