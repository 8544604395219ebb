"""Open torch's store at an address, in time and with the reason if that fails.

torch waits for an address that does not resolve longer than its timeout, and for one that answers otherwise without an
end; it reports both by tracebacks.
"""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_RETRY_SECS = 0.5


def listening(port: int) -> socket.socket:
    """A context in which the port of a store that is opened later accepts connections. Raises OSError if it cannot."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
    return socket.create_server(("", port))  # IPv6 may be switched off


def reach(address: str, port: int, deadline: float) -> str:
    """Wait until the address accepts connections. Returns "", or at the deadline why it does not."""
    failure = "no answer"
    while (timeout := deadline - time.monotonic()) > 0:
        results: list[str] = []
        # In a thread: a name server that does not answer takes longer than any timeout
        attempt = Thread(target=_connect, args=(address, port, timeout, results), daemon=True)
        attempt.start()
        attempt.join(timeout)
        if results == [""]:
            return ""
        if results:
            failure = results[0]
        time.sleep(min(_RETRY_SECS, max(0.0, deadline - time.monotonic())))
    return failure


def _connect(address: str, port: int, secs: float, results: list[str]) -> None:
    """Append "" if the address accepts a connection, else why not."""
    try:
        socket.create_connection((address, port), timeout=secs).close()
        results.append("")
    except socket.gaierror as error:
        results.append(f"the name does not resolve ({error.strerror})")
    except (OSError, UnicodeError) as error:
        results.append(getattr(error, "strerror", None) or str(error))


def open_store(
    address: str, port: int, deadline: float, *, hosts: bool, world_size: int | None = None, use_libuv: bool = True
) -> "Store":
    """A client of the store at an address; with the store itself if this process `hosts` it.

    Raises ConnectionError, at the deadline at the latest, if what listens there is not a store.
    """
    import torch.distributed as dist

    timeout = max(1.0, deadline - time.monotonic())
    results: list[Any] = []

    def connect() -> None:
        try:
            results.append(
                dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
                    address,
                    port,
                    world_size,
                    hosts,
                    timedelta(seconds=timeout),
                    wait_for_workers=False,  # callers know which ranks are missing
                    multi_tenant=hosts,
                    use_libuv=use_libuv,
                )
            )
        except Exception as error:
            results.append(error)

    attempt = Thread(target=connect, daemon=True)  # torch waits without an end for an answer that never comes
    with _without_torchs_log():
        attempt.start()
        attempt.join(timeout)
    if results and not isinstance(results[0], Exception):
        return cast("Store", results[0])
    raise ConnectionError(str(results[0]).splitlines()[0] if results else f"no answer in {timeout:.0f} s")


@contextmanager
def _without_torchs_log() -> Iterator[None]:
    """Context in which nothing is written to stderr: torch logs each attempt to connect with a stack of C++ frames."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
