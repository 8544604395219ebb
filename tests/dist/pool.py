"""Pools of gloo ranks that live for a whole test session and run one case after another.

Starting a rank costs seconds of importing torch, running a case costs tenths of them. Ranks are forked from one server
that has imported everything once. Cases share the default process group and the meshes (see preload.py), and so what
DTensor remembers of them, which costs a third of a case to find out again. No group is destroyed: torch would give its
name to another.
"""

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CASE_SECS = 540
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.dist.preload"])


class RankFailure(AssertionError):
    """A rank raised; the message holds its traceback."""


class SplitBackwardRefused(RankFailure):
    """A case's schedule splits backward, which this torch is too old for; see conftest.py."""


_REFUSAL = re.compile(r"schedule (InterleavedZeroBubble|ZBVZeroBubble) needs torch 2\.13")


class Pool:
    """`size` ranks. After a failed case its ranks may wait for each other, so they are replaced."""

    def __init__(self, size: int):
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store = ""

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """`case(*args)` on every rank, torch.distributed being up; what each returned, by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, args))
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, timeout=CASE_SECS)
            if not ready:
                self._fail(f"ranks {[self._pipes.index(p) for p in waiting]} said nothing for {CASE_SECS} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    failed, results[rank] = pipe.recv()
                except EOFError:
                    self._fail(f"rank {rank} died")
                if failed:
                    self._fail(f"rank {rank}:\n{results[rank]}")
        for output in results.values():
            if isinstance(output, str) and _REFUSAL.search(output):  # a case that returns the error of its run
                raise SplitBackwardRefused(output)
        return [results[rank] for rank in range(self.size)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._store, ignore_errors=True)

    def _fail(self, message: str) -> None:
        self.stop()
        raise (SplitBackwardRefused if _REFUSAL.search(message) else RankFailure)(message)

    def _start(self) -> None:
        self._store = tempfile.mkdtemp()
        for rank in range(self.size):
            ours, theirs = FORK_SERVER.Pipe()
            process = FORK_SERVER.Process(
                target=_serve, args=(rank, self.size, str(Path(self._store) / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from trainer.ranks.process_group import use_one_worker

    use_one_worker()  # as ranks do that join a run
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=CASE_SECS)
    )
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            return
        try:
            result = case(*args)
            dist.barrier()
            if "torch._dynamo" in sys.modules:
                sys.modules["torch._dynamo"].reset()  # code compiled for other cases counts against a limit
            pipe.send((False, result))
        except BaseException:  # the session that asked must hear of it, whatever it is
            pipe.send((True, traceback.format_exc()))
            return
