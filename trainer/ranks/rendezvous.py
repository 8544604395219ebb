"""Join the ranks that a launcher has started: its variables, the store where ranks meet, and why a rank cannot join."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from converters.common.errors import ConfigError, TitanError, list_offenders
from trainer.ranks.store import listening, open_store, reach

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECS = 0.05
_GRACE_SECS = 1.0  # for the other ranks to read what rank 0 found, before the store ends with it
_WHO_SETS_THEM = (
    "torchrun sets these variables for each rank, and `titan train` and `titan infer --tp` where they start ranks"
)


class CannotJoin(ConfigError):
    """The address where ranks meet cannot be used."""


class LostRank(TitanError):
    """Another rank has not joined in time, has ended, or hangs."""

    exit_code = 3
    kind = "rank"


@dataclass(frozen=True, slots=True)
class Launched:
    """This rank, as a launcher's variables describe it."""

    rank: int
    world_size: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """This rank of a launch; None outside of one. Raises ConfigError with all of its variables that are wrong."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    numbers, problems = {}, []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = environment.get(name)
        if value is not None and value.strip().isdecimal():
            numbers[name] = int(value)
        elif value is not None:
            problems.append(f"{name} = {value!r} is not a number")
        elif name in ("RANK", "WORLD_SIZE"):
            problems.append(f"{name} is not set")
    for size in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        rank = size.replace("WORLD_SIZE", "RANK")
        if numbers.get(size) == 0:
            problems.append(f"{size} = 0 is no number of ranks")
        elif size in numbers and numbers.get(rank, 0) >= numbers[size]:
            problems.append(f"{rank} = {numbers[rank]} is not one of the {numbers[size]} ranks of {size}")
    if numbers.get("LOCAL_WORLD_SIZE", 0) > numbers.get("WORLD_SIZE", 1 << 30):
        problems.append(f"LOCAL_WORLD_SIZE = {numbers['LOCAL_WORLD_SIZE']} is more than WORLD_SIZE")
    if problems:
        raise _wrong_variables(problems)
    return Launched(numbers["RANK"], numbers["WORLD_SIZE"])


def _wrong_variables(problems: list[str]) -> ConfigError:
    message = problems[0] if len(problems) == 1 else "variables of the launcher are wrong:" + list_offenders(problems)
    return ConfigError(message, hint=_WHO_SETS_THEM, tries=["unset RANK WORLD_SIZE, to let titan start the ranks"])


def join_group(backend: str, *, timeout: timedelta, **options: Any) -> None:
    """Join the default process group that the launcher's variables describe, within `timeout`.

    `options`: of `init_process_group`. Raises ConfigError for a variable, an address or a port that is wrong, and
    LostRank if other ranks do not join.
    """
    import torch.distributed as dist

    store, launch = join_store(timeout)
    with explained_connections():
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),  # type: ignore[attr-defined]  # torch's own prefix
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            **options,
        )


def join_store(timeout: timedelta, environment: Mapping[str, str] = os.environ) -> "tuple[Store, Launched]":
    """The store at MASTER_ADDR, once all ranks are there."""
    deadline = time.monotonic() + timeout.total_seconds()
    launch = launched(environment)
    if launch is None:
        raise _wrong_variables(["RANK is not set", "WORLD_SIZE is not set"])
    address, port = _place(environment, launch.world_size)
    hosts = launch.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if port or not hosts:
        _require_reachable(address, port, launch, deadline, hosts=hosts)
    use_libuv = environment.get("USE_LIBUV", "1") == "1"
    try:
        store = open_store(address, port, deadline, hosts=hosts, world_size=launch.world_size, use_libuv=use_libuv)
    except ConnectionError as error:
        raise CannotJoin(
            f"rank {launch.rank}: what listens at MASTER_ADDR = {address!r}, MASTER_PORT = {port} is not the store of "
            f"rank 0: {error!s:.200}",
            hint="another program uses that port, or rank 0 has ended",
            tries=["MASTER_PORT=another port, the same for all ranks"],
        ) from error
    _meet(store, launch, deadline, attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store.set_timeout(timeout)
    return store, launch


def _place(environment: Mapping[str, str], world_size: int) -> tuple[str, int]:
    """Address and port of the store. A single rank may leave the choice of the port to the system: 0."""
    address, port = environment.get("MASTER_ADDR", "").strip(), environment.get("MASTER_PORT", "").strip()
    problems = [] if address else ["MASTER_ADDR is not set: the host of rank 0"]
    if not port:
        problems.append("MASTER_PORT is not set: a free port on the host of rank 0")
    elif not port.isdecimal() or not (world_size > 1) <= int(port) < 1 << 16:
        problems.append(f"MASTER_PORT = {port!r} is not a port: a number from 1 to 65535")
    if problems:
        raise _wrong_variables(problems)
    return address, int(port)


def _require_reachable(address: str, port: int, launch: Launched, deadline: float, *, hosts: bool) -> None:
    """Raise CannotJoin if this rank cannot listen on its port, at once, or cannot connect until the deadline."""
    try:
        with listening(port) if hosts else nullcontext():
            failure = reach(address, port, deadline)
    except OSError as error:
        raise CannotJoin(
            f"rank 0 cannot listen on MASTER_PORT = {port}: {os.strerror(error.errno or 0)}",
            hint="another run, or another program, uses this port of the host",
            tries=["MASTER_PORT=another port, the same for all ranks (torchrun: --master-port, --rdzv-endpoint)"],
        ) from None
    if failure:
        whose = "its own port by" if hosts else "the other ranks at"
        raise CannotJoin(
            f"rank {launch.rank} cannot reach {whose} MASTER_ADDR = {address!r}, MASTER_PORT = {port}: {failure}",
            hint="MASTER_ADDR is the host of rank 0"
            + ("" if hosts else ", which must have started and listen on that port (firewalls?)"),
            tries=[
                "MASTER_ADDR=host or address of rank 0, the same for all ranks (torchrun: --rdzv-endpoint HOST:PORT)"
            ],
        )


def _meet(store: "Store", launch: Launched, deadline: float, *, attempt: str) -> None:
    """Wait for all ranks; rank 0 tells the others when all are there, or what is wrong.

    `attempt`: how often torchrun has started the ranks anew, with the store of its agent.
    """
    keys = [f"titan/{attempt}/rank-{rank}" for rank in range(launch.world_size)]
    ready, started = f"titan/{attempt}/ready", time.monotonic()
    try:
        store.add(_count(keys[launch.rank]), 1)
        store.set(keys[launch.rank], str(launch.world_size))
        if launch.rank == 0:
            problem = _problem(store, keys, launch, deadline - _GRACE_SECS)
            store.set(ready, problem)
            if problem:
                time.sleep(_GRACE_SECS)
        else:
            problem = store.get(ready).decode() if _appears(store, [ready], deadline) else _missing(store, keys)
    except RuntimeError:  # torch's DistError
        raise LostRank(
            f"rank {launch.rank} has lost rank 0, which ended while ranks joined", hint="rank 0 reports the reason"
        ) from None
    if "WORLD_SIZE = " in problem:
        raise _wrong_variables([problem])
    if problem:
        raise LostRank(
            f"within {time.monotonic() - started:.0f} s {problem}",
            hint="not started, ended, or with another RANK, MASTER_ADDR or MASTER_PORT: its own output says more",
        )


def _appears(store: "Store", keys: list[str], deadline: float) -> bool:
    """Whether all keys are there before the deadline. By asking: where torch waits, it logs the timeout."""
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECS)
    return True


def _problem(store: "Store", keys: list[str], own: Launched, deadline: float) -> str:
    """The problem of the ranks as rank 0 sees it: one is missing, or counts other ranks. "" if nothing."""
    if not _appears(store, keys, deadline):
        return _missing(store, keys)
    sizes = [int(size) for size in store.multi_get(keys)]
    other = next((f"rank {rank} has {size}" for rank, size in enumerate(sizes) if size != own.world_size), "")
    return other and f"rank 0 has WORLD_SIZE = {own.world_size}, {other}"


def _missing(store: "Store", keys: list[str]) -> str:
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    twice = [rank for rank, key in enumerate(keys) if store.check([key]) and store.add(_count(key), 0) > 1]
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:8])}{', …' if len(missing) > 8 else ''}"
    more = f", and two ranks have RANK = {twice[0]}" if twice else ""
    return f"{who} of WORLD_SIZE {len(keys)} did not join{more}"


def _count(key: str) -> str:
    return f"{key}/count"


@contextmanager
def explained_connections() -> Iterator[None]:
    """Around what connects the ranks of a group to each other. Raises LostRank if that fails."""
    try:
        yield
    except RuntimeError as error:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        settings = [f"{name} = {os.environ[name]!r}" for name in names if os.environ.get(name)]
        text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).splitlines()[0])
        raise LostRank(
            f"rank {os.environ.get('RANK')} cannot connect to the other ranks: {text:.300}",
            hint=f"{' and '.join(settings)} must name network interfaces of this machine that the other ranks reach"
            if settings
            else "a rank has ended, or the machines do not reach each other by the interface that was chosen",
            tries=[f"{name}=interface" for name in names],
        ) from error
