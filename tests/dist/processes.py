"""Training in processes of their own, forked from the pools' server: for what kills, stops or signals a whole rank.

Each runs `trainer.train.main` as under the launcher, with its environment, signals, errors and Flight Recorder; the
store is the test's, as it is the agent's, so that no rank takes it along.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from tests.dist.pool import FORK_SERVER
from trainer.config.sections import Config

ENOUGH_SECS = 120


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, negative for a signal; the clock then; what it left for its parent to tell."""

    exit_code: int
    secs: float
    output: dict


class Running:
    """Ranks under way."""

    def __init__(self, config: Config, world_size: int, folder: Path, inject: Callable[[int], None] | None):
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._errors = [folder / f"error_of_rank_{rank}.json" for rank in range(world_size)]
        for file in self._errors:
            file.unlink(missing_ok=True)
        self.processes = []
        for rank in range(world_size):
            arguments = (rank, world_size, self._store.port, config, inject, self._errors[rank])
            self.processes.append(FORK_SERVER.Process(target=_run, args=arguments, daemon=True))
            self.processes[-1].start()

    def wait(self, *ranks: int) -> dict[int, Ended]:
        """Wait for these ranks, or all, to end."""
        waiting = {self.processes[rank].sentinel: rank for rank in ranks or range(len(self.processes))}
        ended = {}
        while waiting:
            ready = wait(list(waiting), timeout=ENOUGH_SECS)
            assert ready, f"ranks {list(waiting.values())} have not ended"
            for sentinel in ready:
                rank = waiting.pop(sentinel)
                self.processes[rank].join()
                file = self._errors[rank]
                output = json.loads(file.read_text())["titan"] if file.exists() else {}
                ended[rank] = Ended(self.processes[rank].exitcode, time.monotonic(), output)
        return ended


@contextmanager
def ranks(config: Config, world_size: int, folder: Path, inject: Callable[[int], None] | None = None):
    """Ranks that train; `inject(rank)` runs in each before anything else. None of them outlives the block."""
    running = Running(config, world_size, folder, inject)
    try:
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.join()


def _run(rank, world_size, port, config, inject, error_file):
    import torch

    from titan_tools.launch.rank import rank_errors
    from trainer.train import main

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TITAN_LAUNCH": str(os.getppid()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if inject:
        inject(rank)
    with rank_errors():
        main(config)
