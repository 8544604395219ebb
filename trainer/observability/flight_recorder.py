"""The Flight Recorder: write each rank's last collectives to a file when one times out or fails.

NCCL's watchdog writes the file itself when a collective times out. Gloo records, but writes nothing: a failed
collective raises, and the file is written here.
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

from converters.common.errors import TitanError
from trainer.checkpoints.run_state import Progress
from trainer.config.sections import Comm
from trainer.ranks.process_group import PEER_ENDED, TIMED_OUT

_WAIT_SECS = 3.0  # for the other ranks to time out too; those that write no file are the ones that the others wait for


class CollectiveFailure(TitanError):
    """A collective timed out or lost a peer; the cause is on another rank."""

    exit_code = 3
    kind = "rank"


@dataclass(frozen=True, slots=True)
class FlightRecorder:
    """The folder of the ranks' files, and the number of collectives in each; 0 = off."""

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
        """The command that shows the files: torch's own, which needs the package tabulate."""
        return f"torchfrtrace -j --allow-incomplete-ranks --prefix {self.prefix} {self.folder}"

    def switch_on(self) -> None:
        """Set torch's environment variables (2.11 to 2.13), which it reads when the first process group is made."""
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(self.num_remembered)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(self.folder / self.prefix)  # torch adds the rank
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1" if self.num_remembered else "0"

    def clear(self, rank: int) -> None:
        """Remove this rank's file of an earlier run, and make the folder that NCCL's watchdog writes to."""
        if not self.num_remembered:
            return
        try:
            self.file(rank).unlink(missing_ok=True)
            if _has_nccl():
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # not a reason to stop a run
            print(f"WARNING: rank {rank}: the record of collectives cannot be written: {error}", file=sys.stderr)

    def write(self, rank: int) -> bool:
        """Write this rank's file and return whether that succeeded. Never raises: it runs while handling an error."""
        if not self.num_remembered:
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file(rank).write_bytes(_record())
        except Exception as problem:  # the original error matters more
            print(f"rank {rank}: the record of collectives cannot be written: {problem!r}", file=sys.stderr)
            return False
        return True

    def silent_ranks(self, num_ranks: int) -> list[int]:
        """The ranks that have written no file within a few seconds."""
        until = time.monotonic() + _WAIT_SECS
        while (silent := [r for r in range(num_ranks) if not self.file(r).exists()]) and time.monotonic() < until:
            time.sleep(0.1)
        return silent


@contextmanager
def collective_failures(recorder: FlightRecorder, progress: Progress) -> Iterator[None]:
    """Context around a run: a failed collective raises CollectiveFailure with its name, rank and step."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    recorder.clear(rank)
    try:
        yield
    except TitanError:
        raise
    except Exception as error:
        is_written = recorder.write(rank)
        cause = _cause(error)
        if not cause:
            raise
        silent = recorder.silent_ranks(num_ranks) if is_written and cause == "timed out" else []
        raise CollectiveFailure(
            f"rank {rank}, step {progress.step + 1}: {_last_collective(recorder)} {cause}: {_first_sentence(error)}",
            hint=_hint(cause, silent, recorder),
            tries=[recorder.reader] if is_written else [],
        ) from error


def _cause(error: Exception) -> str:
    """The cause of a collective's failure; empty if the error is not a collective's."""
    if not isinstance(error, RuntimeError):  # torch.distributed's errors are RuntimeErrors
        return ""
    is_torchs = isinstance(error, dist.DistError) or type(error) is RuntimeError
    if is_torchs and any(words in str(error) for words in TIMED_OUT):
        return "timed out"
    if isinstance(error, dist.DistError) or (is_torchs and any(words in str(error) for words in PEER_ENDED)):
        return "lost a peer"
    return ""


def _first_sentence(error: Exception) -> str:
    """The first sentence of an error, without gloo's source location and without advice."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]


def _hint(cause: str, silent: list[int], recorder: FlightRecorder) -> str:
    if cause == "lost a peer":
        return "another rank ended first; see its error"
    if not silent:
        return ""
    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    return (
        f"{ranks} did not time out: stopped or stuck elsewhere, its machine down, or unable to write {recorder.folder}"
    )


def _last_collective(recorder: FlightRecorder) -> str:
    """A description of the last collective that this rank began."""
    entries = json.loads(_dump("trace_json")).get("entries", []) if recorder.num_remembered else []
    if not entries:
        return "a collective"
    last = max(entries, key=lambda entry: entry["record_id"])
    inputs = zip(last["input_dtypes"], last["input_sizes"], strict=False)
    shapes = " and ".join(f"{dtype} {sizes}" for dtype, sizes in inputs) or "nothing"
    return f"{last['profiling_name']} of {shapes} in {last['process_group'][1]}, number {last['collective_seq_id']},"


def _record() -> bytes:
    """torch's record, in the form that its `torchfrtrace` reads."""
    record = pickle.loads(_dump("trace"))
    if dist.get_backend() == "gloo":  # its record lacks the groups' ranks
        record["pg_config"] = {
            group.group_name: {"name": group.group_name, "desc": group.group_desc, "ranks": str(list(ranks))}
            for group, ranks in distributed_c10d._world.pg_group_ranks.items()
            if isinstance(group, dist.ProcessGroup)  # groups without this rank are numbers
        }
    return pickle.dumps(record)


def _has_nccl() -> bool:
    return "nccl" in dist.get_backend()  # with CPU offload "cpu:gloo,cuda:nccl"


def _dump(what: str) -> Any:
    """torch's record as bytes: `trace` (a pickle, for torchfrtrace) or `trace_json`."""
    backend = "nccl" if torch.cuda.is_available() and _has_nccl() else "fr"
    return getattr(c10d, f"_dump_{backend}_{what}")()
