"""Saves at once, or beside the training: in a thread, or in a process of each rank's own. Settled when a run begins.

Beside the training a step is copied (`staging.py`) and written by the same code as at once, all ranks
together in a group of their own. Stock `dcp.async_save` ends where our commit begins: the sums of files and tensors,
the manifest, the rename and the retention window are agreed by all ranks after its last byte.
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

from converters.errors import CheckpointError, TitanError
from converters.sizes import format_bytes
from trainer.agree import on_first
from trainer.checkpoints.process import PROGRAM, Place
from trainer.checkpoints.staging import HostMemory, SharedMemory, Snapshot, SnapshotPlanner, take_snapshot
from trainer.checkpoints.write import StepToSave, save_step
from trainer.observability.log import note
from trainer.ranks import CHECKPOINT_TIMEOUT

_PATIENCE_SECS = 20  # for a process that has nothing left to do


class Saver(Protocol):
    """Writes steps, one at a time. Called by all ranks alike."""

    @property
    def error(self) -> BaseException | None: ...
    def open(self) -> None: ...
    def save(self, todo: StepToSave, nested: Mapping[str, Any]) -> None: ...
    def wait(self) -> BaseException | None: ...
    def close(self, *, at_once: bool) -> None: ...


def make_saver(async_mode: str, *, group: dist.ProcessGroup, on_committed: Callable[[int], None]) -> Saver:
    """`on_committed` hears each step that is written, on every rank; from a thread, where one saves."""
    if async_mode == "disabled":
        return SaveAtOnce(group, on_committed)
    where = InThread() if async_mode == "async" else InProcess(group)
    return SaveBeside(where, group, on_committed)


class SaveAtOnce:
    """The training waits."""

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


class Where(Protocol):
    """Who writes a snapshot, and the memory that he sees."""

    memory: HostMemory | SharedMemory

    def open(self) -> None: ...
    def write(self, todo: StepToSave, snapshot: Snapshot) -> None: ...
    def close(self, *, at_once: bool) -> None: ...


class SaveBeside:
    """The training goes on once a copy is taken. A thread looks after the one save that may be under way."""

    def __init__(self, where: Where, group: dist.ProcessGroup, on_committed: Callable[[int], None]):
        self._where, self._on_committed = where, on_committed
        self._is_coordinator = group.rank() == 0
        self._is_open = False
        self._thread: threading.Thread | None = None
        self._step = -1  # that the thread is about
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """What has gone wrong, as far as this rank knows by now."""
        return self._error

    def open(self) -> None:
        if not self._is_open:
            self._where.open()
            self._is_open = True

    def save(self, todo: StepToSave, nested: Mapping[str, Any]) -> None:
        assert self._thread is None and self._error is None, "one save at a time"
        self.open()
        snapshot = take_snapshot(nested, self._where.memory, is_coordinator=self._is_coordinator)
        if self._step == -1:
            size = format_bytes(snapshot.num_bytes)
            note(f"checkpoints are copied to {size} of host memory on rank 0, which are kept for the next one")
        self._step = todo.step
        # A daemon: a rank that fails must end, whatever is being written; without its manifest nothing is a step.
        self._thread = threading.Thread(target=self._write, args=(todo, snapshot), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, todo: StepToSave, snapshot: Snapshot) -> None:
        try:
            self._where.write(todo, snapshot)
            self._on_committed(todo.step)
        except BaseException as error:  # all of it is the training's to raise
            self._error = error
            note(f"WARNING: the save of step {todo.step} failed: {error}")

    def wait(self) -> BaseException | None:
        """Wait for the save under way; what went wrong with it, told once."""
        if self._thread is not None:
            if self._thread.is_alive():
                note(f"waiting for step {self._step}, which is still being written")
                started = time.monotonic()
                self._thread.join()
                note(f"waited {time.monotonic() - started:.1f} s for step {self._step} to be written")
            self._thread = None
        error, self._error = self._error, None
        return error

    def close(self, *, at_once: bool) -> None:
        if self._is_open:
            self._where.close(at_once=at_once)
            self._is_open = False


class InThread:
    """The thread itself writes, in a gloo group that it has for itself: collectives of two threads would mix."""

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
        if not at_once:  # else the thread may be writing still
            self.memory.close()


class InProcess:
    """A process of this rank's own writes, together with those of the other ranks; Python's lock is not shared."""

    memory: SharedMemory
    _pipe: Connection

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def open(self) -> None:
        """Start it. It joins the others while the training goes on. To be called from the main thread.

        (The kernel ends it when the *thread* that started it ends.)
        """
        host, port = on_first(self._group, self._serve)
        self.memory = SharedMemory()
        self._pipe, theirs = Pipe()
        place = Place(
            os.getpid(),
            host,
            port,
            rank=self._group.rank(),
            world_size=self._group.size(),
            pipe=theirs.fileno(),
            memory=self.memory.descriptor,
        )
        home = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (home, *sys.path)))  # where custom_import found a family, too
        # It has no use for a GPU, and must not take cores from the training
        environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", *PROGRAM, *place.arguments()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(place.pipe, place.memory), env=environment
        )
        theirs.close()

    def _serve(self) -> tuple[str, int]:
        """On rank 0: the store where the processes meet, on a port that the system picks."""
        host = os.environ.get("MASTER_ADDR", "localhost")
        timeout = timedelta(minutes=5)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return host, self._store.port

    def write(self, todo: StepToSave, snapshot: Snapshot) -> None:
        try:
            self._pipe.send((todo, snapshot))
            error = self._pipe.recv()
        except (EOFError, OSError):
            raise CheckpointError(
                f"the process that writes checkpoints ended ({self._process.wait()}) while it wrote step {todo.step}",
                hint="the step was not saved; -9 is what the kernel does when memory runs out",
            ) from None
        if isinstance(error, TitanError):
            raise error
        if error is not None:
            raise CheckpointError(f"step {todo.step} was not saved: {error}", hint="the lines above say where")

    def close(self, *, at_once: bool) -> None:
        if at_once:
            self._process.kill()
        self._pipe.close()  # the end of its work
        try:
            self._process.wait(_PATIENCE_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.memory.close()
