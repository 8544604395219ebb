"""torchtitan's keys that titan does not support: the values that have no effect, and why others are refused.

A config file may contain these keys only with values that change nothing; silently ignoring others would be wrong.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refused:
    """`harmless` None allows any value: the key only matters with another one, named in `reason`."""

    kind: Any
    harmless: tuple[Any, ...] | None
    reason: str


def _only(harmless: Any, reason: str, *, kind: Any = None) -> Refused:
    return Refused(kind or type(harmless), (harmless,), reason)


def _of_converter(kind: Any, name: str) -> Refused:
    return _unread(kind, f'model.converters = ["{name}"]')


def _unread(kind: Any, switch: str) -> Refused:
    return Refused(kind, None, f"read only with {switch}, which is not covered")


_WORKERS = "a background thread reads the next batch; there are no worker processes"
_NO_MX = "MXFP8 is not covered; quantize.linear.float8 is"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"

REFUSED: dict[str, Refused] = {
    "job.config_file": _only("", "the config file is the command's argument: titan train FILE"),
    "job.custom_config_module": _only("", "a module in experimental.custom_import registers sections"),
    "model.tokenizer_path": _only("", "its meaning changed from a file to a folder: use model.hf_assets_path"),
    "optimizer.early_step_in_backward": _only(
        False, "the step comes after gradient clipping, which needs all gradients"
    ),
    "training.dataloader.num_workers": _only(0, _WORKERS),
    "training.dataloader.persistent_workers": _unread(bool, "training.dataloader.num_workers"),
    "training.dataloader.prefetch_factor": _unread(int, "training.dataloader.num_workers"),
    "parallelism.pipeline_parallel_schedule_csv": _only("", "schedules from a CSV file are not covered"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": _unread(bool, f"{_SCHEDULE} = DualPipeV"),
    "parallelism.context_parallel_load_balancer": _only("headtail", "sequences are balanced head to tail"),
    "parallelism.context_parallel_rotate_method": _only("allgather", "keys and values are all-gathered"),
    "parallelism.expert_parallel_comm_backend": Refused(
        str, None, "rows are exchanged by all-to-all, whatever the backend: DeepEP's kernels are not covered"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": _unread(bool, "fault_tolerance.enable"),
    "checkpoint.create_seed_checkpoint": _only(False, "run `titan seed CONFIG OUT`"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Refused(
        tuple[str, ...],
        ((), ("moe.router.gate",)),
        "which products `op` recomputes cannot be chosen: every second one is kept",
    ),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": _of_converter(str, "quantize.linear.mx"),
    "quantize.linear.mx.recipe_name": _of_converter(str, "quantize.linear.mx"),
    "quantize.linear.mx.filter_fqns": _of_converter(tuple[str, ...], "quantize.linear.mx"),
    "quantize.grouped_mm.float8.fqns": _of_converter(tuple[str, ...], "quantize.grouped_mm.float8"),
    "quantize.grouped_mm.mx.recipe_name": _of_converter(str, "quantize.grouped_mm.mx"),
    "quantize.grouped_mm.mx.fqns": _of_converter(tuple[str, ...], "quantize.grouped_mm.mx"),
    "comm.mode": _only("default", "for a rank on a fake process group run `titan train CONFIG --dry-run`"),
    "memory_estimation.enable": _only(False, "run `titan estimate-memory CONFIG`"),
    "memory_estimation.disable_fake_mode": _unread(bool, "memory_estimation.enable"),
    "fault_tolerance.enable": _only(False, "TorchFT replica groups are not covered"),
    "fault_tolerance.process_group": _unread(str, "fault_tolerance.enable"),
    "fault_tolerance.process_group_timeout_ms": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.replica_id": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.group_size": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.min_replica_size": _unread(int, "fault_tolerance.enable"),
    "fault_tolerance.semi_sync_method": _unread(str, "fault_tolerance.enable"),
    "experimental.custom_args_module": _only("", "a module in experimental.custom_import registers sections"),
    "validation.dataloader.num_workers": _only(0, _WORKERS),
    "validation.dataloader.persistent_workers": _unread(bool, "validation.dataloader.num_workers"),
    "validation.dataloader.prefetch_factor": _unread(int, "validation.dataloader.num_workers"),
}

REFUSED_VALUES: dict[tuple[str, str], str] = {
    (
        _SCHEDULE,
        "DualPipeV",
    ): "it overlaps two microbatches' exchanges of experts, which is not covered; ZBVZeroBubble has the same stages",
    ("model.converters", "quantize.grouped_mm.float8"): "torchao's float8 of grouped products is a prototype; experts "
    "compute in the training dtype, and quantize.linear.float8 converts the dense linear layers",
    ("model.converters", "quantize.grouped_mm.mx"): _NO_MX,
    ("model.converters", "quantize.linear.mx"): _NO_MX,
}
"""Values of supported keys that torchtitan allows and titan does not; of a list, its items."""

REFUSED_FAMILIES: dict[str, str] = {
    "flux": "it makes images; language models are covered",
    "llama3_ft": "TorchFT replica groups are not covered; the model is llama3",
}
"""Values of model.name that torchtitan has."""

_FLUX = "it belongs to Flux, which makes images; language models are covered"
_TORCHFT = "it belongs to TorchFT's replica groups, which are not covered"
REFUSED_EXTENSIONS: dict[str, str] = {
    "encoder.": _FLUX,
    "inference.": _FLUX,
    "training.classifier_free_guidance_prob": _FLUX,
    "training.img_size": _FLUX,
    "training.test_mode": _FLUX,
    "validation.enable_classifier_free_guidance": _FLUX,
    "validation.classifier_free_guidance_scale": _FLUX,
    "validation.denoising_steps": _FLUX,
    "validation.eval_freq": _FLUX,
    "validation.save_img_": _FLUX,
    "validation.all_timesteps": _FLUX,
    "fault_tolerance.sync_steps": _TORCHFT,
    "fault_tolerance.should_quantize": _TORCHFT,
    "fault_tolerance.fragment_": _TORCHFT,
    "fault_tolerance.module_fqns_per_model_fragment": _TORCHFT,
    "fault_tolerance.num_fragments": _TORCHFT,
    "compile.graph_passes": "it belongs to an experiment of torchtitan's, SimpleFSDP",
}
"""Prefixes of keys that torchtitan has only with an extension."""
