"""The config: one frozen dataclass per TOML section, in the vocabulary of torchtitan's TOML files.

Here are the keys that something reads; the vocabulary's other keys are in `refused.py`, with the reason. Defaults are
the vocabulary's unless a line says otherwise. The types are the check: `Literal` lists choices,
`Annotated[…, Number(…)]` limits; `types.py` enforces both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainer.config.types import Number, Pattern

Count = Annotated[int, Number(low=0)]
Positive = Annotated[int, Number(low=1)]
SeqLen = Annotated[int, Number(low=1, high=2**27)]  # beyond any model; a slip of the finger is told, not allocated
Folder = Annotated[str, Pattern(r".*\S.*", "a folder, not an empty string")]
SECTION = "section"  # in a field's metadata: its section's name in TOML, where that is nested
Weighted = tuple[Folder, Annotated[float, Number(above=0)]]  # a path, and its share of the samples
AllOr = Annotated[int, Number(low=1, also=(-1,))]  # -1 stands for "as many as there are"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    dump_folder: Folder = "./outputs"
    """Folder that everything a run writes lies under; relative to the working folder."""
    description: str = "default job"
    """One line that names the run in its log."""
    print_config: bool = False
    """Print the whole config, with origins, before the first step."""
    save_config_file: str | None = None
    """JSON file that rank 0 writes the merged config to, under job.dump_folder; unset = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    enable_profiling: bool = False
    """Write a trace of torch's profiler from every rank, every `profile_freq` steps: `iteration_N/rankR_trace.json`."""
    save_traces_folder: Folder = "profile_traces"
    """Folder of the traces, under job.dump_folder."""
    profile_freq: Positive = 10
    """Steps of one cycle: waiting, warm-up, active."""
    profiler_active: Positive = 1
    """Steps that a trace records, at the end of a cycle."""
    profiler_warmup: Count = 3
    """Steps before them that the profiler runs through without recording."""
    enable_memory_snapshot: bool = False
    """Record CUDA's allocations; write a snapshot every `profile_freq` steps, and when memory runs out."""
    save_memory_snapshot_folder: Folder = "memory_snapshot"
    """Folder of the snapshots, under job.dump_folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    log_freq: Positive = 10
    """Steps between two log lines."""
    enable_tensorboard: bool = False
    """Write TensorBoard scalars from the rank that logs."""
    save_tb_folder: Folder = "tb"
    """Folder for them, under job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases from rank 0, as the WANDB_* environment variables say; needs the package wandb."""
    disable_color_printing: bool = False
    """Plain log lines also on a terminal."""
    save_for_all_ranks: bool = False
    """With enable_tensorboard: every rank writes scalars, each into a folder `rank_N` of save_tb_folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str = "llama3"
    """Model family; `titan models` lists them."""
    flavor: str = "debugmodel"
    """The family's set of numbers; `titan models` lists them."""
    hf_assets_path: str = "./tests/assets/tokenizer"
    """Folder with the tokenizer that goes with the weights; left out, it is that of the prepared data."""
    converters: tuple[Literal["quantize.linear.float8"], ...] = ()
    """What changes the model's modules before it is parallelised."""
    print_after_conversion: bool = False
    """Print the model's modules after the converters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    name: Literal["Adam", "AdamW"] = "AdamW"
    """AdamW decays weights apart from the gradient, Adam adds the decay to it."""
    lr: Annotated[float, Number(low=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Number(low=0, below=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Number(low=0, below=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Number(above=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Number(low=0)] = 0.1
    """Weight decay, applied to every parameter."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Which of torch's kernels takes the step; the numbers are the same up to rounding."""
    state_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the moments; unset = that of the parameters. Another one is updated in float32 and rounded. No key of
    torchtitan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRScheduler:
    warmup_steps: Count = 200
    """Steps over which the learning rate rises linearly to optimizer.lr."""
    total_steps: Positive | None = None
    """Length of the whole curve in steps; unset = training.steps."""
    decay_ratio: Annotated[float, Number(low=0, high=1)] | None = None
    """Share of the steps that decays, at the end (warm-up, stable, decay); unset = all after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Annotated[float, Number(low=0, high=1)] = 0.0
    """Last learning rate over the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    dataset: str = "c4_test"
    """Kind of data. `tokens`: an index made by `titan data prepare`. `text`, `jsonl`, `parquet` and `c4_test` (C4's own
    files): text, turned into an index under job.dump_folder when the run first starts. `c4`: streamed, from the hub or
    from C4's files. Or what a module in experimental.custom_import registers. Data that ends begins again, in another
    order: training.steps says when a run is over."""
    dataset_path: str | None = None
    """Where the data lies: the index, a file or a folder of text; without it `c4` comes from the hub."""
    dataset_mix: tuple[Weighted, ...] = ()
    """In place of dataset_path, several with their shares: `[["data/web", 0.7], ["data/code", 0.3]]`, all of one kind
    and one tokenizer. No key of torchtitan's."""
    dataset_streams: Positive = 64
    """Streams that `c4` is read in; the data-parallel degree has to divide them. No key of torchtitan's."""
    local_batch_size: Positive = 8
    """Samples per forward pass of one data-parallel rank."""
    global_batch_size: AllOr = -1
    """Samples per step over all ranks; -1 = local_batch_size × data-parallel degree, larger = gradient accumulation."""
    seq_len: SeqLen = 2048
    """Tokens per sample."""
    max_norm: Annotated[float, Number(above=0)] = 1.0
    """Gradients are scaled down to this norm."""
    steps: Positive = 10000
    """Steps of the run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and gradients, and of optimizer states where optimizer.state_dtype is unset."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype in every layout: FSDP casts, also where it has nothing to shard; under DDP each module does."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Dtype in which FSDP reduces gradients."""
    enable_cpu_offload: bool = False
    """FSDP keeps parameters, gradients and optimizer states in host memory, and brings in what a layer needs."""
    loss: str = "chunked"
    """`chunked`: output projection and loss in `loss_chunks` pieces, so that whole logits never exist; `plain`; or the
    name that a module in experimental.custom_import registers. No key of torchtitan's, which has `plain`."""
    loss_chunks: Positive = 8
    """Pieces that the tokens of a forward pass are cut in, under `chunked`. No key of torchtitan's."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient leads to: stop before the update with exit code 4, or leave the update
    out, say so and count it. No key of torchtitan's."""
    gc_freq: Positive = 50
    """Steps between two runs of Python's garbage collector, which is off in between."""
    gc_debug: bool = False
    """Collect after every step, and say how many objects only the collector could free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataloader:
    pin_memory: bool = False
    """Batches lie in pinned memory, so that a GPU copies the next one while it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    data_parallel_replicate_degree: Positive = 1
    """Ranks that hold the same shards (HSDP); where no other degree is above 1, whole copies (DDP)."""
    data_parallel_shard_degree: AllOr = -1
    """Ranks that parameters are sharded over (FSDP); -1 = all ranks that the other degrees leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after forward; default = yes, unless there is a pipeline."""
    tensor_parallel_degree: Positive = 1
    """Ranks that share each matrix product."""
    disable_loss_parallel: bool = False
    """Gather the logits before the loss instead of computing it on vocabulary shards."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's collectives with its products; CUDA, and compile of the model."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that share the layers."""
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = None
    """Modules of each pipeline stage, written out; unset = an even split."""
    pipeline_parallel_first_stage_less_layers: Count = 1
    """Layers that the first stage gets less, for its embedding."""
    pipeline_parallel_last_stage_less_layers: Count = 1
    """Layers that the last stage gets less, for its norm and output."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers per stage; unset = one stage per rank, two for Interleaved…, LoopedBFS and ZBVZeroBubble."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Order of the microbatches; …ZeroBubble compute gradients of weights apart, where a rank would wait."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Samples per microbatch; divides training.local_batch_size."""
    context_parallel_degree: Positive = 1
    """Ranks that share each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    enable: bool = False
    """Save and load checkpoints."""
    folder: Folder = "checkpoint"
    """Folder of the step folders, under job.dump_folder."""
    interval: Positive = 500
    """Steps between two checkpoints."""
    initial_load_path: str | None = None
    """Checkpoint to start from, in any format that titan reads; used while the run has none of its own."""
    initial_load_model_only: bool = True
    """Take only the weights from it; false = optimizer, schedule and data position too."""
    last_save_model_only: bool = False
    """The last step's checkpoint holds only weights, and cannot be resumed. On by default in torchtitan, off here."""
    keep_latest_k: Annotated[int, Number(low=0, without=(1,))] = 10
    """Checkpoints kept; 0 = all. 1 is refused: while the next one is written nothing could be deleted."""
    load_step: Annotated[int, Number(low=0, also=(-1,))] = -1
    """Step to resume from; -1 = the newest complete one."""
    exclude_from_loading: tuple[Literal["optimizer", "lr_scheduler", "dataloader", "train_state", "rng"], ...] = ()
    """Sections that are not loaded."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to learn early whether saving works."""
    load_only: bool = False
    """Load, and never save."""
    initial_load_in_hf: bool = False
    """Start from an HF folder: initial_load_path, or model.hf_assets_path where that is unset."""
    last_save_in_hf: bool = False
    """After the last step write the weights as an HF folder too, `export-hf` under job.dump_folder."""
    last_save_in_torchtune: bool = False
    """The same for torchtune, `export-torchtune`. No key of torchtitan's."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of these exports, and of a last step with last_save_model_only."""
    max_failed_saves: Count = 1
    """Saves in a row that may fail, told loudly, before the run ends with an error; the last one may not. No key of
    torchtitan's."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints beside the training: in a thread, or in a process of its own fed through pinned memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """Which activations are recomputed in backward; memory_budget leaves the choice to the compiler."""
    selective_ac_option: Annotated[str, Pattern(r"op|[1-9][0-9]*", "op, or every n-th layer as a number ≥ 1")] = "2"
    """Under selective: `op` keeps the results of costly operations, a number n recomputes every n-th layer."""
    memory_budget: Annotated[float, Number(low=0, high=1)] = 0.5
    """Under memory_budget: 0 recomputes all that can be, 1 what the compiler would by itself."""
    visualize_memory_budget_pareto: bool = False
    """Under memory_budget: write the trade of time for memory as an SVG, under job.dump_folder."""
    early_stop: bool = False
    """Stop recomputing a layer once all that backward needs of it is there."""
    preserve_rng_state: bool = True
    """Recompute under the random state of the forward pass."""
    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and dtypes of what is recomputed with those of the forward pass."""
    debug: bool = False
    """Tell, where the two differ, which operations ran in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    enable: bool = False
    """Use torch.compile."""
    components: tuple[Literal["model", "loss"], ...] = ("model", "loss")
    """What is compiled: each transformer block, the loss."""
    backend: str = "inductor"
    """Backend of torch.compile; `aot_eager` needs no C++ compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8:
    enable_fsdp_float8_all_gather: bool = False
    """FSDP gathers weights as float8: half the bytes. For tensorwise scaling."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights in one go after each update. Goes with float8 all-gather."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Granularity of the scales; unset = tensorwise with the two options above."""
    filter_fqns: tuple[str, ...] = ()
    """Modules left alone: parts of their FQNs, or `auto_filter_small_kn` for those too small to gain."""
    emulate: bool = False
    """Compute in float32 what float8 would give, on machines without it; not with compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    init_timeout_seconds: Positive = 300
    """How long a collective may take up to the end of the first step, in seconds."""
    train_timeout_seconds: Positive = 100
    """The same, afterwards."""
    trace_buf_size: Count = 20000
    """Collectives that the Flight Recorder remembers of each rank, for a dump when one hangs; 0 = off."""
    save_traces_folder: Folder = "comm_traces"
    """Folder of the dumps, under job.dump_folder."""
    save_traces_file_prefix: Annotated[str, Pattern(r"[^/\0]+", "a file name's beginning")] = "rank_"
    """What the dumps' names begin with; the rank's number follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    enable: bool = False
    """Compute the loss on held-out data every `freq` steps and at the end."""
    dataset: str = "c4_validation"
    """Kind of data, as in training.dataset: of `tokens` the held-out part, of text all of it, of streams the
    beginning."""
    dataset_path: str | None = None
    """Where the data lies; without it `c4_validation` comes from the hub."""
    dataset_mix: tuple[Weighted, ...] = ()
    """In place of dataset_path, several: each is told by itself, and their mean by their shares. No key of
    torchtitan's."""
    local_batch_size: Positive = 8
    """Samples per forward pass of one data-parallel rank."""
    seq_len: SeqLen = 2048
    """Tokens per sample."""
    freq: Positive = 10
    """Steps between two validations."""
    steps: AllOr = -1
    """Batches per validation; -1 = all whole batches of the held-out part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Debug:
    seed: Annotated[int, Number(low=0, high=2**63 - 1)] | None = None
    """Seed of the weights and of the order of the data."""
    deterministic: bool = False
    """Use only deterministic operations."""
    deterministic_warn_only: bool = False
    """Warn of an operation that has no deterministic form instead of refusing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experimental:
    custom_import: str = ""
    """Dotted module, or path of one, imported once the config is read: it may register families, datasets and losses.
    Commands without a config take the same as `titan --import`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole config. `origins` maps `section.key` to where its value came from; what is not in it is a default."""

    job: JobSection = field(default_factory=JobSection)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    dataloader: Dataloader = field(default_factory=Dataloader, metadata={SECTION: "training.dataloader"})
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8, metadata={SECTION: "quantize.linear.float8"})
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    validation_dataloader: Dataloader = field(default_factory=Dataloader, metadata={SECTION: "validation.dataloader"})
    debug: Debug = field(default_factory=Debug)
    experimental: Experimental = field(default_factory=Experimental)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
