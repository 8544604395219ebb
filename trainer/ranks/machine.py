"""This machine: its identity, and the host memory that may still be used. Torch-free."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from converters.common.errors import ConfigError
from converters.common.sizes import format_bytes

_MEMINFO, _OWN_CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
# (folder, limit, usage, what the kernel gives back before it ends a process) of cgroup versions 2 and 1
_FILES: dict[str, tuple[Path, str, str, tuple[str, ...]]] = {
    "": (_CGROUPS, "memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "memory": (
        _CGROUPS / "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


class Device(Protocol):
    """The device of ranks, as far as checks of a config ask: a torch.device, or HOST_CPU, which needs no torch."""

    @property
    def type(self) -> str: ...


class _HostCpu:
    type = "cpu"


HOST_CPU: Device = _HostCpu()


def machine_identity() -> tuple[str, str, str]:
    """Host name, boot id and PID namespace: a container has files and process ids of its own, like a machine."""
    boot_id, pid_namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    is_linux = boot_id.is_file() and pid_namespace.is_symlink()
    return socket.gethostname(), *((boot_id.read_text(), os.readlink(pid_namespace)) if is_linux else ("", ""))


def available_bytes() -> int | None:
    """Memory that can be allocated without swapping: what the machine, and the container or job that limits this
    process, leave. None if the system does not say.
    """
    return min([*_of_machine(), *_of_cgroups()], default=None)


def not_enough_memory(
    needed: int, available: int, *, whose: str, place: str, hint: str, tries: Sequence[str]
) -> ConfigError:
    """The error for `needed`, a lower bound, that exceeds what is available.

    `whose`: what needs it, `training`; `place`: `this machine`.
    """
    return ConfigError(
        f"{whose} needs at least {format_bytes(needed)} of memory on {place}: {format_bytes(available)} available",
        hint=hint,
        tries=[*tries, "--ignore-memory, to start nevertheless"],
    )


def _of_machine() -> Iterator[int]:
    with suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _of_cgroups() -> Iterator[int]:
    """Bytes that each cgroup of this process leaves; in a container the path may be that outside of it."""
    with suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in _FILES:
                    root, limit, usage, returned = _FILES[controller]
                    place = root / path.lstrip("/")
                    for folder in (place, *place.parents):
                        if folder.is_relative_to(root):
                            yield from _left_in(folder, limit, usage, returned)


def _left_in(folder: Path, limit: str, usage: str, returned: Sequence[str]) -> Iterator[int]:
    with suppress(OSError, ValueError):  # no such cgroup here, or "max": without a limit
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield max(0, most - used + sum(int(statistics.get(name, 0)) for name in returned))
