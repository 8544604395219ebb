"""Every key of a config: followed by the traced step, without effect on a GPU's memory, or refused with the reason.

A key that nobody has decided on fails tests/unit/titan_tools/test_memory_coverage.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from converters.layout import MeshShape
from trainer.config.sections import Config

TRACED_BACKENDS = ("inductor", "aot_eager", "eager")

FOLLOWED: dict[str, tuple[str, ...]] = {
    "trainer/build.py builds the model by it, for training and for the trace": (
        "model.name",
        "model.flavor",
        "model.converters",
        "training.dtype",
        "training.mixed_precision_param",
        "training.mixed_precision_reduce",
        "training.enable_cpu_offload",
        "training.loss",
        "training.loss_chunks",
        "parallelism.data_parallel_replicate_degree",
        "parallelism.data_parallel_shard_degree",
        "parallelism.fsdp_reshard_after_forward",
        "parallelism.tensor_parallel_degree",
        "parallelism.disable_loss_parallel",
        "parallelism.pipeline_parallel_degree",
        "parallelism.module_fqns_per_model_part",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "parallelism.pipeline_parallel_layers_per_stage",
        "parallelism.pipeline_parallel_schedule",
        "parallelism.pipeline_parallel_microbatch_size",
        "parallelism.context_parallel_degree",
        "activation_checkpoint.mode",
        "activation_checkpoint.selective_ac_option",
        "activation_checkpoint.early_stop",
        "activation_checkpoint.debug",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        "quantize.linear.float8.recipe_name",
        "quantize.linear.float8.filter_fqns",
        "quantize.linear.float8.emulate",
    ),
    "trainer/optim.py and trainer/moments.py make the states and take the step by it": (
        "optimizer.name",
        "optimizer.implementation",
        "optimizer.state_dtype",
    ),
    "the traced step has batches of this shape, and as many": (
        "training.local_batch_size",
        "training.global_batch_size",
        "training.seq_len",
    ),
    "a batch of validation's own shape goes forward after the traced steps": (
        "validation.enable",
        "validation.local_batch_size",
        "validation.seq_len",
    ),
    "the compiler's own plan of its buffers is followed, trace/compile/plan.py": (
        "compile.enable",
        "compile.components",
        "compile.backend",
        "parallelism.enable_async_tensor_parallel",
        "activation_checkpoint.memory_budget",
    ),
    "families and losses of one's own run as they are; a GPU's kernels inside of them are not known": (
        "experimental.custom_import",
    ),
}
"""What is followed how → keys."""

WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "names of files and folders, and what is told": (
        "job.dump_folder",
        "job.description",
        "job.print_config",
        "job.save_config_file",
        "metrics.log_freq",
        "metrics.enable_tensorboard",
        "metrics.enable_wandb",
        "metrics.save_tb_folder",
        "metrics.disable_color_printing",
        "metrics.save_for_all_ranks",
        "model.hf_assets_path",
        "model.print_after_conversion",
        "activation_checkpoint.visualize_memory_budget_pareto",
    ),
    "profilers record in host memory, CUPTI in buffers of its own, outside of torch's allocator": (
        "profiling.enable_profiling",
        "profiling.save_traces_folder",
        "profiling.profile_freq",
        "profiling.profiler_active",
        "profiling.profiler_warmup",
        "profiling.enable_memory_snapshot",
        "profiling.save_memory_snapshot_folder",
    ),
    "a number that a kernel is given, whatever it is": (
        "optimizer.lr",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.eps",
        "optimizer.weight_decay",
        "lr_scheduler.warmup_steps",
        "lr_scheduler.total_steps",
        "lr_scheduler.decay_ratio",
        "lr_scheduler.decay_type",
        "lr_scheduler.min_lr_factor",
        "training.max_norm",
        "debug.seed",
    ),
    "data waits in host memory, pinned or not; a step has its batch copied to the GPU": (
        "training.dataset",
        "training.dataset_path",
        "training.dataset_mix",
        "training.dataset_streams",
        "training.dataloader.pin_memory",
        "validation.dataset",
        "validation.dataset_path",
        "validation.dataset_mix",
        "validation.dataloader.pin_memory",
    ),
    "one step is like another, and one batch of validation like the next": (
        "training.steps",
        "training.on_nonfinite",
        "validation.freq",
        "validation.steps",
    ),
    "Python's collector frees what only it can, and no step of titan leaves it tensors": (
        "training.gc_freq",
        "training.gc_debug",
    ),
    "a checkpoint is copied to host memory tensor by tensor; an export's cast, between steps, is smaller than a step": (
        "checkpoint.enable",
        "checkpoint.folder",
        "checkpoint.interval",
        "checkpoint.initial_load_path",
        "checkpoint.initial_load_model_only",
        "checkpoint.last_save_model_only",
        "checkpoint.keep_latest_k",
        "checkpoint.load_step",
        "checkpoint.exclude_from_loading",
        "checkpoint.enable_first_step_checkpoint",
        "checkpoint.load_only",
        "checkpoint.initial_load_in_hf",
        "checkpoint.last_save_in_hf",
        "checkpoint.last_save_in_torchtune",
        "checkpoint.export_dtype",
        "checkpoint.max_failed_saves",
        "checkpoint.async_mode",
    ),
    "random states and metadata that recomputation compares lie in host memory": (
        "activation_checkpoint.preserve_rng_state",
        "activation_checkpoint.determinism_check",
    ),
    "time limits, and a record in host memory": (
        "comm.init_timeout_seconds",
        "comm.train_timeout_seconds",
        "comm.trace_buf_size",
        "comm.save_traces_folder",
        "comm.save_traces_file_prefix",
    ),
}
"""Why it does not matter → keys."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What cannot be traced truly: the keys that ask for it, when they do, the reason, and the nearest that can be."""

    keys: tuple[str, ...]
    is_asked_for: Callable[[Config, MeshShape], bool]
    reason: str
    nearest: str  # value of the first key


GAPS = (
    Gap(
        ("debug.deterministic", "debug.deterministic_warn_only"),
        lambda config, dims: config.debug.deterministic,
        "debug.deterministic: kernels that add up in a fixed order take other buffers (attention's backward one for"
        " every few multiprocessors), which are not known here; nearest: false",
        "false",
    ),
    Gap(
        ("compile.backend",),
        lambda config, dims: (
            config.compile.enable and bool(config.compile.components) and config.compile.backend not in TRACED_BACKENDS
        ),
        f"compile.backend: what another compiler than {', '.join(TRACED_BACKENDS)} keeps and fuses is not known;"
        " nearest: inductor",
        "inductor",
    ),
)


def trace_gaps(config: Config, dims: MeshShape) -> list[Gap]:
    """What the config asks for and no trace follows; empty where a trace can be believed."""
    return [gap for gap in GAPS if gap.is_asked_for(config, dims)]
