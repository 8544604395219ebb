"""Published peaks, row by row, as shared/data/memory_published.csv spells them. Torch-free."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass

from titan_tools.memory.constants import GPUS, Gpu
from titan_tools.memory.replay.allocator import AllocatorName
from trainer.config.load import load_config
from trainer.config.sections import Config

# The column `model` begins with one of these → preset, family, flavor
_MODELS = {
    "Llama3-8B": ("llama3_8b", "llama3", "8B"),
    "Llama2-7B": ("llama3_8b", "llama2", "7B"),
    "Qwen3-32B": ("qwen3_32b", "qwen3", "32B"),
}
_CHECKPOINTING = {
    "none": ("none", "op"),
    "full": ("full", "op"),
    "selective-op": ("selective", "op"),
}
OOM = "OOM"
# The column `float8` → keys of ours
FLOAT8 = {
    "tensorwise dynamic + fp8 all-gather": {"quantize.linear.float8.enable_fsdp_float8_all_gather": "true"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One published number with the run behind it. `gib` is None where the run ran out of memory."""

    id: str
    date: str  # ISO, or a range that begins with one
    gpu: Gpu
    total_gib: float
    model: str
    seq_len: int
    local_batch_size: int
    world_size: int
    dp_shard: int
    dp_replicate: int
    tp: int
    pp: int
    cp: int
    checkpointing: str
    is_compiled: bool
    float8: str
    loss: str
    reshard: str
    norm: str
    metric: str
    gib: float | None
    is_first_step: bool
    allocator: AllocatorName
    is_scored: bool  # all flags of the run are known
    notes: str

    @property
    def settings(self) -> tuple[str, ...]:
        """The run as a preset of ours and overrides of it. Only what keys can say: the rest is then.py's."""
        preset, family, flavor = _MODELS[self.model.split(" ")[0]]
        mode, option = _CHECKPOINTING[self.checkpointing]
        settings = {
            "model.name": family,
            "model.flavor": flavor,
            "training.seq_len": self.seq_len,
            "training.local_batch_size": self.local_batch_size,
            "training.loss": "plain",
            "parallelism.data_parallel_shard_degree": self.dp_shard,
            "parallelism.data_parallel_replicate_degree": self.dp_replicate,
            "parallelism.tensor_parallel_degree": self.tp,
            "parallelism.pipeline_parallel_degree": self.pp,
            "parallelism.context_parallel_degree": self.cp,
            "parallelism.fsdp_reshard_after_forward": self.reshard
            if self.reshard in ("always", "never")
            else "default",
            "activation_checkpoint.mode": mode,
            "activation_checkpoint.selective_ac_option": option,
            "optimizer.implementation": "foreach" if self.is_before_separate_ends else "fused",
        }
        if self.is_compiled:
            settings |= {"compile.enable": "true", "compile.components": "model"}
        if self.float8 != "none":
            settings |= {"model.converters": "quantize.linear.float8"} | FLOAT8[self.float8]
        return (preset, *(word for key, value in settings.items() for word in (f"--{key}", str(value))))

    @property
    def is_before_separate_ends(self) -> bool:
        """Before torchtitan's #1625: tok_embeddings and [norm, output] in FSDP groups of their own, fused AdamW."""
        return self.date < "2025-08-22"

    @property
    def run(self) -> str:
        """The run in a few words."""
        degrees = {"FSDP": self.dp_shard, "replicas": self.dp_replicate, "TP": self.tp, "PP": self.pp, "CP": self.cp}
        layout = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        extras = [self.checkpointing + " AC", "compiled" * self.is_compiled, "float8" * (self.float8 != "none")]
        size = f"{self.local_batch_size} × {self.seq_len}"
        return ", ".join([self.model.split(" ")[0], layout, size, *filter(None, extras)])


def load(settings: tuple[str, ...]) -> Config:
    return load_config(settings[0], settings[1:])


def read_rows(text: str) -> list[Row]:
    """The rows of a CSV file with the columns of shared/data/memory_published.csv."""
    return [_row(line) for line in csv.DictReader(io.StringIO(text))]


def _row(line: Mapping[str, str]) -> Row:
    return Row(
        id=line["id"],
        date=line["date"],
        gpu=GPUS["a100-80" if line["hardware"].startswith("A100") else "h100-96"],
        total_gib=float(line["gpu_total_gib"]),
        model=line["model"],
        seq_len=int(line["seq_len"]),
        local_batch_size=int(line["local_bs"]),
        world_size=int(line["world"]),
        dp_shard=int(line["dp_shard"]),
        dp_replicate=int(line["dp_rep"]),
        tp=int(line["tp"]),
        pp=int(line["pp"]),
        cp=int(line["cp"]),
        checkpointing=line["ac"],
        is_compiled=line["compile"] == "1",
        float8=line["float8"],
        loss=line["loss"],
        reshard=line["fsdp_reshard"],
        norm=line["norm"],
        metric=line["metric"],
        gib=None if line["value_gib"] == OOM else float(line["value_gib"]),
        is_first_step=line["step"] == "1",
        allocator=line["allocator"],
        is_scored=line["flags_known"] == "yes",
        notes=line["notes"],
    )
