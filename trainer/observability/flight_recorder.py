"""The Flight Recorder: torch remembers each rank's last collectives; they are written down when one hangs or fails.

NCCL's watchdog writes the file by itself when a collective times out. Gloo records too, but writes nothing: there a
collective that fails raises, and so does a rank that loses its peers, and the file is written here.
"""

import json
import os
import pickle
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from converters.errors import TitanError
from trainer.checkpoints.run_state import Progress
from trainer.config.sections import Comm

# What gloo, NCCL and the store say when a peer is slow, or gone
_TIMED_OUT = ("Timed out", "timed out", "Timeout", "timeout")
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Connection refused")
_PATIENCE_SECS = 3.0  # for the other ranks to time out too: whoever writes nothing is the one they wait for


class CollectiveFailure(TitanError):
    """A collective timed out or lost a peer: what is wrong is on another rank."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class FlightRecorder:
    """Where each rank's file lies, and how many collectives it tells; 0 = it is off."""

    folder: Path
    prefix: str
    num_remembered: int

    @staticmethod
    def of(settings: Comm, dump_folder: Path) -> "FlightRecorder":
        folder = dump_folder.resolve() / settings.save_traces_folder
        return FlightRecorder(folder, settings.save_traces_file_prefix, settings.trace_buf_size)

    def file(self, rank: int) -> Path:
        return self.folder / f"{self.prefix}{rank}"

    @property
    def reader(self) -> str:
        """What shows the files: torch's own, which wants the package tabulate beside it."""
        return f"torchfrtrace -j --allow-incomplete-ranks --prefix {self.prefix} {self.folder}"

    def switch_on(self) -> None:
        """Before the first process group, which is when torch reads these; names of torch 2.11 to 2.13."""
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(self.num_remembered)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(self.folder / self.prefix)  # torch adds the rank
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if self.num_remembered else "0"

    def clear(self, rank: int) -> None:
        """Forget this rank's file of an earlier run, and make room for one that NCCL's watchdog writes."""
        if not self.num_remembered:
            return
        try:
            self.file(rank).unlink(missing_ok=True)
            if _has_nccl():
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # a run need not fail, and be told, for what only a failure wants
            print(f"WARNING: rank {rank}: no record of collectives can be written: {error}", file=sys.stderr)

    def write(self, rank: int) -> bool:
        """Write this rank's file; whether there is one. Never raises: another error is on its way."""
        if not self.num_remembered:
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file(rank).write_bytes(_record())
        except Exception as problem:  # whatever it is, what led here is the news
            print(f"rank {rank}: its collectives cannot be written down: {problem!r}", file=sys.stderr)
            return False
        return True

    def silent_ranks(self, num_ranks: int) -> list[int]:
        """The ranks that have written nothing, after waiting for them a little."""
        until = time.monotonic() + _PATIENCE_SECS
        while (silent := [r for r in range(num_ranks) if not self.file(r).exists()]) and time.monotonic() < until:
            time.sleep(0.1)
        return silent


@contextmanager
def failures_told(recorder: FlightRecorder, progress: Progress) -> Iterator[None]:
    """Around a run: a collective that fails is told with its name, rank and step, and the record is written."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    recorder.clear(rank)
    try:
        yield
    except TitanError:
        raise  # says itself what is wrong
    except Exception as error:
        is_written = recorder.write(rank)
        why = _why(error)
        if not why:
            raise
        silent = recorder.silent_ranks(num_ranks) if is_written and why == "timed out" else []
        raise CollectiveFailure(
            f"rank {rank}, step {progress.step + 1}: {_last_collective(recorder)} {why}: {_in_short(error)}",
            hint=_hint(why, silent, recorder),
            tries=[recorder.reader] if is_written else [],
        ) from error


def _why(error: Exception) -> str:
    """What became of a collective; empty where the error is none of a collective's."""
    if not isinstance(error, RuntimeError):  # torch.distributed's own are RuntimeErrors too
        return ""
    of_torch = isinstance(error, dist.DistError) or type(error) is RuntimeError
    if of_torch and any(words in str(error) for words in _TIMED_OUT):
        return "timed out"
    if isinstance(error, dist.DistError) or (of_torch and any(words in str(error) for words in _LOST)):
        return "lost a peer"
    return ""


def _in_short(error: Exception) -> str:
    """The first sentence: before it gloo tells a place in its source, after it what users might do."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]


def _hint(why: str, silent: list[int], recorder: FlightRecorder) -> str:
    if why == "lost a peer":
        return "another rank ended before; its error comes first"
    if not silent:
        return ""
    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    return (
        f"{ranks} did not time out: stopped or stuck elsewhere, its machine gone, or unable to write {recorder.folder}"
    )


def _last_collective(recorder: FlightRecorder) -> str:
    """The last collective that this rank began."""
    entries = json.loads(_dump("trace_json")).get("entries", []) if recorder.num_remembered else []
    if not entries:
        return "a collective"
    last = max(entries, key=lambda entry: entry["record_id"])
    inputs = zip(last["input_dtypes"], last["input_sizes"], strict=False)
    told = " and ".join(f"{dtype} {sizes}" for dtype, sizes in inputs) or "nothing"
    return f"{last['profiling_name']} of {told} in {last['process_group'][1]}, its number {last['collective_seq_id']},"


def _record() -> bytes:
    """All that torch remembers, in the form that its `torchfrtrace` reads."""
    record = pickle.loads(_dump("trace"))
    if dist.get_backend() == "gloo":  # it leaves out which ranks a group has
        record["pg_config"] = {
            group.group_name: {"name": group.group_name, "desc": group.group_desc, "ranks": str(list(ranks))}
            for group, ranks in distributed_c10d._world.pg_group_ranks.items()
            if isinstance(group, dist.ProcessGroup)  # a number stands for groups that this rank is not in
        }
    return pickle.dumps(record)


def _has_nccl() -> bool:
    return "nccl" in dist.get_backend()  # under CPU offload "cpu:gloo,cuda:nccl"


def _dump(what: str) -> Any:
    """torch's record as bytes: `trace` (a pickle, for torchfrtrace) or `trace_json`."""
    backend = "nccl" if torch.cuda.is_available() and _has_nccl() else "fr"
    return getattr(c10d, f"_dump_{backend}_{what}")()
