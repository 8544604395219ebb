"""What a trace follows of a config: every key is decided on; what is said to have no effect has none."""

from dataclasses import fields, replace

import pytest
import torch

from converters.common.errors import UnsupportedError
from converters.layout.mesh_shape import MeshShape
from tests.dist.training import Layout, args_of
from titan_tools.memory.trace.capture import capture
from titan_tools.memory.trace.coverage import GAPS, trace_gaps
from titan_tools.memory.trace.events import Trace
from titan_tools.memory.trace.kernels import Kernels
from trainer.config.load import by_section, load_config
from trainer.config.preset import preset_names
from trainer.config.sections import Config
from trainer.job.job import resolve
from trainer.job.record import Job
from trainer.loss import registry as loss_registry
from trainer.models.decoder import TransformerBlock

pytestmark = pytest.mark.usefixtures("one_thread")

GPU = Kernels(device="cuda")
ONE_LAYER = replace(args_of("debug_gqa"), num_layers=1)


def captured(config: Config, *, world_size: int = 2, kernels: Kernels = GPU) -> Trace:
    return capture(Job.of(config, ONE_LAYER, resolve(config.parallelism, world_size)), rank=0, kernels=kernels)


# How the trace follows a key → the keys
FOLLOWED = {
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
        "training.expert_balance_rate",
        "training.document_mask",
        "model.attn_type",
        "debug.moe_force_load_balance",
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
        "parallelism.expert_parallel_degree",
        "parallelism.expert_tensor_parallel_degree",
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
    "trainer/optim makes the states and run the step by it": (
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
    "the compiler's own plan of its buffers is followed, trace/compile.py": (
        "compile.enable",
        "compile.components",
        "compile.backend",
        "parallelism.enable_async_tensor_parallel",
        "activation_checkpoint.memory_budget",
    ),
    "registered families and losses run as they are; what their own GPU kernels allocate is not known": (
        "experimental.custom_import",
    ),
}


# Why a key has no effect on a GPU's memory → the keys
WITHOUT_EFFECT = {
    "names of files and folders, and what is logged": (
        "job.dump_folder",
        "job.description",
        "job.print_config",
        "job.save_config_file",
        "metrics.log_freq",
        "metrics.enable_tensorboard",
        "metrics.save_tb_folder",
        "metrics.disable_color_printing",
        "metrics.enable_wandb",
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
    "a scalar argument of a kernel": (
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
    "data is in host memory, pinned or not; a step copies its batch to the GPU": (
        "training.dataset",
        "training.dataset_path",
        "training.dataset_mix",
        "training.dataset_streams",
        "training.special_tokens",
        "training.packing",
        "training.dataloader.pin_memory",
        "validation.dataset",
        "validation.dataset_path",
        "validation.dataset_mix",
        "validation.dataloader.pin_memory",
    ),
    "all steps are alike, and all batches of validation": (
        "training.steps",
        "training.on_nonfinite",
        "validation.freq",
        "validation.steps",
    ),
    "no step leaves tensors in reference cycles, which garbage collection would free": (
        "training.gc_freq",
        "training.gc_debug",
    ),
    "a checkpoint is copied to host memory tensor by tensor; an export's cast, between steps, is smaller than a step": (
        "checkpoint.enable",
        "checkpoint.folder",
        "checkpoint.interval",
        "checkpoint.initial_load_path",
        "checkpoint.initial_load_select",
        "checkpoint.initial_load_model_only",
        "checkpoint.last_save_model_only",
        "checkpoint.keep_latest_k",
        "checkpoint.load_step",
        "checkpoint.exclude_from_loading",
        "checkpoint.enable_first_step_checkpoint",
        "checkpoint.load_only",
        "checkpoint.initial_load_in_hf",
        "checkpoint.initial_load_in_hf_quantized",
        "checkpoint.last_save_in_hf",
        "checkpoint.last_save_in_torchtune",
        "checkpoint.export_dtype",
        "checkpoint.max_failed_saves",
        "checkpoint.async_mode",
    ),
    "random states and metadata that recomputation compares are in host memory": (
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


def tiny(parallelism: dict | None = None, training: dict | None = None, **sections: dict) -> Config:
    sizes = {"seq_len": 16, "local_batch_size": 2}
    return Layout("tiny", 2, parallelism or {}, sizes | (training or {}), sections).config("debug_gqa")


def held_at_ends(trace: Trace) -> tuple[int, int]:
    """Bytes before the first step, and after the last."""
    held, before = 0, None
    for segment, event in trace.events():
        if before is None and segment.point.step:
            before = held
        held += trace.blocks[event].num_bytes if event >= 0 else -trace.blocks[~event].num_bytes
    return before, held


# --- every key


def test_every_key_of_the_config_is_decided_on():
    keys = {f"{section}.{f.name}" for section, record in by_section(Config()).items() for f in fields(record)}
    followed = [key for group in FOLLOWED.values() for key in group]
    idle = [key for group in WITHOUT_EFFECT.values() for key in group]
    refused = {key for gap in GAPS for key in gap.keys}
    assert {*followed, *idle, *refused} == keys
    assert len({*followed, *idle}) == len(followed) + len(idle)
    assert not refused & set(idle)


def test_what_is_said_to_have_no_effect_has_none():
    every = {key for group in WITHOUT_EFFECT.values() for key in group}
    section_of = {"training.dataloader": "dataloader", "validation.dataloader": "validation_dataloader"}
    changed: dict[str, dict] = {}
    for key in every - {"training.dataset_mix", "validation.dataset_mix"}:
        section, _, name = key.rpartition(".")
        section = section_of.get(section, section)
        changed.setdefault(section, {})[name] = _another(getattr(getattr(tiny(), section), name))
    changed["checkpoint"] |= {"async_mode": "async", "export_dtype": "bfloat16", "exclude_from_loading": ("rng",)}
    changed["checkpoint"] |= {"load_only": False, "initial_load_model_only": True}  # which others need
    changed["training"] |= {"dataset": "text", "on_nonfinite": "skip"}
    changed["lr_scheduler"] |= {"decay_type": "cosine", "decay_ratio": 0.5}
    changed["activation_checkpoint"] |= {"mode": "full", "determinism_check": "none"}
    training = changed.pop("training")
    one = captured(tiny(activation_checkpoint={"mode": "full"}))
    assert captured(tiny({}, training, **changed)) == one


def _another(value):
    """Of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 2 if isinstance(value, int) else value / 2
    return "other" if value is None or isinstance(value, str) else value


# --- what is refused


def test_gaps_have_reasons_and_presets_have_none():
    config = load_config("llama3_8b", ["--debug.deterministic", "--compile.enable", "--compile.backend=onnxrt"])
    gaps = trace_gaps(config, resolve(config.parallelism, 8))
    assert [gap.keys[0] for gap in gaps] == ["debug.deterministic", "compile.backend"]
    assert all(gap.reason.startswith(gap.keys[0]) and f"nearest: {gap.nearest}" in gap.reason for gap in gaps)
    for preset in preset_names():
        config = load_config(preset)
        assert not trace_gaps(config, MeshShape(tp=config.parallelism.tensor_parallel_degree))


def test_a_loss_whose_sizes_depend_on_values_is_refused_and_another_runs_as_it_is(monkeypatch):
    def selected(logits_BLV, targets_BL):
        return torch.logsumexp(logits_BLV[targets_BL >= 0].float(), dim=-1).sum()

    def masked(logits_BLV, targets_BL):
        if torch.isnan(logits_BLV).any() or not torch.isfinite(logits_BLV).all():
            raise ValueError
        return (torch.logsumexp(logits_BLV.float(), dim=-1) * (targets_BL >= 0)).sum()

    @torch.library.custom_op("memory_coverage::score", mutates_args=())
    def score(logits_BLV: torch.Tensor) -> torch.Tensor:
        raise AssertionError("run on real memory")

    monkeypatch.setattr(loss_registry, "_REGISTERED", {})
    loss_registry.register_loss("of_ones_own", lambda logits_BLV, targets_BL: score(logits_BLV))
    loss_registry.register_loss("selected", selected)
    loss_registry.register_loss("masked", masked)
    with pytest.raises(UnsupportedError, match="aten.nonzero"):
        captured(tiny({}, {"loss": "selected"}))
    with pytest.raises(UnsupportedError, match="memory_coverage::score"):
        captured(tiny({}, {"loss": "of_ones_own"}))
    assert captured(tiny({}, {"loss": "masked"})).blocks


def test_a_layer_whose_sizes_depend_on_values_is_refused_also_in_a_pipeline(monkeypatch):
    monkeypatch.setattr(TransformerBlock, "forward", lambda block, x, rotations: x[x > 0].view_as(x))
    config = tiny({"pipeline_parallel_degree": 2}, {})
    dims = resolve(config.parallelism, 2)
    with pytest.raises(UnsupportedError, match="aten.nonzero"):
        capture(Job.of(config, replace(ONE_LAYER, num_layers=2), dims), rank=0, kernels=GPU)


# --- what is followed besides a step's layout, which test_trace.py compares with real steps


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_counts_of_steps_lie_on_the_gpu_for_the_fused_kernel_alone(implementation):
    trace = captured(tiny(optimizer={"implementation": implementation}))
    counts = [b for b in trace.blocks if b.point.phase == "states" and b.num_bytes == 4]
    at_end = {number for _, number in trace.events() if number >= 0} - {~n for _, n in trace.events() if n < 0}
    num_parameters = 12  # of one layer, with embedding, norm and output
    assert len(counts) == num_parameters
    assert sum(trace.blocks[number] in counts for number in at_end) == (
        num_parameters if implementation == "fused" else 0
    )
    begin, end = held_at_ends(trace)
    assert begin == end  # and no step leaves anything behind, without Python's collector


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_validation_has_batches_of_its_own_and_leaves_nothing(pp):
    pipeline = {"pipeline_parallel_degree": pp, "pipeline_parallel_microbatch_size": 1}
    args = replace(ONE_LAYER, num_layers=pp)
    peaks = []
    for size in (2, 10):
        config = tiny(pipeline, validation={"enable": True, "local_batch_size": size, "seq_len": 32})
        trace = capture(Job.of(config, args, resolve(config.parallelism, 2)), rank=pp - 1, kernels=GPU)
        tokens = [b for b in trace.blocks if b.point.phase == "validation" and b.num_bytes == size * 32 * 8]
        assert len(tokens) >= 2
        held, within, begin = 0, 0, None
        for segment, event in trace.events():
            held += trace.blocks[event].num_bytes if event >= 0 else -trace.blocks[~event].num_bytes
            if segment.point.phase == "validation":
                begin = held if begin is None else begin
                within = max(within, held)
        assert held == begin - size * 32 * 8  # `begin` has the first of its tokens
        assert segment.point.step == 2
        peaks.append(within - held)
    # A pipeline takes samples one by one. Hidden states of a whole batch are fp32, of dim 128.
    tokens_more = 2 * 8 * 32 * 8
    assert peaks[1] - peaks[0] == tokens_more if pp == 2 else peaks[1] - peaks[0] > tokens_more + 8 * 32 * 128 * 4
