"""Synchronous and asynchronous saves: in the training process, in a thread, or in a process per rank.

An asynchronous save copies a step to host memory (`staging.py`) and writes it with the same code as a synchronous one,
in a process group of its own. Stock `dcp.async_save` cannot be used: checksums, manifest, rename and retention need all
ranks after the last byte is written.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from converters.common.errors import CheckpointError, TitanError
from converters.common.sizes import format_bytes
from trainer.checkpoints.process import PROGRAM, WriterArguments
from trainer.checkpoints.staging import HostMemory, SharedMemory, Snapshot, SnapshotPlanner, take_snapshot
from trainer.checkpoints.write import StepToSave, save_step
from trainer.config.custom_import import imported_modules
from trainer.observability.log import note
from trainer.ranks.agree import on_first
from trainer.ranks.process_group import CHECKPOINT_TIMEOUT

_EXIT_SECS = 20  # for an idle writer process to end


class Saver(Protocol):
    """Writes steps, one at a time. All ranks make the same calls."""

    @property
    def error(self) -> BaseException | None: ...
    def open(self) -> None: ...
    def save(self, todo: StepToSave, nested: Mapping[str, Any]) -> None: ...
    def wait(self) -> BaseException | None: ...
    def close(self, *, at_once: bool) -> None: ...


def make_saver(async_mode: str, *, group: dist.ProcessGroup, on_committed: Callable[[int], None]) -> Saver:
    """`on_committed(step)` runs on every rank after each complete save, for asynchronous saves in a thread."""
    if async_mode == "disabled":
        return SynchronousSaver(group, on_committed)
    writer: SnapshotWriter = ThreadWriter() if async_mode == "async" else ProcessWriter(group)
    return AsynchronousSaver(writer, group, on_committed)


class SynchronousSaver:
    """Training waits for the save."""

    error = None

    def __init__(self, group: dist.ProcessGroup, on_committed: Callable[[int], None]):
        self._group, self._on_committed = group, on_committed

    def save(self, todo: StepToSave, nested: Mapping[str, Any]) -> None:
        save_step(todo, nested, group=self._group)
        self._on_committed(todo.step)

    def open(self) -> None:
        pass

    def wait(self) -> None:
        return None

    def close(self, *, at_once: bool) -> None:
        pass


class SnapshotWriter(Protocol):
    """Writes a snapshot from memory that it can read."""

    @property
    def memory(self) -> HostMemory | SharedMemory: ...

    def open(self) -> None: ...
    def write(self, todo: StepToSave, snapshot: Snapshot) -> None: ...
    def close(self, *, at_once: bool) -> None: ...


class AsynchronousSaver:
    """Training continues once the step is copied. A thread handles the save, at most one at a time."""

    def __init__(self, writer: SnapshotWriter, group: dist.ProcessGroup, on_committed: Callable[[int], None]):
        self._writer, self._on_committed = writer, on_committed
        self._is_coordinator = group.rank() == 0
        self._is_open = False
        self._thread: threading.Thread | None = None
        self._step = -1  # the step that the thread writes
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """The error of the current save, as far as this rank knows."""
        return self._error

    def open(self) -> None:
        if not self._is_open:
            self._writer.open()
            self._is_open = True

    def save(self, todo: StepToSave, nested: Mapping[str, Any]) -> None:
        assert self._thread is None and self._error is None, "one save at a time"
        self.open()
        snapshot = take_snapshot(nested, self._writer.memory, is_coordinator=self._is_coordinator)
        if self._step == -1:
            size = format_bytes(snapshot.num_bytes)
            note(f"checkpoints are copied to {size} of host memory on rank 0, which stay allocated")
        self._step = todo.step
        # A daemon: a rank that fails must end during a save too; a step without a manifest is not used.
        self._thread = threading.Thread(target=self._write, args=(todo, snapshot), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, todo: StepToSave, snapshot: Snapshot) -> None:
        try:
            self._writer.write(todo, snapshot)
            self._on_committed(todo.step)
        except BaseException as error:  # the training thread raises it
            self._error = error
            note(f"WARNING: the save of step {todo.step} failed: {error}")

    def wait(self) -> BaseException | None:
        """Wait for the current save; returns its error, once."""
        if self._thread is not None:
            if self._thread.is_alive():
                note(f"waiting for the save of step {self._step}")
                started = time.monotonic()
                self._thread.join()
                note(f"waited {time.monotonic() - started:.1f} s for the save of step {self._step}")
            self._thread = None
        error, self._error = self._error, None
        return error

    def close(self, *, at_once: bool) -> None:
        if self._is_open:
            self._writer.close(at_once=at_once)
            self._is_open = False


class ThreadWriter:
    """Writes in the saver's thread, with a gloo group of its own: collectives of two threads would mix."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=CHECKPOINT_TIMEOUT)

    def write(self, todo: StepToSave, snapshot: Snapshot) -> None:
        assert self._group is not None
        planner = SnapshotPlanner(snapshot, self.memory.get(snapshot.num_bytes))
        save_step(todo, {}, group=self._group, planner=planner)

    def close(self, *, at_once: bool) -> None:
        if not at_once:  # otherwise the thread may still be writing
            self.memory.close()


class ProcessWriter:
    """Writes in a process of its own per rank, which does not share Python's global lock with training."""

    memory: SharedMemory
    _pipe: Connection

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def open(self) -> None:
        """Start the process; it joins the others in the background. Only the main thread may call this.

        The kernel ends the process when the *thread* that started it ends.
        """
        host, port = on_first(self._group, self._serve)
        self.memory = SharedMemory()
        self._pipe, theirs = Pipe()
        arguments = WriterArguments(
            os.getpid(),
            host,
            ",".join(imported_modules),
            port,
            rank=self._group.rank(),
            world_size=self._group.size(),
            pipe=theirs.fileno(),
            memory=self.memory.descriptor,
        )
        home = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (home, *sys.path)))  # includes the folder that custom_import added
        # It needs no GPU, and must not take cores from training
        environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", *PROGRAM, *arguments.words()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(arguments.pipe, arguments.memory), env=environment
        )
        theirs.close()

    def _serve(self) -> tuple[str, int]:
        """On rank 0: the store by which the processes set up their group, on a free port."""
        host = os.environ.get("MASTER_ADDR", "localhost")
        timeout = timedelta(minutes=5)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return host, self._store.port

    def write(self, todo: StepToSave, snapshot: Snapshot) -> None:
        try:
            self._pipe.send((todo, snapshot))
            error = self._pipe.recv()
        except (EOFError, OSError):
            raise CheckpointError(
                f"the process that writes checkpoints ended ({self._process.wait()}) while it wrote step {todo.step}",
                hint="the step was not saved; -9 usually means that the host ran out of memory",
            ) from None
        if isinstance(error, TitanError):
            raise error
        if error is not None:
            raise CheckpointError(f"step {todo.step} was not saved: {error}", hint="see the traceback above")

    def close(self, *, at_once: bool) -> None:
        if at_once:
            self._process.kill()
        self._pipe.close()  # ends the process
        try:
            self._process.wait(_EXIT_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.memory.close()
