"""Read published peaks from CSV rows in the spelling of shared/data/memory_published.csv. Torch-free."""

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from converters.common.errors import ConfigError, TitanError, UnsupportedError
from tests.published_memory import cells
from titan_tools.memory.replay.allocator import AllocatorName
from trainer.ranks.gpus import Gpu

T = TypeVar("T")

FIRST_DATE = "2024-03"  # of torchtitan's first published peak

# #1073: a microbatch is one sample. Earlier their number was set (`pipeline_parallel_microbatches`), and no published
# table states it
MICROBATCH_OF_ONE = "2025-04-08"


@dataclass(frozen=True, slots=True)
class Row:
    """One published number with the run behind it. `gib` is None where the run ran out of memory."""

    id: str
    date: str  # ISO, or a range that begins with one
    gpu: Gpu
    total_gib: float
    model: str  # as published
    family: str
    flavor: str
    seq_len: int
    local_batch_size: int
    world_size: int
    dp_shard: int
    dp_replicate: int
    tp: int
    pp: int
    schedule: str  # torch's name
    cp: int
    ep: int
    checkpointing: tuple[str, str]  # mode, option
    is_compiled: bool
    float8: cells.Float8Name
    has_async_tp: bool
    loss: cells.Loss
    reshard: str
    microbatch_size: int | None  # samples; None: not known
    norm: cells.NormName | None
    metric: cells.MetricName
    gib: float | None
    is_first_step: bool
    allocator: AllocatorName
    is_scored: bool  # all flags of the run are known, also its microbatches
    has_flags: bool  # else not even the columns are sure: whether it was compiled is open
    has_step: bool  # else it may have been the first one
    has_date: bool  # else each build that differs is possible, from FIRST_DATE on
    is_of_graph_trainer: bool  # torchtitan's experiment, which runs a graph of the whole step

    @property
    def run(self) -> str:
        """The run in a few words."""
        degrees = {"FSDP": self.dp_shard, "replicas": self.dp_replicate, "TP": self.tp, "PP": self.pp, "CP": self.cp}
        degrees["EP"] = self.ep
        layout = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        mode, option = self.checkpointing
        extras = [
            f"{self.local_batch_size} × {self.seq_len}",
            f"AC {mode}-{option}" if mode == "selective" else f"AC {mode}",
            self.pp > 1 and self.schedule,
            self.reshard in ("always", "never") and f"reshard {self.reshard}",
            self.is_compiled and "compiled",
            self.float8 and "float8",
            self.has_async_tp and "async TP",
        ]
        return ", ".join([self.model.split(" (")[0], *filter(None, [layout, *extras])])


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row without an estimate, and why. `is_by_design`: its run is of a kind that the estimate refuses."""

    id: str
    run: str
    why: str
    is_scored: bool
    is_by_design: bool


def read_rows(text: str) -> tuple[list[Row], list[RejectedRow]]:
    """The rows of a CSV file with the columns of shared/data/memory_published.csv, and those that cannot be read.

    Raises ConfigError for a file that has no rows of that kind.
    """
    lines = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
    if missing := {"id", "model", "value_gib"} - set(lines.fieldnames or ()):
        raise ConfigError(f"not a table of published rows: it has no column {', '.join(sorted(missing))}")
    rows, refusals = [], []
    for number, line in enumerate(lines, 1):
        line = {name: (line[name] or "").strip() for name in lines.fieldnames}
        line["id"] = line["id"] or f"row {number}"
        try:
            rows.append(_row(line))
        except TitanError as error:
            is_scored = line.get("flags_known", "").lower() == "yes"
            is_by_design = isinstance(error, UnsupportedError)
            refusals.append(RejectedRow(line["id"], line["model"], error.message, is_scored, is_by_design))
    return rows, refusals


def _row(line: Mapping[str, str]) -> Row:
    def read(column: str, as_what: Callable[..., T], **otherwise: T) -> T:
        text = line.get(column, "")
        try:
            return as_what(text, **otherwise)
        except TitanError as error:
            raise type(error)(f"column {column}: {error.message}") from error

    gpu = read("hardware", cells.gpu)
    family, flavor = read("model", cells.model)
    degrees = {name: read(name, cells.count, otherwise=1) for name in ("dp_rep", "tp", "pp", "cp")}
    world_size = read("world", cells.count, otherwise=0)
    rest = max(world_size // prod(degrees.values()), 1)
    dp_shard = rest if line.get("dp_shard") == "-1" else read("dp_shard", cells.count, otherwise=rest)
    allocator = read("allocator", cells.allocator)
    date = cells.release_date(line.get("stack", "")) if not line.get("date") else read("date", cells.date)
    has_open_microbatches = (
        degrees["pp"] > 1 and (date or FIRST_DATE) < MICROBATCH_OF_ONE and not line.get("microbatch_size")
    )
    notes = line.get("notes", "")
    return Row(
        id=line["id"],
        date=date or FIRST_DATE,
        gpu=gpu,
        total_gib=read("gpu_total_gib", cells.gib) if line.get("gpu_total_gib") else gpu.usable_gib,
        model=line["model"],
        family=family,
        flavor=flavor,
        seq_len=read("seq_len", cells.count),
        local_batch_size=read("local_bs", cells.count),
        world_size=world_size or dp_shard * prod(degrees.values()),
        dp_shard=dp_shard,
        dp_replicate=degrees["dp_rep"],
        tp=degrees["tp"],
        pp=degrees["pp"],
        schedule=read("pp_sched", cells.schedule) if degrees["pp"] > 1 else "",
        cp=degrees["cp"],
        ep=read("ep", cells.count, otherwise=1),
        checkpointing=read("ac", cells.checkpointing),
        is_compiled=read("compile", cells.flag),
        float8=read("float8", cells.float8),
        has_async_tp=cells.has_async_tp(*(text for name, text in line.items() if name != "source")),
        loss=read("loss", cells.loss),
        reshard=line.get("fsdp_reshard", ""),
        microbatch_size=read("microbatch_size", cells.count) if line.get("microbatch_size") else None,
        norm=read("norm", cells.norm),
        metric=read("metric", cells.metric),
        gib=read("value_gib", cells.peak_gib),
        is_first_step=line.get("step", "") in ("1", "step 1"),
        allocator=allocator or "expandable",
        is_scored=line.get("flags_known", "").lower() == "yes"
        and allocator is not None
        and date is not None
        and not has_open_microbatches,
        has_flags="flags not given" not in notes,
        has_step="matches step-1" not in notes,
        has_date=date is not None,
        is_of_graph_trainer="graph_trainer" in notes,
    )
