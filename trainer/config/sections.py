"""The config: one frozen dataclass per TOML section, in the vocabulary of torchtitan's TOML files, and registered ones.

These are the supported keys; the vocabulary's other keys are in `refused.py`, with the reason. Defaults are
torchtitan's unless a line says otherwise. The types are the checks: `Literal` lists choices, `Annotated[…, Number(…)]`
limits; `types.py` enforces both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from converters.common.extensions import ExtensionError, check_name, where_defined
from trainer.config.types import Number, Pattern, describe, fit

Count = Annotated[int, Number(low=0)]
Positive = Annotated[int, Number(low=1)]
SeqLen = Annotated[int, Number(low=1, high=2**27)]  # far beyond any model: a typo is an error, not an allocation
Folder = Annotated[str, Pattern(r"(?![a-z][a-z0-9+.-]*://).*\S.*", "a folder, not an empty string or a URI")]
FolderOrURI = Annotated[str, Pattern(r".*\S.*", "a folder, not an empty string")]
SECTION = "section"  # in a field's metadata: the TOML name of a nested section
Weighted = tuple[Folder, Annotated[float, Number(above=0)]]  # a path, and its share of the samples
AllOr = Annotated[int, Number(low=1, also=(-1,))]  # -1 means all
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    dump_folder: Folder = "./outputs"
    """Folder for everything that a run writes; relative to the working directory."""
    description: str = "default job"
    """One line that describes the run in its log."""
    print_config: bool = False
    """Print the whole config, and where each value comes from, before the first step."""
    save_config_file: str | None = None
    """JSON file that rank 0 writes the merged config to, under job.dump_folder; unset = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    enable_profiling: bool = False
    """Write a torch.profiler trace on every rank, every `profile_freq` steps: `iteration_N/rankR_trace.json`."""
    save_traces_folder: Folder = "profile_traces"
    """Folder of the traces, under job.dump_folder."""
    profile_freq: Positive = 10
    """Steps of one cycle: waiting, warm-up, active."""
    profiler_active: Positive = 1
    """Recorded steps, at the end of a cycle."""
    profiler_warmup: Count = 3
    """Steps before them in which the profiler runs without recording."""
    enable_memory_snapshot: bool = False
    """Record CUDA allocations; write a snapshot every `profile_freq` steps, and on out-of-memory errors."""
    save_memory_snapshot_folder: Folder = "memory_snapshot"
    """Folder of the snapshots, under job.dump_folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    log_freq: Positive = 10
    """Steps between two log lines."""
    enable_tensorboard: bool = False
    """Write TensorBoard scalars on rank 0."""
    save_tb_folder: Folder = "tb"
    """Folder of the TensorBoard files, under job.dump_folder; they are in a folder of the run's name in it."""
    enable_wandb: bool = False
    """Log to Weights & Biases from rank 0, as the WANDB_* environment variables say; needs the package wandb."""
    disable_color_printing: bool = False
    """Print log lines without colors on a terminal."""
    save_for_all_ranks: bool = False
    """With enable_tensorboard: every rank writes its own scalars, each into a folder `rank_N` of the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str = "llama3"
    """Model family; `titan models` lists them."""
    flavor: str = "debugmodel"
    """Size of the model; `titan models` lists them."""
    hf_assets_path: str = "./tests/assets/tokenizer"
    """Folder with the model's tokenizer, or a name in the hub's cache; unset = that of the prepared data."""
    converters: tuple[Literal["quantize.linear.float8"], ...] = ()
    """Conversions of the model's modules, applied before it is parallelized."""
    print_after_conversion: bool = False
    """Print the model after these conversions."""
    attn_type: Literal["flex", "varlen"] | None = None
    """Kernel of attention within documents on a GPU; unset = the flavor's, else flex. Not in torchtitan, where it is a
    number of the flavor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    name: Literal["Adam", "AdamW"] = "AdamW"
    """AdamW decouples weight decay from the gradient, Adam adds it to the gradient."""
    lr: Annotated[float, Number(low=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Number(low=0, below=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Number(low=0, below=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Number(above=0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Number(low=0)] = 0.1
    """Weight decay, applied to every parameter."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Which of torch's implementations runs the update; results are equal up to rounding."""
    state_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the moments; unset = that of the parameters. Others are updated in float32 and rounded.
    Not in torchtitan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRScheduler:
    warmup_steps: Count = 200
    """Steps over which the learning rate rises linearly to optimizer.lr."""
    total_steps: Positive | None = None
    """Length of the schedule in steps; unset = training.steps."""
    decay_ratio: Annotated[float, Number(low=0, high=1)] | None = None
    """Share of the steps that decay, at the end (warm-up, stable, decay); unset = all after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Annotated[float, Number(low=0, high=1)] = 0.0
    """Final learning rate relative to the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    dataset: str = "c4_test"
    """Kind of data. `tokens`: an index made by `titan data prepare`. `text`, `jsonl`, `parquet` and `c4_test` (C4's own
    files): text, tokenized into an index under job.dump_folder when the run first starts. `c4`: streamed, from the hub
    or from C4's files. Or a name that a module in experimental.custom_import registers. Finite data is repeated in
    another order: training.steps is the length of the run."""
    dataset_path: str | None = None
    """Path of the data: the index, a file or a folder of text; without it `c4` is read from the hub."""
    dataset_mix: tuple[Weighted, ...] = ()
    """Instead of dataset_path, several paths with weights: `[["data/web", 0.7], ["data/code", 0.3]]`, of one kind and
    with one tokenizer. Not in torchtitan."""
    dataset_streams: Positive | None = None
    """Number of streams that `c4` is read in; the data-parallel degree must divide it. Unset = that of the checkpoint
    that the run resumes from; in a new run the smallest multiple of the degree from 64 on. Not in torchtitan."""
    local_batch_size: Positive = 8
    """Samples per forward pass of one data-parallel rank."""
    special_tokens: bool = False
    """Read special tokens written in text (<|im_start|>) as tokens, as `tok(text, add_special_tokens=False)` of
    transformers; else they are plain text. Also in validation. Not in torchtitan, which reads them as tokens."""
    global_batch_size: AllOr = -1
    """Samples per step over all ranks; -1 = local_batch_size × data-parallel degree, larger = gradient accumulation."""
    seq_len: SeqLen = 2048
    """Tokens per sample."""
    document_mask: Literal["none", "offsets", "eos"] | None = None
    """Whether attention stays within a document. `offsets`: yes, by where the data's documents begin; positions restart
    in each, and its last token has no target. `eos`: as torchtitan v0.2.2, a document ends with each end token;
    positions go on, and the token after it is a target. `none`: attention sees all earlier tokens of the sample. Unset
    = the flavor's: `offsets` where its attn_mask_type is block_causal, else `none`. Not in torchtitan."""
    packing: Literal["concatenated", "best_fit"] = "concatenated"
    """How documents become samples. `concatenated`: joined, and cut every seq_len tokens. `best_fit`: whole documents
    side by side, then padding; longer ones are cut. It needs the mask `offsets`. Not in torchtitan."""
    max_norm: Annotated[float, Number(above=0)] = 1.0
    """Gradients are clipped to this global norm."""
    steps: Positive = 10000
    """Length of the run in optimizer steps."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and gradients, and of optimizer states where optimizer.state_dtype is unset."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype in every layout: FSDP casts, also with nothing to shard; under DDP each module casts."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over data-parallel ranks, by FSDP also over a pipeline's microbatches.
    torchtitan v0.2.2 has only `float32`."""
    enable_cpu_offload: bool = False
    """FSDP keeps parameters, gradients and optimizer states in host memory, and copies what a layer needs."""
    loss: str = "chunked"
    """`chunked`: output projection and loss in `loss_chunks` chunks, without whole logits; `plain`; or a name that a
    module in experimental.custom_import registers. Not in torchtitan, which has `plain`."""
    loss_chunks: Count = 0
    """Chunks of the tokens of a forward pass, for `chunked`; 0 = by size: as few as keep the logits of a chunk, if they
    were in fp32, within 4 GiB with a compiled loss, else within 1 GiB. Not in torchtitan."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """On a NaN or infinite loss or gradient: stop before the update with exit code 4, or skip the update, warn and
    count it. Not in torchtitan."""
    expert_balance_rate: Annotated[float, Number(low=0)] | None = None
    """Change of `moe.expert_bias` per step, which balances experts without a loss; unset = the model's, 0 = none.
    Not in torchtitan, where it is a number of the model."""
    gc_freq: Positive = 50
    """Steps between runs of Python's garbage collector, which is disabled in between."""
    gc_debug: bool = False
    """Collect after every step, and report how many objects only the collector could free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataloader:
    pin_memory: bool = False
    """Put batches in pinned memory, so that copies to the GPU are asynchronous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    data_parallel_replicate_degree: Positive = 1
    """Ranks that replicate the shards (HSDP), or the whole model where no other degree is above 1 (DDP)."""
    data_parallel_shard_degree: AllOr = -1
    """Ranks that parameters are sharded over (FSDP); -1 = all remaining ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Reshard gathered parameters after forward; default = yes, unless there is a pipeline, or nothing to shard."""
    tensor_parallel_degree: Positive = 1
    """Ranks that share each matrix product (tensor parallelism)."""
    disable_loss_parallel: bool = False
    """Gather the logits before the loss instead of computing the loss on vocabulary shards."""
    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with its products; needs CUDA and a compiled model."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that share the layers (pipeline parallelism)."""
    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = None
    """Modules of each pipeline stage; unset = an even split."""
    pipeline_parallel_first_stage_less_layers: Count = 1
    """Layers fewer in the first stage, for its embedding."""
    pipeline_parallel_last_stage_less_layers: Count = 1
    """Layers fewer in the last stage, for its norm and output."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers per stage; unset = one stage per rank, two for Interleaved…, LoopedBFS and ZBVZeroBubble."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Pipeline schedule; …ZeroBubble compute gradients of weights separately, when a rank would be idle."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Samples per microbatch; divides training.local_batch_size."""
    context_parallel_degree: Positive = 1
    """Ranks that share each sequence (context parallelism)."""
    expert_parallel_degree: Positive = 1
    """Ranks that share the experts (expert parallelism): no more ranks, but those of dp_shard, cp and tp."""
    expert_tensor_parallel_degree: Positive = 1
    """With expert parallelism, ranks that share each expert's columns: 1, or tensor_parallel_degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    enable: bool = False
    """Save and load checkpoints."""
    folder: FolderOrURI = "checkpoint"
    """Folder of the checkpoints, under job.dump_folder, or a URI whose scheme a module of your own registers."""
    interval: Positive = 500
    """Steps between two checkpoints."""
    initial_load_path: str | None = None
    """Checkpoint to start from, of any format, or a name in the hub's cache; used until the run has its own."""
    initial_load_select: str | None = None
    """Which of its models, where it holds several: a name that the refusal lists. Not in torchtitan."""
    initial_load_model_only: bool = True
    """Load only its weights; false = optimizer, schedule and data position too."""
    last_save_model_only: bool = False
    """Save only the weights at the last step, which then cannot be resumed. On by default in torchtitan, off here."""
    keep_latest_k: Annotated[int, Number(low=0, without=(1,))] = 10
    """Number of checkpoints to keep; 0 = all. 1 is refused: the only one would be deleted while the next is written."""
    load_step: Annotated[int, Number(low=0, also=(-1,))] = -1
    """Step to resume from; -1 = the newest intact one."""
    exclude_from_loading: tuple[Literal["optimizer", "lr_scheduler", "dataloader", "train_state", "rng"], ...] = ()
    """Sections that are not loaded."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too, to test saving early."""
    load_only: bool = False
    """Load checkpoints but never save."""
    initial_load_in_hf: bool = False
    """Start from an HF folder: initial_load_path, or model.hf_assets_path if that is unset."""
    initial_load_in_hf_quantized: bool = False
    """Weights of that folder may be float8 with scales of blocks: they are dequantized to float32."""
    last_save_in_hf: bool = False
    """Export the last step's weights as an HF folder, `export-hf` under job.dump_folder."""
    last_save_in_torchtune: bool = False
    """Export them for torchtune, `export-torchtune`. Not in torchtitan."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of these exports, and of the last step with last_save_model_only."""
    max_failed_saves: Count = 1
    """Saves in a row that may fail, with a warning, before the run ends with an error; the last save may not fail.
    Not in torchtitan."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints asynchronously, in a thread or in a separate process; with a GPU through pinned memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """Which activations are recomputed in backward; with memory_budget the compiler chooses."""
    selective_ac_option: Annotated[str, Pattern(r"op|[1-9][0-9]*", "op, or every n-th layer as a number ≥ 1")] = "2"
    """For selective: `op` saves the results of costly operations, a number n recomputes every n-th layer."""
    memory_budget: Annotated[float, Number(low=0, high=1)] = 0.5
    """For memory_budget: 0 recomputes as much as possible, 1 what the compiler recomputes by default."""
    visualize_memory_budget_pareto: bool = False
    """For memory_budget: write the Pareto curve of time and memory as an SVG, under job.dump_folder."""
    early_stop: bool = False
    """Stop recomputing a layer when everything that backward needs is available."""
    preserve_rng_state: bool = True
    """Recompute with the random state of the forward pass."""
    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and dtypes of recomputed tensors with those of the forward pass."""
    debug: bool = False
    """If they differ, print the operations of both passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    enable: bool = False
    """Use torch.compile."""
    components: tuple[Literal["model", "loss"], ...] = ("model", "loss")
    """What is compiled: each transformer block, and the loss."""
    backend: str = "inductor"
    """Backend of torch.compile; `aot_eager` needs no C++ compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8:
    enable_fsdp_float8_all_gather: bool = False
    """FSDP all-gathers weights as float8, half the bytes; for tensorwise scaling."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights together after each update; for float8 all-gather."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Granularity of the scales; unset = tensorwise with the two options above."""
    filter_fqns: tuple[str, ...] | None = None
    """Modules to skip: parts of their FQNs, or `auto_filter_small_kn` for modules too small to benefit; unset =
    `output` with the chunked loss, where its casts would run uncompiled for each chunk, else none."""
    emulate: bool = False
    """Emulate float8 in float32 on machines without it; not with compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    init_timeout_seconds: Positive = 300
    """Timeout of collectives until the end of the first step, and in the first validation, in seconds."""
    train_timeout_seconds: Positive = 100
    """Timeout of all other collectives, in seconds."""
    trace_buf_size: Count = 20000
    """Collectives that the Flight Recorder keeps per rank, for a dump when one hangs; 0 = off."""
    save_traces_folder: Folder = "comm_traces"
    """Folder of the dumps, under job.dump_folder."""
    save_traces_file_prefix: Annotated[str, Pattern(r"[^/\0]+", "the beginning of a file name")] = "rank_"
    """Prefix of the dumps' names; the rank follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    enable: bool = False
    """Compute the loss on held-out data every `freq` steps and at the end."""
    dataset: str = "c4_validation"
    """Kind of data, as in training.dataset: the held-out part of `tokens`, all of a text, the beginning of a
    stream."""
    dataset_path: str | None = None
    """Path of the data; without it `c4_validation` is read from the hub."""
    dataset_mix: tuple[Weighted, ...] = ()
    """Instead of dataset_path, several: each loss is logged, and their weighted mean. Not in torchtitan."""
    local_batch_size: Positive = 8
    """Samples per forward pass of one data-parallel rank."""
    seq_len: SeqLen = 2048
    """Tokens per sample."""
    freq: Positive = 10
    """Steps between two validations."""
    steps: AllOr = -1
    """Batches per validation; -1 = all complete batches of the held-out part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Debug:
    seed: Annotated[int, Number(low=0, high=2**63 - 1)] | None = None
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Use only deterministic operations."""
    deterministic_warn_only: bool = False
    """Warn about nondeterministic operations instead of raising an error."""
    moe_force_load_balance: bool = False
    """Send tokens to the experts in turn, whatever the router's scores, to measure speed and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experimental:
    custom_import: str = ""
    """Module name or path, imported after the config is read: it may register families, sections of the config,
    datasets, losses and metric sinks. Commands without a config have `titan --import`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole config. `origins` maps `section.key` to where its value comes from; other values are defaults.

    `registered` has the sections that a module registers and the config sets, by name; `section` finds one by its type.
    """

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
    registered: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def section(self, record: type[Section]) -> Section:
        """The registered section of that type; with its defaults in a config that was made without it."""
        return next((each for each in self.registered.values() if isinstance(each, record)), record())

    def described(self) -> str:
        """job.description; the model and the number of steps if that has no value of its own."""
        if "job.description" in self.origins:
            return self.job.description
        return f"{self.model.name} {self.model.flavor}, {self.training.steps:,} steps"


@cache
def sections() -> dict[str, tuple[str, type]]:
    """Each built-in section's name in TOML, with its attribute of Config and its record."""
    records, others = get_type_hints(Config), ("registered", "origins")
    return {f.metadata.get(SECTION, f.name): (f.name, records[f.name]) for f in fields(Config) if f.name not in others}


registered_sections: dict[str, type] = {}


def register_section(name: str, record: type) -> None:
    """Add a section to the config: a frozen dataclass with keyword-only fields, as those of this file.

    Raises ExtensionError if it is not one, or lacks a default, or has types that no value of TOML can have.
    """
    what = f"section {name!r}"
    check_name("section", name, {*sections(), *registered_sections}, pattern=r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
    if not (isinstance(record, type) and is_dataclass(record)):
        raise ExtensionError(f"{what} is {record!r:.80}, which is not a dataclass")
    try:
        defaults, types = record(), get_type_hints(record, include_extras=True)
        for each in fields(record):
            describe(types[each.name])  # KeyError for a type that no value of TOML has
            fit(types[each.name], getattr(defaults, each.name))
    except (TypeError, ValueError, KeyError, NameError) as error:
        raise ExtensionError(
            f"{where_defined(record)}: {what}: every field needs a default that is of its type: {error}",
            hint="types are bool, int, float, str, Literal and tuples of these; trainer/config/sections.py has limits",
        ) from None
    registered_sections[name] = record
    kinds.cache_clear()


@cache
def kinds() -> dict[str, Any]:
    """Each supported key with its type."""
    records = {section: record for section, (_, record) in sections().items()} | registered_sections
    return {
        f"{section}.{name}": kind
        for section, record in records.items()
        for name, kind in get_type_hints(record, include_extras=True).items()
    }
