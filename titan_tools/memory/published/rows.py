"""Published peaks, row by row, as shared/data/memory_published.csv spells them. Torch-free."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass

from converters.errors import ConfigError
from titan_tools.memory.constants import GPUS, Gpu
from titan_tools.memory.replay.allocator import AllocatorName

OOM = "OOM"
_GPUS = {"A100": "a100-80", "H100": "h100-96", "H200": "h200", "B200": "b200"}  # what the column `hardware` names


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
    schedule: str
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
    has_flags: bool  # else not even the columns are sure: whether it was compiled is open
    has_step: bool  # else it may have been the first one

    @property
    def run(self) -> str:
        """The run in a few words."""
        degrees = {"FSDP": self.dp_shard, "replicas": self.dp_replicate, "TP": self.tp, "PP": self.pp, "CP": self.cp}
        layout = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        reshard = self.reshard in ("always", "never") and f"reshard {self.reshard}"
        extras = [f"AC {self.checkpointing}", reshard, self.is_compiled and "compiled", self.is_float8 and "float8"]
        size = f"{self.local_batch_size} × {self.seq_len}"
        return ", ".join([self.model.split(" ")[0], layout, size, *filter(None, extras)])

    @property
    def is_float8(self) -> bool:
        return self.float8 not in ("", "none")


def read_rows(text: str) -> list[Row]:
    """The rows of a CSV file with the columns of shared/data/memory_published.csv. Raises ConfigError."""
    return [_row(line) for line in csv.DictReader(io.StringIO(text))]


def _row(line: Mapping[str, str]) -> Row:
    return Row(
        id=line["id"],
        date=line["date"],
        gpu=_gpu(line["hardware"]),
        total_gib=float(line["gpu_total_gib"]),
        model=line["model"],
        seq_len=int(line["seq_len"]),
        local_batch_size=int(line["local_bs"]),
        world_size=int(line["world"]),
        dp_shard=int(line["dp_shard"]),
        dp_replicate=int(line["dp_rep"]),
        tp=int(line["tp"]),
        pp=int(line["pp"]),
        schedule=line["pp_sched"],
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
        allocator="expandable" if line["allocator"] == "expandable" else "classic",
        is_scored=line["flags_known"] == "yes",
        has_flags="flags not given" not in line["notes"],
        has_step="matches step-1" not in line["notes"],
    )


def _gpu(hardware: str) -> Gpu:
    for part, name in _GPUS.items():
        if part in hardware:
            return GPUS[name]
    raise ConfigError(f"hardware {hardware!r} is none that is known: {', '.join(_GPUS)}")
