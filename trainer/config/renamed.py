"""Keys and values of torchtitan's earlier releases, with their current names.

The loader uses them in error messages, `titan config upgrade` to rewrite files.
"""

from typing import Any

_FLOAT8 = "quantize.linear.float8"
_MX = "quantize.linear.mx"

RENAMED: dict[str, str] = {
    "job.print_args": "job.print_config",
    "experimental.custom_args_module": "job.custom_config_module",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "experimental.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.enable_fsdp_float8_all_gather": f"{_FLOAT8}.enable_fsdp_float8_all_gather",
    "training.precompute_float8_dynamic_scale_for_fsdp": f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
    "float8.enable_fsdp_float8_all_gather": f"{_FLOAT8}.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp": f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
    "float8.recipe_name": f"{_FLOAT8}.recipe_name",
    "float8.filter_fqns": f"{_FLOAT8}.filter_fqns",
    "float8.emulate": f"{_FLOAT8}.emulate",
    "training.enable_float8_linear": "model.converters",
    "float8.enable_float8_linear": "model.converters",
    "mx.recipe_name": f"{_MX}.recipe_name",
    "mx.filter_fqns": f"{_MX}.filter_fqns",
    "mx.use_fp8_dim1_cast_triton_kernel": f"{_MX}.mxfp8_dim1_cast_kernel_choice",
    "optimizer.fused": "optimizer.implementation",
    "metrics.rank_0_only": "metrics.save_for_all_ranks",
    "metrics.enable_color_printing": "metrics.disable_color_printing",
    "model.tokenizer_path": "model.hf_assets_path",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "memory_estimation.enabled": "memory_estimation.enable",
}
"""Old key → current key. `upgrade.py` converts values that changed too."""

RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("model.converters", "float8"): _FLOAT8,
    ("model.converters", "mx"): _MX,
    ("training.dataset", "c4_mini"): "c4_test",
    (f"{_FLOAT8}.recipe_name", "all_axiswise"): "rowwise",
    (f"{_FLOAT8}.recipe_name", "lw_axiswise_with_gw_hp"): "rowwise_with_gw_hp",
    ("parallelism.pipeline_parallel_schedule", "1f1b"): "1F1B",
    ("parallelism.pipeline_parallel_schedule", "gpipe"): "GPipe",
    ("parallelism.pipeline_parallel_schedule", "interleaved_1f1b"): "Interleaved1F1B",
    ("parallelism.pipeline_parallel_schedule", "interleaved1f1b"): "Interleaved1F1B",
    ("parallelism.pipeline_parallel_schedule", "looped_bfs"): "LoopedBFS",
}
"""Key and old value, also as an item of a list → current value."""

READ_AS_RENAMED = ("model.converters", "float8")
"""The old value that a file of torchtitan v0.2.2, llama3_405b, still has: files with it are read as they are meant."""

GONE: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "job.use_for_integration_test": (None, "it marked torchtitan's own tests"),
    "parallelism.enable_compiled_autograd": ((False,), "compiled autograd was removed in 0.2.1"),
    "experimental.enable_compiled_autograd": ((False,), "compiled autograd was removed in 0.2.1"),
    "float8.force_recompute_fp8_weight_in_bwd": (None, "torchao decides it by itself since 0.2.0"),
    "float8.scaling_type_input": (("dynamic",), "scaling is dynamic; delayed scaling was removed from torchao"),
    "float8.scaling_type_weight": (("dynamic",), "scaling is dynamic; delayed scaling was removed from torchao"),
    "float8.scaling_type_grad_output": (("dynamic",), "scaling is dynamic; delayed scaling was removed from torchao"),
    "model.norm_type": (("rmsnorm", "fused_rmsnorm"), "there is RMSNorm, and torch chooses its kernel"),
    "model.tokenizer_type": (None, "the tokenizer's kind is read from its files"),
    "checkpoint.interval_type": (("steps",), "checkpoint.interval counts steps, never seconds"),
}
"""Removed keys: the values with which a key can be omitted (None: any), and the reason."""

CHANGED_DEFAULTS: dict[str, str] = {
    "checkpoint.last_save_model_only": "its default was false in 0.1.0 and true from 0.2.0 on; here it is false: the"
    " last checkpoint can be resumed",
    "job.dump_folder": 'its default was "./torchtitan/outputs" in 0.2.0; it is "./outputs"',
    "activation_checkpoint.preserve_rng_state": "its default was false up to 0.2.1; it is true",
}
"""Keys whose default has changed since."""
