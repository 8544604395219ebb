"""Ranks of `titan infer` that a test starts itself, and what it can see of processes."""

import os
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from tests.dist.pool import FORK_SERVER
from titan_tools import cli

ARGUMENTS = ("--prompt", "-- def main(", "--max-new-tokens=24", "--temperature=0.9", "--top-k=40", "--seed=5")
TITAN = (sys.executable, "-P", "-m", "titan_tools")
OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TITAN_LAUNCH", "OMP_NUM_THREADS", "PYTHONPATH")
ROOT = Path(__file__).resolve().parents[2]


def outside() -> dict[str, str]:
    """The environment of a process that is no rank of a launch, and finds the packages here."""
    return {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH} | {"PYTHONPATH": str(ROOT)}


class Started:
    """Ranks that somebody else than titan has started: forked, so that none has to import torch again.

    The first reads `stdin`. With `patience` they wait no longer for each other, as if each were on its own machine.
    """

    def __init__(self, folder, *arguments, num=2, stdin=os.devnull, patience=None):
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.output = [folder / f"output_of_rank_{rank}" for rank in range(num)]
        self.processes = []
        for rank in range(num):
            streams = (stdin if rank == 0 else os.devnull, self.output[rank])
            given = (rank, num, self._store.port, [*map(str, arguments)], streams, patience)
            self.processes.append(FORK_SERVER.Process(target=_be_rank, args=given, daemon=True))
            self.processes[-1].start()

    def wait(self, rank, secs=240):
        """The exit code of a rank, which ends in that time."""
        assert wait([self.processes[rank].sentinel], timeout=secs), f"rank {rank} is still there"
        self.processes[rank].join()
        return self.processes[rank].exitcode


def _be_rank(rank, num, port, arguments, streams, patience):
    os.dup2(os.open(streams[0], os.O_RDONLY), 0)
    os.dup2(os.open(streams[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    for name in OF_A_LAUNCH:
        os.environ.pop(name, None)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = ["titan", *arguments]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  as a program of its own has them
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    import torch

    from titan_tools.infer import ranks

    torch.set_num_threads(1)
    if patience:
        ranks.COLLECTIVE_TIMEOUT, ranks.machine_identity = patience, lambda: (f"machine {rank}", "")
    cli.main()


def cpu_secs(pid):
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(holds, secs=60):
    deadline = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
