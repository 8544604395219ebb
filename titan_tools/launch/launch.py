"""The launch record: nodes, ranks per node, rendezvous, environment and command of a job. Torch-free."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from converters.common.errors import ConfigError

TITAN = ("-P", "-m", "titan_tools")  # -P: a `trainer` folder in the working directory must not shadow ours
_ENDPOINT = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\s:\[\]/]+))(?::(?P<port>\d+))?")
_DEFAULT_PORT = 29400  # torchrun's


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address where the agents of several nodes meet: a port of one of them, which hosts torch's store."""

    host: str
    port: int
    timeout_secs: int

    @staticmethod
    def parse(endpoint: str, *, timeout_secs: int) -> "Rendezvous":
        """The rendezvous at `HOST:PORT`, `[IPv6]:PORT` or `HOST`. Raises ConfigError for other text."""
        match = _ENDPOINT.fullmatch(endpoint)
        port = int(match["port"] or _DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 1 << 16:
            raise ConfigError(
                f"--rdzv-endpoint {endpoint!r} is not an address HOST:PORT",
                hint="the name or address of one of the nodes, and a free port on it, the same on all nodes",
                tries=[f"--rdzv-endpoint {match['ipv6'] or match['name'] if match else 'HOST'}:{_DEFAULT_PORT}"],
            )
        return Rendezvous(match["ipv6"] or match["name"], port, timeout_secs)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A job of `nodes` × `nproc` ranks that all run one command."""

    command: tuple[str, ...]  # the words after `titan`
    nproc: int  # ranks per node
    nodes: int = 1
    rendezvous: Rendezvous | None = None  # None: all ranks are on this machine
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of the ranks, besides those of the agent
    program: tuple[str, ...] = TITAN  # Python's arguments before the command

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.nproc

    def node_command(self) -> tuple[str, ...]:
        """The words that start the ranks of one node, the same on every node: for the job file of a scheduler."""
        rendezvous = ("--nnodes", str(self.nodes), "--rdzv-endpoint", str(self.rendezvous)) if self.rendezvous else ()
        return ("titan", *self.command, "--nproc", str(self.nproc), *rendezvous)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of `titan train` that say which ranks this machine starts."""

    nproc: int | None = None  # None: all GPUs, or as many as the degrees need
    nodes: int | None = None  # None: this machine alone
    endpoint: str | None = None

    def given(self) -> list[str]:
        """The options about several nodes that were given, as they are typed."""
        words = {"--nnodes": self.nodes, "--rdzv-endpoint": self.endpoint}
        return [f"{option} {value}" for option, value in words.items() if value is not None]

    def refuse(self, why: str, *, tries: Sequence[str]) -> None:
        """Raise ConfigError if an option about several nodes was given."""
        if given := self.given():
            raise ConfigError(f"{' '.join(given)} {why}", tries=tries)

    def rendezvous(self, timeout_secs: int) -> Rendezvous | None:
        """Where the nodes meet; None for one machine. Raises ConfigError for one option without the other."""
        if self.nodes is None and self.endpoint is None:
            return None
        if self.nodes is None or self.endpoint is None:
            missing = "--nnodes N" if self.nodes is None else "--rdzv-endpoint HOST:PORT"
            raise ConfigError(
                f"{self.given()[0]} needs {missing}: the number of nodes, and the place where they meet",
                hint="the same command on each node; HOST is one of them",
                tries=["--nnodes 2 --rdzv-endpoint HOST:29400"],
            )
        return Rendezvous.parse(self.endpoint, timeout_secs=timeout_secs)


def environment_of_ranks(nproc: int) -> dict[str, str]:
    """Variables of `nproc` ranks on this machine, which share its cores and import this package."""
    # with -P the working directory is not on the import path of the ranks: add the folder of this package
    home = str(Path(__file__).resolve().parents[2])
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // nproc))
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": threads, "PYTHONPATH": path}
