"""Host memory that this process may still use: of the machine, and of the container or job that limits it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
# (folder, limit, usage, pages in the cache that the kernel gives back) of cgroup versions 2 and 1
_FILES = {
    "": (_CGROUPS, "memory.max", "memory.current", "inactive_file"),
    "memory": (_CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes() -> int:
    """Memory that can be allocated without swapping; 0 where the system does not say."""
    return min([_of_machine(), *_of_cgroups()])


def _of_machine() -> int:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _of_cgroups() -> Iterator[int]:
    """What each cgroup of this process leaves; in a container the path may be that outside of it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in _FILES:
                    root, limit, usage, cached = _FILES[controller]
                    place = root / path.lstrip("/")
                    for folder in (place, *place.parents):
                        if folder.is_relative_to(root):
                            yield from _left_in(folder, limit, usage, cached)


def _left_in(folder: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # no such cgroup here, or "max": without a limit
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield max(0, most - used + int(statistics.get(cached, 0)))
